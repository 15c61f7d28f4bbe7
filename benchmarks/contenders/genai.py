"""onnxruntime-genai with the model of its own builder. Past and present share a buffer of the longest length."""

from __future__ import annotations

import numpy as np
import onnxruntime_genai as genai

from benchmarks.contenders.interface import Base


class Contender(Base[genai.Generator]):
    """The genai contender. Its cache cannot be filled from outside; given tokens work for one sequence only."""

    can_fill = False
    largest_batch = 1

    def __init__(self, model: str, threads: int) -> None:
        config = genai.Config(model)
        config.overlay(f'{{"model": {{"decoder": {{"session_options": {{"intra_op_num_threads": {threads}}}}}}}}}')
        self._model = genai.Model(config)
        self.version = f"onnxruntime-genai {genai.__version__}"

    def start(self, batch: int, capacity: int) -> genai.Generator:
        parameters = genai.GeneratorParams(self._model)
        parameters.set_search_options(max_length=capacity, batch_size=batch, do_sample=False)
        return genai.Generator(self._model, parameters)

    def step(self, state: genai.Generator, tokens: np.ndarray) -> np.ndarray:
        state.append_tokens(tokens.astype(np.int32))
        return np.array(state.get_logits(), np.float32).reshape(len(tokens), -1, self._vocabulary(state))[:, -1]

    def _vocabulary(self, state: genai.Generator) -> int:
        return state.get_logits().shape[-1]
