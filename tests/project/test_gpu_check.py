"""gpu-check without a GPU: it skips every check by name and writes a record; its checks work with doubles of CUDA."""

from __future__ import annotations

import json

import pytest

import benchmarks.own.gpu_check as gpu_check
from engines.library.gpu import Gpu, visible_gpus
from engines.running.tensorrt_stepper import TensorRTStepper
from exporter.common.errors import BackendError
from tests.conftest import TINY
from tests.support.doubles.cuda_double import ENGINE, CudaDouble, engine_record, tensorrt_double


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """The folder of the bundles that gpu-check exports; all tests share it, as all checks do."""
    return tmp_path_factory.mktemp("gpu-check")


@pytest.fixture
def in_folder(tmp_path, monkeypatch, bundles):
    monkeypatch.setattr(gpu_check, "FOLDER", bundles)
    monkeypatch.setattr(gpu_check, "RECORD", tmp_path / "gpu-check.json")
    return tmp_path


@pytest.mark.skipif(bool(visible_gpus()), reason="a GPU is visible: the checks run")
def test_without_a_gpu_every_check_is_skipped_by_name_and_a_record_is_written(in_folder, capsys):
    assert gpu_check.main([]) == 0
    record = json.loads((in_folder / "gpu-check.json").read_text())
    assert {row["state"] for row in record["rows"]} == {"skipped"} and len(record["rows"]) == 12
    assert all(row["detail"] for row in record["rows"])
    assert "tensorrt-rtx: CUDA graphs" in capsys.readouterr().err


def rows_on_a_gpu(monkeypatch, *rows):
    """The exit code of gpu-check on a machine with a GPU, whose rows are these."""
    monkeypatch.setattr(gpu_check, "visible_gpus", lambda: [Gpu("a double", "9.0")])
    monkeypatch.setattr(gpu_check, "run_checks", lambda: ([gpu_check.Row(*row) for row in rows], {}))
    return gpu_check.main([])


def test_a_gpu_on_which_nothing_passed_is_a_failure(in_folder, monkeypatch, capsys):
    skipped, passed, failed = (("a", state, "why") for state in ("skipped", "passed", "FAILED"))
    assert rows_on_a_gpu(monkeypatch, skipped, skipped) == 1
    assert "no check passed" in capsys.readouterr().err
    assert rows_on_a_gpu(monkeypatch, skipped, passed) == 0
    assert rows_on_a_gpu(monkeypatch, passed, failed) == 1


def test_only_what_is_not_installed_is_skipped(monkeypatch):
    def broken():
        raise BackendError("backend tensorrt: it is installed and does not load")

    monkeypatch.setitem(gpu_check.MODULES, "tensorrt", "a_module_that_is_not_there")
    row = gpu_check.run_row("parity", gpu_check.installed("tensorrt", broken))
    assert row.state == "skipped" and "pip install" in row.detail
    monkeypatch.setitem(gpu_check.MODULES, "tensorrt", "json")
    assert gpu_check.run_row("parity", gpu_check.installed("tensorrt", broken)).state == "FAILED"


@pytest.fixture
def over_doubles(in_folder, monkeypatch):
    """Engines whose build and run are doubles, at tiny sizes."""

    def build(bundle, backend, request):
        (bundle.folder / "model.engine").write_bytes(ENGINE)
        return engine_record(bundle, request.cache_capacity, request.max_batch, request.max_seq_len)

    def open_double(bundle, record, cuda, cuda_graphs=True):
        return TensorRTStepper(bundle, record, tensorrt_double(bundle, record, cuda), cuda, cuda_graphs)

    for name, value in {
        "visible_gpus": lambda: [Gpu("a double", "9.0")],
        "choose_backend": lambda name: None,
        "build_bundle": build,
        "open_tensorrt": open_double,
        "RuntimeCuda": CudaDouble,
        "refit_bundle": lambda bundle, backend, record: record,
        "CATALOGUE": {"llama3-8b": TINY},
        "BATCHES": (1, 2),
        "PAST_LENS": (10, 50),
        "CAPACITY": 64,
        "PREFILL": 8,
        "median_time_ms": lambda step, repeats: step() and 1.0,
    }.items():
        monkeypatch.setattr(gpu_check, name, value)
    monkeypatch.setattr(gpu_check, "copy_bandwidth", lambda cuda: 1e9)
    return gpu_check.Engines("tensorrt")


@pytest.mark.parametrize("check", ["parity", "aliases", "graphs", "refit"])
def test_a_check_passes_with_the_doubles(over_doubles, check):
    row = gpu_check.run_row(check, getattr(over_doubles, check))
    assert row.state == "passed", row.detail


def test_the_speed_row_has_every_batch_and_past_length(over_doubles):
    row = gpu_check.run_row("speed", over_doubles.speed)
    assert row.state == "passed", row.detail
    assert [(f["batch"], f["past_len"]) for f in over_doubles.figures["decode"]] == [(1, 10), (1, 50), (2, 10), (2, 50)]


def test_speed_is_measured_on_random_data(over_doubles, monkeypatch):
    run, zeros = TensorRTStepper.run, []

    def looked_at(self, feeds, cache, first_row=0):
        past = feeds["write_indices"].max()
        zeros.append(
            not feeds["hidden_states"].all() or (past and not cache.read(0, int(past))[0].any(axis=(0, 2)).all())
        )
        return run(self, feeds, cache, first_row)

    monkeypatch.setattr(TensorRTStepper, "run", looked_at)
    over_doubles.speed()
    assert zeros and not any(zeros)


def test_graphs_that_went_off_fail_their_row(over_doubles, monkeypatch):
    refusing = CudaDouble()
    refusing.refuses_captures = True
    monkeypatch.setattr(gpu_check, "RuntimeCuda", lambda: refusing)
    row = gpu_check.run_row("graphs", over_doubles.graphs)
    assert row.state == "FAILED" and "a capture failed" in row.detail


def test_a_wrong_engine_fails_its_parity_row(over_doubles, monkeypatch):
    run = TensorRTStepper.run
    monkeypatch.setattr(TensorRTStepper, "run", lambda *a: {name: x * 1.1 for name, x in run(*a).items()})
    row = gpu_check.run_row("parity", over_doubles.parity)
    assert row.state == "FAILED" and "logits differs" in row.detail


def test_a_write_outside_of_the_step_fails_its_alias_row(over_doubles, monkeypatch):
    run = TensorRTStepper.run

    def stray(self, feeds, cache, first_row=0):
        result = run(self, feeds, cache, first_row)
        cache.copy(1, 2, 3)
        return result

    monkeypatch.setattr(TensorRTStepper, "run", stray)
    assert gpu_check.run_row("aliases", over_doubles.aliases).state == "FAILED"
