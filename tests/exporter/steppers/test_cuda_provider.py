"""onnxruntime's CUDA provider, as far as a machine without a GPU shows it."""

from __future__ import annotations

import onnxruntime
import pytest

from exporter.common.errors import BackendError
from exporter.steppers import onnxruntime_stepper
from exporter.steppers.onnxruntime_stepper import OnnxruntimeStepper, open_session

CUDA = "CUDAExecutionProvider"


@pytest.fixture
def with_cuda(monkeypatch):
    """An onnxruntime that is built with CUDA. Returns the calls of `preload_dlls` and of sessions, in order."""
    calls = []
    session = onnxruntime.InferenceSession

    def on_the_cpu(graph, options, providers):
        calls.append(providers[0])
        return session(
            graph, options, providers=["CPUExecutionProvider"]
        )  # what onnxruntime does without the libraries

    def preload():
        print("Failed to load libcudart.so.13")
        calls.append("preload_dlls")

    onnxruntime_stepper._load_cuda_libraries.cache_clear()
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, "CPUExecutionProvider"])
    monkeypatch.setattr(onnxruntime, "InferenceSession", on_the_cpu)
    monkeypatch.setattr(onnxruntime, "preload_dlls", preload)
    yield calls
    onnxruntime_stepper._load_cuda_libraries.cache_clear()


def test_libraries_that_pip_has_installed_are_loaded_before_the_first_session_and_nothing_is_printed(
    with_cuda, tiny_bundle, capsys
):
    graph = str(tiny_bundle("block", "fp16").graph_path)
    for _ in range(2):
        open_session(graph, CUDA)
    open_session(graph)
    assert with_cuda == ["preload_dlls", CUDA, CUDA, "CPUExecutionProvider"]
    assert capsys.readouterr() == ("", "")


def test_a_provider_that_does_not_start_is_refused_with_the_extras_to_install(with_cuda, tiny_bundle):
    with pytest.raises(BackendError, match=r"does not start.*pip install 'onnxruntime-gpu\[cuda,cudnn\]'"):
        OnnxruntimeStepper.from_bundle(tiny_bundle("block", "fp16"), CUDA)


def test_bf16_on_cuda_is_refused_by_name_before_a_session_opens(with_cuda, tiny_bundle):
    with pytest.raises(BackendError, match="got a bf16 graph for CUDAExecutionProvider, expected fp16 or fp32"):
        OnnxruntimeStepper.from_bundle(tiny_bundle("block", "bf16"), CUDA)
    assert with_cuda == []
