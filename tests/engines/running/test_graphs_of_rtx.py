"""CUDA graphs: TensorRT-RTX records them itself and keeps its kernels in a file; a failed capture costs only speed."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil

import numpy as np
import pytest

from engines.running.tensorrt_stepper import TensorRTStepper
from exporter.bundle.bundle import Bundle
from exporter.bundle.engine_records import runtime_cache_name
from exporter.spec.feeds import step_feeds
from tests.conftest import TINY
from tests.support.doubles.cuda_double import ENGINE, CudaDouble, engine_record, tensorrt_double
from tests.support.doubles.rtx_double import RtxEngineDouble, rtx_double

CAPACITY = 32


@pytest.fixture
def bundle(tiny_bundle, tmp_path):
    folder = tmp_path / "bundle"
    shutil.copytree(tiny_bundle("model", "fp32").folder, folder)
    (folder / "model.engine").write_bytes(ENGINE)
    return Bundle.open(folder)


def opened(bundle, backend, cuda_graphs=True, **changes) -> tuple[TensorRTStepper, CudaDouble]:
    record, cuda = engine_record(bundle, CAPACITY, backend=backend), CudaDouble()
    record = dataclasses.replace(record, **changes)
    double = (rtx_double if backend == "tensorrt-rtx" else tensorrt_double)(bundle, record, cuda)
    return TensorRTStepper(bundle, record, double, cuda, cuda_graphs), cuda


def decoded(stepper, steps=6) -> np.ndarray:
    """The tokens of two sequences."""
    cache, x, got = stepper.new_cache(2, CAPACITY), np.array([[1, 2, 3], [4, 5, 6]]) % TINY.vocab_size, []
    for past_len in (0, *range(3, 3 + steps)):
        feeds = step_feeds("input_ids", x, np.full(2, past_len), np.full(2, x.shape[1]))
        x = stepper.run(feeds, cache)["logits"].argmax(-1)[:, None]
        got.append(x)
    cache.free()
    return np.concatenate(got, 1)


def test_tensorrt_rtx_records_the_graphs_itself_and_nothing_is_captured_by_hand(bundle):
    stepper, cuda = opened(bundle, "tensorrt-rtx")
    got = decoded(stepper)
    engine = RtxEngineDouble.latest
    assert (engine.recorded, engine.replayed, cuda.launches, cuda.live_graphs) == (1, 4, 0, 0)
    assert stepper.graph_count == 1 and stepper.cuda_graphs and len(engine.caches) == 1
    np.testing.assert_array_equal(got, decoded(opened(bundle, "tensorrt")[0]))
    off, _ = opened(bundle, "tensorrt-rtx", cuda_graphs=False)
    np.testing.assert_array_equal(got, decoded(off))
    assert RtxEngineDouble.latest.recorded == 0


def test_a_second_session_compiles_no_kernel_again(bundle):
    stepper, _ = opened(bundle, "tensorrt-rtx")
    decoded(stepper)
    assert RtxEngineDouble.latest.compiled == 2  # the prompt, and the decode steps
    stepper.close()
    stepper, _ = opened(bundle, "tensorrt-rtx")
    decoded(stepper)
    assert RtxEngineDouble.latest.compiled == 0


def damage(path):
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def stretch(path):
    path.write_bytes(b"[" * 100_000)


def to_link(path):
    target = path.parent.parent / "elsewhere"
    path.replace(target)
    path.symlink_to(target)


@pytest.mark.parametrize("harm", [damage, stretch, to_link])
def test_a_runtime_cache_that_does_not_fit_is_not_used(bundle, harm, caplog):
    stepper, _ = opened(bundle, "tensorrt-rtx")
    decoded(stepper)
    stepper.close()
    harm(bundle.folder / runtime_cache_name("model.engine"))
    caplog.set_level(logging.INFO)
    stepper, _ = opened(bundle, "tensorrt-rtx")
    decoded(stepper)
    assert RtxEngineDouble.latest.compiled == 2 and "not used" in caplog.text


@pytest.mark.parametrize("changes", [{"version": "1.8"}, {"sha256": "1" * 64}])
def test_a_runtime_cache_of_another_version_or_engine_is_not_used_and_then_replaced(bundle, changes):
    for differs in ({}, changes):
        stepper, _ = opened(bundle, "tensorrt-rtx", **differs)
        decoded(stepper)
        assert RtxEngineDouble.latest.compiled == 2
        stepper.close()
    header = json.loads((bundle.folder / runtime_cache_name("model.engine")).read_bytes().partition(b"\n")[0])
    assert set(changes.values()) <= set(header.values())


def test_a_folder_that_cannot_be_written_is_said_and_costs_only_speed(bundle, monkeypatch, caplog):
    def full(temporary, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("engines.running.runtime_cache.put_file_in_place", full)
    caplog.set_level(logging.INFO)
    stepper, cuda = opened(bundle, "tensorrt-rtx")
    decoded(stepper)
    stepper.close()
    assert "not saved" in caplog.text and cuda.closed
    assert [path.name for path in bundle.folder.glob("*runtime_cache*")] == []


def test_a_failed_capture_does_not_fail_the_step_and_graphs_go_off_once(bundle, caplog):
    expected = decoded(opened(bundle, "tensorrt", cuda_graphs=False)[0])
    stepper, cuda = opened(bundle, "tensorrt")
    cuda.refuses_captures = True
    np.testing.assert_array_equal(decoded(stepper), expected)
    assert not stepper.cuda_graphs and "CUDA graphs off" in stepper.description and cuda.launches == 0
    said = [record for record in caplog.records if "CUDA graphs go off" in record.getMessage()]
    assert len(said) == 1 and said[0].levelno == logging.WARNING
    stepper.close()
    assert cuda.allocations == 0 and cuda.live_graphs == 0


def test_a_context_that_cannot_be_made_does_not_fail_the_step(bundle, monkeypatch, caplog):
    expected = decoded(opened(bundle, "tensorrt", cuda_graphs=False)[0])
    stepper, cuda = opened(bundle, "tensorrt")
    monkeypatch.setattr("tests.support.doubles.cuda_double.EngineDouble.create_execution_context", lambda *_: None)
    np.testing.assert_array_equal(decoded(stepper), expected)
    assert not stepper.cuda_graphs and "cannot create an execution context" in caplog.text and cuda.live_graphs == 0


def test_the_double_refuses_a_capture_by_hand_of_tensorrt_rtx(bundle, caplog):
    stepper, _ = opened(bundle, "tensorrt-rtx")
    stepper._makes_contexts.captures_itself = False
    decoded(stepper)
    assert not stepper.cuda_graphs and "execute_async_v3 failed" in caplog.text
