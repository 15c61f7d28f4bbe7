"""Which decode steps get a CUDA graph, which graph goes for another, and what a repeated step computes once."""

from __future__ import annotations

import gc
import weakref

import numpy as np

from exporter.spec.feeds import step_feeds
from tests.conftest import MAX_POSITIONS
from tests.engines.running.test_tensorrt_stepper import CAPACITY, engine, tokens  # noqa: F401 - engine is a fixture
from tests.support.doubles.cuda_double import EngineDouble

MAX_GRAPHS = 8


def test_contexts_graphs_and_device_memory_do_not_grow_with_the_number_of_distinct_steps(engine, monkeypatch):  # noqa: F811
    contexts = weakref.WeakSet()
    create = EngineDouble.create_execution_context

    def counted(self, *arguments):
        context = create(self, *arguments)
        contexts.add(context)
        return context

    monkeypatch.setattr("engines.running.cuda_graphs.MAX_GRAPHS", MAX_GRAPHS)
    monkeypatch.setattr(EngineDouble, "create_execution_context", counted)
    _, stepper, cuda = engine(capacity=MAX_POSITIONS)
    n_rows = 14
    cache = stepper.new_cache(n_rows, MAX_POSITIONS)
    n_profiles, allocations = len(contexts), len(cuda._memory)
    for batch in (1, 2, 3, 4):
        for first_row in range(n_rows - batch + 1):  # decode steps: 50 graphs were they all kept
            feeds = step_feeds("input_ids", tokens(batch, 1), np.full(batch, 5), np.ones(batch, np.int64))
            for _ in range(2):  # the second one is captured
                stepper.run(feeds, cache, first_row)
        for length in range(2, 17):  # prefills of every length, over pasts of every length
            feeds = step_feeds("input_ids", tokens(batch, length), np.full(batch, length), np.full(batch, length))
            stepper.run(feeds, cache, 0)
    gc.collect()
    assert stepper.graph_count == cuda.live_graphs == MAX_GRAPHS
    assert len(contexts) == n_profiles + MAX_GRAPHS
    assert len(cuda._memory) == allocations


def decode_batches(stepper, batches) -> None:
    cache = stepper.new_cache(4, CAPACITY)
    for batch in batches:
        feeds = step_feeds("input_ids", tokens(batch, 1), np.zeros(batch, np.int64), np.ones(batch, np.int64))
        stepper.run(feeds, cache, 0)


def test_the_graph_that_is_used_least_goes_when_there_are_too_many(engine, monkeypatch):  # noqa: F811
    monkeypatch.setattr("engines.running.cuda_graphs.MAX_GRAPHS", 2)
    _, stepper, cuda = engine()
    decode_batches(stepper, (1, 1, 1, 1, 2, 2, 3, 3))  # the graph of 3 takes the place of that of 2
    assert stepper.graph_count == cuda.live_graphs == 2 and cuda.launches == 2
    assert sorted(key[2] for key in stepper._graphs._graphs) == [1, 3]


def test_batches_that_come_once_take_no_graph_and_drop_none(engine, monkeypatch):  # noqa: F811
    monkeypatch.setattr("engines.running.cuda_graphs.MAX_GRAPHS", 1)
    _, stepper, cuda = engine()
    decode_batches(stepper, (1, 1, 2, 1, 3, 1, 4, 1))
    assert (stepper.graph_count, cuda.launches) == (1, 3)


def test_graphs_leave_a_reserve_of_device_memory(engine, monkeypatch):  # noqa: F811
    _, stepper, cuda = engine()
    decode_batches(stepper, (1, 1, 2, 2))
    assert stepper.graph_count == 2
    monkeypatch.setattr(cuda, "free_bytes", lambda: 1 << 20)
    decode_batches(stepper, (3, 3, 3))
    assert stepper.graph_count == cuda.live_graphs == 0 and stepper.cuda_graphs


def test_what_does_not_change_between_steps_is_computed_once(engine, monkeypatch):  # noqa: F811
    _, stepper, _ = engine()
    cache, calls = stepper.new_cache(2, CAPACITY), []
    for thing, name in ((cache, "row_addresses"), (stepper._ranges, "first"), (stepper, "_outputs")):
        real = getattr(thing, name)
        monkeypatch.setattr(thing, name, lambda *a, real=real, name=name: calls.append(name) or real(*a))
    for past in range(10):
        stepper.run(step_feeds("input_ids", tokens(2, 1), np.full(2, past), np.ones(2, np.int64)), cache, 0)
    assert sorted(calls) == ["_outputs", "first", "row_addresses"]


def test_the_mask_of_an_earlier_step_leaves_nothing_behind(engine):  # noqa: F811
    _, stepper, _ = engine(cuda_graphs=True)
    long, short = np.ones((2, 9), np.int64), np.eye(1, 4, dtype=np.int64)
    stepper._padded(long, 16)
    np.testing.assert_array_equal(stepper._padded(short, 8), [[1, 0, 0, 0, 0, 0, 0, 0]])
