"""The inputs of every comparison: scenarios of several steps for units with a cache, sizes for components."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from exporter.spec.catalogue import ModelConfig
from exporter.spec.dtypes import numpy_dtype
from exporter.spec.feeds import step_feeds
from exporter.spec.graph_spec import GraphSpec
from exporter.spec.rope import rotation_table
from exporter.spec.tensors import BATCH, SEQUENCE, TOTAL, Contract


@dataclass(frozen=True)
class Scenario:
    """Consecutive steps over one cache.

    Attributes:
        name: name of the case that it covers.
        capacity: cache rows per sequence.
        steps: number of new tokens of each row, one tuple of B numbers for each step.
        left_pad: number of pads at the start of each row, B numbers; the first step's tokens include them.
        shift: number added to every position of real tokens.
    """

    name: str
    capacity: int
    steps: tuple[tuple[int, ...], ...]
    left_pad: tuple[int, ...] = ()
    shift: int = 0

    def feeds(
        self, contract: Contract, config: ModelConfig, rng: np.random.Generator
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yields the feeds of each step; tokens or hidden states are drawn from `rng`."""
        first_input = contract.inputs[0]
        past = np.zeros(len(self.steps[0]), np.int64)
        left_pad = np.array(self.left_pad or [0] * len(past))
        for lengths in self.steps:
            seq_lens = np.array(lengths)
            shape = (len(lengths), max(lengths))
            if first_input.dtype == "int64":
                x = rng.integers(0, config.vocab_size, shape)
            else:
                x = rng.standard_normal((*shape, config.hidden_size)).astype(numpy_dtype(first_input.dtype))
            feeds = step_feeds(first_input.name, x, past, seq_lens, left_pad)
            real = feeds["position_ids"] > 0
            feeds["position_ids"] = feeds["position_ids"] + self.shift * real
            yield feeds
            past = past + seq_lens


@dataclass(frozen=True)
class RunLimits:
    """The limits of the steppers of a comparison; None means no limit.

    Attributes:
        capacity: the only number of cache rows per sequence that they take.
        max_batch: largest number of sequences in one step.
        max_seq_len: largest number of new tokens in one step.
        ragged: whether the rows of a step may differ in length.
    """

    capacity: int | None = None
    max_batch: int | None = None
    max_seq_len: int | None = None
    ragged: bool = True

    def fit(self, scenario: Scenario) -> Scenario | None:
        """Returns the scenario with long prefills cut into steps, or None where its batch does not keep the limits."""
        n_rows = len(scenario.steps[0])
        if not self.ragged and any(len(set(lengths)) > 1 for lengths in scenario.steps):
            return None
        if self.max_batch is not None and n_rows > self.max_batch:
            return None
        longest = self.max_seq_len
        if longest is None or all(max(lengths) <= longest for lengths in scenario.steps):
            return scenario
        if n_rows > 1:
            return None
        steps = tuple(
            (min(longest, length - done),) for (length,) in scenario.steps for done in range(0, length, longest)
        )
        return dataclasses.replace(scenario, steps=steps)


def cache_scenarios(max_positions: int, limits: RunLimits = RunLimits()) -> list[Scenario]:
    """Returns the scenarios of a block, stack or model that fit its number of positions and the limits of the steppers.

    A graph of fewer than 8 positions has two: one decodes single tokens, one prefills all tokens but the last.
    """
    capacity = min(32, max_positions) if limits.capacity is None else limits.capacity
    return [fitted for scenario in _scenarios(capacity, max_positions) if (fitted := limits.fit(scenario)) is not None]


def _scenarios(capacity: int, max_positions: int) -> list[Scenario]:
    if capacity < 8:
        filled = Scenario("near capacity", capacity, ((capacity - 1, capacity - 1), (1, 1)))
        return [Scenario("decode", capacity, ((1,),) * capacity), *([filled] if capacity > 1 else [])]
    return [
        Scenario("empty cache", capacity, ((1,),)),
        Scenario("prefill", capacity, ((7, 7),)),
        Scenario("decode", capacity, ((5, 5), (1, 1), (1, 1), (1, 1))),
        Scenario("chunked prefill", capacity, ((3,), (4,), (1,))),
        Scenario("ragged batch", capacity, ((1, 4, 5), (1, 1, 1), (2, 1, 1))),
        Scenario("left-padded mask", capacity, ((6, 6, 6), (1, 1, 1)), left_pad=(0, 2, 5)),
        Scenario("shifted positions", capacity, ((4,), (1,)), shift=max_positions),
        Scenario("near capacity", capacity, ((capacity - 2,), (1,), (1,))),
    ]


COMPONENT_SIZES = (
    {BATCH: 1, SEQUENCE: 1, TOTAL: 1},
    {BATCH: 2, SEQUENCE: 3, TOTAL: 7},
    {BATCH: 3, SEQUENCE: 1, TOTAL: 9},
    {BATCH: 1, SEQUENCE: 16, TOTAL: 16},
)


def component_feeds(spec: GraphSpec, sizes: dict[str, int], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns random inputs of one component for the sizes of its symbolic axes; masks are causal, R is a rotation."""
    feeds = {}
    for tensor in spec.contract.inputs:
        shape = tensor.shape(sizes)
        if tensor.name == "R":
            feeds["R"] = rotation_table(spec.config, shape[0])[: shape[0]]
        elif tensor.dtype == "bool":
            past = sizes[TOTAL] - sizes[SEQUENCE]
            visible = np.arange(sizes[TOTAL]) <= past + np.arange(sizes[SEQUENCE])[:, None]
            feeds[tensor.name] = np.broadcast_to(visible, shape).copy()
        else:
            feeds[tensor.name] = rng.standard_normal(shape).astype(numpy_dtype(tensor.dtype))
    return feeds
