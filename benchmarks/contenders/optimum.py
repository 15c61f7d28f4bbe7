"""optimum's own export on onnxruntime, through ORTModelForCausalLM. The cache grows by concatenation in the graph."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
import onnxruntime
import torch
from optimum.onnxruntime import ORTModelForCausalLM

from benchmarks.contenders.interface import Base, halves


@dataclass
class State:
    batch: int
    past: tuple | None = None
    length: int = 0


class Contender(Base[State]):
    def __init__(self, model: str, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self._model = ORTModelForCausalLM.from_pretrained(model, session_options=options)
        self.version = f"optimum-onnx {version('optimum-onnx')}, onnxruntime {onnxruntime.__version__}"

    def start(self, batch: int, capacity: int) -> State:
        return State(batch)

    def step(self, state: State, tokens: np.ndarray) -> np.ndarray:
        total = state.length + tokens.shape[1]
        positions = torch.arange(state.length, total).expand(state.batch, -1)
        output = self._model(
            input_ids=torch.from_numpy(tokens),
            attention_mask=torch.ones(state.batch, total, dtype=torch.int64),
            position_ids=positions,
            past_key_values=state.past,
            use_cache=True,
        )
        state.past, state.length = output.past_key_values, total
        return output.logits[:, -1].numpy()

    def fill(self, state: State, past: list[np.ndarray]) -> None:
        def rows(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(np.broadcast_to(array, (state.batch, *array.shape))))

        state.past = tuple((rows(halves(past[index])), rows(past[index + 1])) for index in range(0, len(past), 2))
        state.length = past[0].shape[1]
