"""What sessions of onnxruntime keep does not grow with the number of distinct shapes."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import dataclasses
import gc
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from engines.comparison.observers import GraphObserver
from exporter.bundle.bundle import Bundle
from exporter.export import ExportRequest, export_bundle
from exporter.model.weights import RandomWeights
from exporter.spec.feeds import step_feeds
from exporter.spec.unit import Unit
from exporter.steppers.onnxruntime_stepper import OnnxruntimeStepper, open_session
from exporter.validation.by_layer import LayerValidation
from exporter.validation.cpu_graph import open_on_cpu
from exporter.validation.reference_weights import reference_weights
from runtime import DecodeSession
from tests.conftest import ROOT, TINY

OPENER = Path("exporter/steppers/onnxruntime_stepper.py")
N_LAYERS, POSITIONS = 12, 2048
WARM, NEW = 150, 300  # distinct shapes before and during the measurement
FIRST_LENGTH = 1100  # numpy keeps up to 7 freed blocks of every size below 1,024 bytes; larger arrays are not kept


@pytest.fixture
def mem_patterns(monkeypatch) -> list[bool]:
    """Whether each session that is opened keeps memory plans, in order."""
    opened: list[bool] = []
    plain = onnxruntime.InferenceSession

    def open_with(graph, options, **more):
        opened.append(options.enable_mem_pattern)
        return plain(graph, options, **more)

    monkeypatch.setattr("onnxruntime.InferenceSession", open_with)
    return opened


@pytest.mark.parametrize("cache", ["in_place", "growing"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_validation_keeps_no_memory_plans(tiny_bundle, tmp_path, mem_patterns, dtype, cache):
    bundle = tiny_bundle("model", dtype, logits="all", cache=cache)
    open_on_cpu(bundle, tmp_path).close()
    if cache == "in_place":
        list(LayerValidation(bundle, reference_weights(bundle), 0).run(lambda line: None))
    assert mem_patterns and not any(mem_patterns)


def test_decoding_and_the_audit_keep_no_memory_plans(tiny_bundle, mem_patterns):
    bundle = tiny_bundle("block")
    DecodeSession.open(bundle.folder, "onnxruntime", cache_capacity=16).close()
    GraphObserver(bundle.graph_path, bundle.manifest.contract, ["blocks.0.mlp.residual"]).close()
    open_session(onnx.load(bundle.graph_path).SerializeToString())
    assert len(mem_patterns) == 3 and not any(mem_patterns)


def test_one_function_opens_every_session():
    """So that what it sets holds for every session of the three packages."""
    calls = [
        path.relative_to(ROOT)
        for package in ("exporter", "engines", "runtime")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("InferenceSession")
    ]
    assert calls == [OPENER]


# --- measured ---------------------------------------------------------------------------------------------------------


class MallInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


def bytes_in_use() -> int:
    """Bytes that are allocated from the C library now."""
    gc.collect()
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        pytest.skip("this C library has no mallinfo2")
    mallinfo2.restype = MallInfo
    info = mallinfo2()
    return info.uordblks + info.hblkhd


@pytest.fixture(scope="module")
def long_stack(tmp_path_factory) -> Bundle:
    config = dataclasses.replace(TINY, n_layers=N_LAYERS, context_length=POSITIONS)
    unit = Unit.parse("stack", config, str(N_LAYERS))
    request = ExportRequest(config, unit, RandomWeights(config, 0), "fp32", POSITIONS)
    return export_bundle(request, tmp_path_factory.mktemp("long") / "bundle", validated=False)


def growth(bundle: Bundle) -> int:
    """Bytes that stay after NEW steps of lengths that were not run before."""
    with contextlib.closing(OnnxruntimeStepper.from_bundle(bundle)) as stepper:
        cache, x = stepper.new_cache(1, POSITIONS), np.zeros((1, 1, TINY.hidden_size), np.float32)

        def step(length: int) -> None:
            stepper.run(step_feeds("hidden_states", x, np.array([length - 1]), np.array([1])), cache)

        step(POSITIONS)  # the largest, so that onnxruntime's own memory has its size
        for length in range(FIRST_LENGTH, FIRST_LENGTH + WARM):
            step(length)
        before = bytes_in_use()
        for length in range(FIRST_LENGTH + WARM, FIRST_LENGTH + WARM + NEW):
            step(length)
        return bytes_in_use() - before


def test_new_shapes_leave_no_memory_behind(long_stack, monkeypatch):
    allowed = 20 * NEW  # bytes
    assert growth(long_stack) < allowed
    plain = onnxruntime.InferenceSession

    def with_plans(graph, options, **more):
        options.enable_mem_pattern = True
        return plain(graph, options, **more)

    monkeypatch.setattr("onnxruntime.InferenceSession", with_plans)
    assert growth(long_stack) > 10 * allowed  # what the measurement must be able to see
