"""transformers' LlamaForCausalLM in float32 with its DynamicCache: the reference for outputs, and a contender."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import transformers
from transformers import DynamicCache, LlamaForCausalLM

from benchmarks.contenders.interface import Base, halves


@dataclass
class State:
    batch: int
    cache: DynamicCache


class Contender(Base[State]):
    def __init__(self, model: str, threads: int) -> None:
        torch.set_num_threads(threads)
        transformers.utils.logging.disable_progress_bar()
        self._model = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.version = f"transformers {transformers.__version__}, PyTorch {torch.__version__}"

    def start(self, batch: int, capacity: int) -> State:
        return State(batch, DynamicCache(config=self._model.config))

    def step(self, state: State, tokens: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            output = self._model(
                input_ids=torch.from_numpy(tokens), cache=state.cache, use_cache=True, logits_to_keep=1
            )
        return output.logits[:, -1].numpy()

    def fill(self, state: State, past: list[np.ndarray]) -> None:
        def rows(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(np.broadcast_to(array, (state.batch, *array.shape))))

        for layer in range(len(past) // 2):
            state.cache.update(rows(halves(past[2 * layer])), rows(past[2 * layer + 1]), layer)
