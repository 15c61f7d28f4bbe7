"""The CUDA calls of `RuntimeCuda`, with a double of the runtime's functions."""

from __future__ import annotations

import threading

import cuda.bindings
import pytest

from engines.library.cuda import CudaError, RuntimeCuda
from exporter.common.errors import BackendError
from tests.support.doubles.cudart_double import INVALID_VALUE, SUCCESS, CudartDouble


@pytest.fixture
def runtime(monkeypatch):
    """Makes a double take the place of CUDA's runtime functions."""

    def make(**options) -> CudartDouble:
        double = CudartDouble(**options)
        monkeypatch.setattr(cuda.bindings, "runtime", double, raising=False)
        monkeypatch.setitem(__import__("sys").modules, "cuda.bindings.runtime", double)
        return double

    return make


def test_the_default_stream_of_another_library_may_work_while_ours_is_captured(runtime):
    double, errors = runtime(), []
    graph = RuntimeCuda().capture(lambda: errors.append(double.default_stream_work()))
    assert errors == [SUCCESS] and graph.executable in double.graphs


def test_a_call_uses_its_own_device_whatever_another_library_has_made_current(runtime):
    double = runtime()
    ours = RuntimeCuda(device=1)
    double.cudaSetDevice(0)
    with pytest.raises(CudaError):  # the double knows the rule
        ours.synchronize()
    ours.use_device()
    ours.synchronize()
    assert ours.allocate(256) >> 32 == 1
    failed = []

    def in_a_new_thread():
        try:
            ours.use_device()
            ours.synchronize()
        except CudaError as error:
            failed.append(error)

    thread = threading.Thread(target=in_a_new_thread)
    thread.start()
    thread.join()
    assert not failed


def test_a_device_that_is_not_there_is_refused(runtime):
    runtime(n_devices=1)
    with pytest.raises(BackendError, match="cudaErrorInvalidDevice"):
        RuntimeCuda(device=1)


@pytest.mark.parametrize("name", ["cudaStreamBeginCapture", "cudaGraphInstantiate"])
def test_a_failed_capture_leaves_no_graph(runtime, name):
    double = runtime()
    ours = RuntimeCuda()
    double.fails = {name: INVALID_VALUE}
    with pytest.raises(CudaError, match=name):
        ours.capture(lambda: None)
    assert not double.graphs
    double.fails = {}
    ours.destroy_graph(ours.capture(lambda: None))
    assert not double.graphs


def test_a_driver_that_is_too_old_is_refused_with_both_versions_and_the_extra(runtime):
    runtime(runtime_version=13020, driver_version=12080)
    expected = r"the driver knows CUDA 12\.8 at most, and the installed libraries need CUDA 13\.2; .*tensorrt-cu12"
    with pytest.raises(BackendError, match=expected):
        RuntimeCuda()
    runtime(runtime_version=12090, driver_version=12080)
    RuntimeCuda()  # a later minor version works with an older driver of the same major version
