"""Our runtime on onnxruntime, or on TensorRT where there is a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.contenders.bare_products import BareProducts
from benchmarks.contenders.interface import Base
from exporter.bundle.bundle import Bundle
from exporter.spec.limits import check_cache_capacity
from runtime import DecodeSession
from runtime.backends import open_stepper
from runtime.session import SlotState


@dataclass
class State:
    session: DecodeSession
    slots: list[int]


class Contender(Base[State]):
    """Our contender. Sessions of several capacities share one stepper, so the weights are in memory once."""

    def __init__(self, model: str, threads: int, backend: str = "onnxruntime") -> None:
        self._bundle = Bundle.open(model)
        self._stepper, self._capacity = open_stepper(self._bundle, backend, None, 1, None)
        self._fixed = backend == "tensorrt"
        self._bare: BareProducts | None = None
        self.version = self._stepper.description

    def start(self, batch: int, capacity: int) -> State:
        manifest, rows = self._bundle.manifest, self._capacity
        if not self._fixed:
            rows = check_cache_capacity(capacity, manifest.config, manifest.dtype, manifest.max_positions)
        return State(DecodeSession(self._bundle, self._stepper, batch, rows), [])

    def step(self, state: State, tokens: np.ndarray) -> np.ndarray:
        if not state.slots:
            state.slots = [state.session.acquire() for _ in tokens]
        logits = state.session.step(dict(zip(state.slots, tokens, strict=True)))
        return np.stack([logits[slot] for slot in state.slots])

    def fill(self, state: State, past: list[np.ndarray]) -> None:
        dtype = self._bundle.manifest.contract.cache_specs[0].dtype
        assert dtype == "fp32", "every compared variant has a float32 cache"
        shared = SlotState(past[0].shape[1], tuple(past), state.session.cache_origin)
        state.slots = [state.session.import_slot(shared) for _ in range(state.session.max_batch)]

    def step_bare(self, state: State) -> None:
        if self._bare is None or self._bare.batch != state.session.max_batch:
            self._bare = BareProducts(self._bundle, state.session.max_batch)
        self._bare.run()
