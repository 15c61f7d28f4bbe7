"""The eager definition in PyTorch, with a cache that is allocated once and written in place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.contenders.interface import Base
from exporter.checkpoint.formats import open_checkpoint
from exporter.model.block import prepare_qkv
from exporter.spec.feeds import step_feeds
from exporter.spec.graph_spec import GraphSpec
from exporter.spec.unit import Unit
from exporter.steppers.eager_stepper import EagerStepper
from exporter.steppers.protocol import HostCache


@dataclass
class State:
    cache: HostCache
    length: int = 0


class Contender(Base[State]):
    """The eager contender. It can also read its cache, so it computes the past for the other contenders."""

    def __init__(self, model: str, threads: int) -> None:
        torch.set_num_threads(threads)
        opened = open_checkpoint(model)
        self._config = opened.config
        spec = GraphSpec.checked(opened.config, Unit.parse("model", opened.config), "fp32")
        self._stepper = EagerStepper.from_weights(spec, opened.weights)
        self.version = self._stepper.description

    def start(self, batch: int, capacity: int) -> State:
        return State(self._stepper.new_cache(batch, capacity))

    def step(self, state: State, tokens: np.ndarray) -> np.ndarray:
        past_lens = np.full(len(tokens), state.length)
        logits = self._stepper.run(
            step_feeds("input_ids", tokens, past_lens, np.full(len(tokens), tokens.shape[1])), state.cache
        )["logits"]
        state.length += tokens.shape[1]
        return logits

    def fill(self, state: State, past: list[np.ndarray]) -> None:
        for row in range(state.cache.n_rows):
            state.cache.write(row, past)
        state.length = past[0].shape[1]

    def past_of(self, tokens: np.ndarray) -> list[np.ndarray]:
        """Computes the past in chunks. One layer needs no attention: its cache depends on the embedding only."""
        state = self.start(1, len(tokens))
        if self._config.n_layers > 1:
            for chunk in np.array_split(tokens, -(-len(tokens) // 512)):
                self.step(state, chunk[None])
            return state.cache.read(0, len(tokens))
        module = self._stepper.module
        block = module.blocks[0]
        with torch.inference_mode():
            x = block.attention_norm(module.embedding(torch.from_numpy(tokens[None])))
            projections = block.attention
            R = module.rotation[None, : len(tokens)]
            _, keys, values = prepare_qkv(x, R, projections.q_proj, projections.k_proj, projections.v_proj)
        return [keys[0].contiguous().numpy(), values[0].contiguous().numpy()]
