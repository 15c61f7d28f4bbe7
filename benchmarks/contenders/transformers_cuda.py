"""transformers on a GPU as its documentation recommends: a StaticCache, and compiled decode steps in CUDA graphs."""

from __future__ import annotations

import numpy as np
import torch
from transformers import StaticCache

from benchmarks.contenders import transformers as on_cpu
from benchmarks.contenders.interface import halves


class Contender(on_cpu.Contender):
    def __init__(self, model: str, threads: int, device: str = "cuda") -> None:
        super().__init__(model, threads)
        self._device = device
        self._model = self._model.to(device)
        self._decode = (
            torch.compile(self._model.forward, mode="reduce-overhead", fullgraph=True)
            if device == "cuda"
            else self._model
        )
        self.version += f", StaticCache on {device}"

    def start(self, batch: int, capacity: int) -> on_cpu.State:
        return on_cpu.State(batch, StaticCache(config=self._model.config, max_cache_len=capacity))

    def step(self, state: on_cpu.State, tokens: np.ndarray) -> np.ndarray:
        forward = self._decode if tokens.shape[1] == 1 else self._model
        with torch.inference_mode():
            x = torch.from_numpy(tokens).to(self._device)
            return forward(input_ids=x, cache=state.cache, use_cache=True, logits_to_keep=1).logits[:, -1].cpu().numpy()

    def fill(self, state: on_cpu.State, past: list[np.ndarray]) -> None:
        def rows(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(self._device).expand(state.batch, *array.shape)

        for layer in range(len(past) // 2):
            state.cache.update(rows(halves(past[2 * layer])), rows(past[2 * layer + 1]), layer)
