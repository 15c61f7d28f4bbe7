"""Execution contexts: all of an engine compute in one device buffer, whatever the number of graphs."""

from __future__ import annotations

import numpy as np
import pytest

from engines.running.contexts import Contexts
from engines.running.tensorrt_stepper import TensorRTStepper
from exporter.bundle.bundle import Bundle
from exporter.spec.feeds import step_feeds
from tests.engines.running.test_graphs_of_rtx import CAPACITY, bundle, decoded, opened  # noqa: F401 - bundle is a fixture
from tests.support.doubles.cuda_double import ContractError, CudaDouble, engine_record, tensorrt_double
from tests.support.doubles.rtx_double import rtx_double

BACKENDS = {"tensorrt": tensorrt_double, "tensorrt-rtx": rtx_double}


def decode_in_every_row(stepper: TensorRTStepper) -> None:
    """Decodes one sequence in each of 12 cache rows, twice. Each row has a graph of its own."""
    cache = stepper.new_cache(12, CAPACITY)
    for row in (*range(12), *range(12)):
        feeds = step_feeds("input_ids", np.array([[1]]), np.zeros(1, np.int64), np.ones(1, np.int64))
        stepper.run(feeds, cache, row)
    cache.free()


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_graphs_reserve_no_memory_of_their_own(bundle, backend):  # noqa: F811
    stepper, cuda = opened(bundle, backend)
    before = cuda.allocations
    decode_in_every_row(stepper)
    assert stepper.graph_count == 12
    assert cuda.reserved_by_contexts == 0 and cuda.allocations == before
    stepper.close()
    assert cuda.allocations == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_engine_that_needs_no_memory_gets_none(bundle, backend, monkeypatch):  # noqa: F811
    expected = decoded(opened(bundle, backend)[0])
    monkeypatch.setattr("tests.support.doubles.cuda_double.EngineDouble.device_memory_size_v2", 0)
    stepper, cuda = opened(bundle, backend)
    np.testing.assert_array_equal(decoded(stepper), expected)
    stepper.close()
    assert cuda.allocations == 0


def test_the_double_notices_a_context_without_memory_and_memory_that_is_too_small(bundle, monkeypatch):  # noqa: F811
    stepper, cuda = opened(bundle, "tensorrt")
    context = stepper._contexts[0]
    with pytest.raises(ContractError, match="too small or not aligned"):
        context.set_device_memory(cuda.allocate(1), 1)
    context._memory = (0, 0)
    monkeypatch.setattr(stepper, "cuda_graphs", False)
    with pytest.raises(ContractError, match="without device memory"):
        decode_in_every_row(stepper)


def test_the_buffer_is_not_lost_where_a_context_fails(tiny_bundle, bundle, monkeypatch):  # noqa: F811
    record, cuda = engine_record(bundle, CAPACITY), CudaDouble()

    def fails(self, profile, repeated=False):
        raise RuntimeError("no context")

    monkeypatch.setattr(Contexts, "new", fails)
    with pytest.raises(RuntimeError, match="no context"):
        TensorRTStepper(Bundle.open(bundle.folder), record, tensorrt_double(bundle, record, cuda), cuda)
    assert cuda.allocations == 0
