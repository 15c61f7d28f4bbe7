"""`python -m runtime doctor`: what works passes; what raises, crashes or hangs is a finding with its fix."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import numpy as np
import pytest

import runtime.doctor.examine
import runtime.doctor.installed
import runtime.doctor.probe
from engines.library.gpu import Gpu
from exporter.bundle.bundle import Bundle
from exporter.validation.bundle_validation import VALIDATION_COPIES
from runtime.commands.main import main
from runtime.doctor.examine import gpu_finding, machine_findings, probe_findings
from runtime.doctor.findings import FACT, FAILED, GOOD, Finding
from runtime.doctor.installed import conflict_findings, driver_problem, requirements, version_findings
from runtime.doctor.probe import PROBES, probe
from tests.conftest import ROOT

H200 = Gpu("NVIDIA Test H200", "9.0")


# --- this machine ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_the_project_is_tested_with_works_and_nothing_of_the_environment_is_said(capsys, monkeypatch):
    monkeypatch.setenv("PLANTED_TOKEN", "s3cret-of-the-user")
    code = main(["doctor", "--format", "json"])
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    states = {finding["name"]: finding["state"] for finding in document["findings"]}
    assert [name for name in PROBES if name not in states] == []
    working = (
        "python",
        "torch",
        "export",
        "decode: eager",
        "decode: onnxruntime CPU",
        "decode: interpreter",
        "build: tensorrt-rtx",
    )
    assert {name: states[name] for name in working} == dict.fromkeys(working, GOOD)
    assert document["passed"] == (FAILED not in states.values()) == (code == 0)
    assert "s3cret" not in captured.out + captured.err and "PLANTED_TOKEN" not in captured.out + captured.err


def test_a_failure_exits_1_and_its_fix_is_said(capsys, monkeypatch):
    monkeypatch.setattr(
        runtime.doctor.examine,
        "examine",
        lambda: iter([Finding("a", GOOD, "1"), Finding("b", FAILED, "[broken]", "fix b")]),
    )
    assert main(["doctor"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and "b: [broken]; to fix it: fix b" in captured.err
    assert main(["doctor", "--format", "json"]) == 1
    assert json.loads(capsys.readouterr().out)["passed"] is False


def test_the_table_shows_texts_as_they_are_in_80_columns(capsys, monkeypatch):
    detail = "not installed; comes with blockline[tensorrt], " + "a long text " * 20 + "/a/path/without/spaces" * 9
    found = [Finding("onnxruntime: other providers", FACT, detail), Finding("a short name", GOOD, "1")]
    monkeypatch.setattr(runtime.doctor.examine, "examine", lambda: iter(found))
    assert main(["doctor"]) == 0
    text = capsys.readouterr().err
    assert [line for line in text.splitlines() if len(line) > 80] == []
    rows = [line.split("│") for line in text.splitlines() if line.startswith("│")]
    shown = "".join("".join(row[3].split()) for row in rows)
    assert shown == "".join((detail + "1").split())


# --- broken pieces, planted ------------------------------------------------------------------------------------------


@pytest.fixture
def plant(tmp_path, monkeypatch):
    """Makes child processes import a module with the given content in place of the real one."""

    def make(name: str, content: str) -> None:
        (tmp_path / "planted").mkdir(exist_ok=True)
        (tmp_path / "planted" / f"{name}.py").write_text(content)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "planted"))

    return make


@pytest.mark.slow
def test_a_package_that_fails_to_import_is_a_finding_and_so_is_what_needs_it(plant):
    plant("onnxruntime", "raise ImportError('libcudart.so.99: cannot open shared object file')")
    names = ("import onnxruntime", "export", "decode: eager", "onnxruntime: other providers")
    found = list(probe_findings(names))
    assert [(finding.name, finding.state) for finding in found] == list(
        zip(names, (FAILED, FAILED, FACT, FAILED), strict=True)
    )
    assert "ImportError: libcudart.so.99" in found[0].detail and "pip install" in found[0].fix
    assert "not tried: the export failed" in found[2].detail


def test_a_package_that_kills_its_process_is_a_finding_and_the_rest_goes_on(plant):
    plant("onnxscript", "import os, sys; print('about to die', file=sys.stderr, flush=True); os.abort()")
    plant("onnx", "print('noise on stdout'); __version__ = '1.0'")
    first, second, third = probe_findings(("import onnx", "import onnxscript", "onnxruntime: other providers"))
    assert (first.state, second.state, third.state) == (GOOD, FAILED, FACT)
    assert "it killed its process (SIGABRT): about to die" in second.detail


def test_a_package_that_hangs_is_a_finding(plant, monkeypatch):
    plant("onnxscript", "import time; time.sleep(60)")
    monkeypatch.setattr(runtime.doctor.examine, "TIMEOUT_S", 3)
    (finding,) = probe_findings(["import onnxscript"])
    assert finding.state == FAILED and "did not end within 3 s" in finding.detail


@pytest.fixture
def block(tiny_bundle) -> Path:
    return tiny_bundle("block", "fp16").folder


def test_a_provider_that_raises_is_a_finding(block, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("no kernel image\nand more")

    monkeypatch.setattr("onnxruntime.InferenceSession", refuse)
    finding = probe("decode: onnxruntime CPU", block)
    assert finding.state == FAILED and "no kernel image" in finding.detail and "and more" not in finding.detail


def test_a_backend_that_computes_something_else_is_a_finding(block, monkeypatch):
    from exporter.steppers.onnxruntime_stepper import OnnxruntimeStepper

    assert probe("decode: onnxruntime CPU", block).state == GOOD
    run = OnnxruntimeStepper.run
    monkeypatch.setattr(
        OnnxruntimeStepper, "run", lambda *a, **k: {name: (x * 1.1).astype(x.dtype) for name, x in run(*a, **k).items()}
    )
    finding = probe("decode: onnxruntime CPU", block)
    assert finding.state == FAILED and "differ from the eager definition" in finding.detail
    monkeypatch.setattr(runtime.doctor.probe, "decode", lambda session: np.full((2, 8, 64), np.nan))
    assert probe("decode: onnxruntime CPU", block).state == FAILED


def test_a_provider_of_this_build_that_does_not_start_on_a_gpu_is_a_finding(block, monkeypatch):
    monkeypatch.setattr(
        "onnxruntime.get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
    )
    monkeypatch.setattr(runtime.doctor.probe, "visible_gpus", list)
    assert probe("decode: onnxruntime CUDA", block) == Finding(
        "decode: onnxruntime CUDA", FACT, "in this build of onnxruntime; no GPU is visible"
    )
    monkeypatch.setattr(runtime.doctor.probe, "visible_gpus", lambda: [H200])
    monkeypatch.setattr("onnxruntime.InferenceSession.get_providers", lambda self: ["CPUExecutionProvider"])
    finding = probe("decode: onnxruntime CUDA", block)
    assert finding.state == FAILED and "cuDNN" in finding.fix


def test_tensorrt_rtx_is_not_run_on_a_gpu_that_it_is_not_for(block, monkeypatch):
    monkeypatch.setattr(runtime.doctor.probe, "visible_gpus", lambda: [H200])
    finding = probe("decode: tensorrt-rtx", block)
    assert (
        finding.state == FACT and "for RTX GPUs, this is NVIDIA Test H200 with compute capability 9.0" in finding.detail
    )


def test_a_torch_for_a_newer_cuda_than_the_driver_knows_is_a_finding(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr(runtime.doctor.probe, "driver_cuda", lambda: (12, 4))
    finding = probe("import torch", tmp_path)
    assert finding.state == FAILED and "built for CUDA 13.0, the driver knows 12.4 at most" in finding.detail


def test_the_bundle_that_is_tried_is_the_probes_own(block):
    assert Bundle.open(block).manifest.config != runtime.doctor.probe.CONFIG


# --- versions --------------------------------------------------------------------------------------------------------


@pytest.fixture
def install(monkeypatch):
    """Makes these distributions look installed, besides the real ones; None makes one look missing."""
    real = runtime.doctor.installed.installed_version

    def pretend(**versions: str | None) -> None:
        monkeypatch.setattr(
            runtime.doctor.installed,
            "installed_version",
            lambda name: versions[name] if name in versions else real(name),
        )

    return pretend


def findings_of(found, name: str) -> list[Finding]:
    return [finding for finding in found if finding.name == name]


def test_versions_that_are_missing_or_out_of_range_have_a_fix(install):
    install(onnx="1.20.0", safetensors=None, transformers="6.1", gguf=None)
    found = list(version_findings())
    (onnx,), (safetensors,), (transformers,), (gguf,) = (
        findings_of(found, name) for name in ("onnx", "safetensors", "transformers", "gguf")
    )
    assert (onnx.state, onnx.detail) == (FAILED, "1.20.0, expected >=1.23")
    assert safetensors.state == FAILED and safetensors.fix == "pip install 'blockline'"
    assert transformers.state == FAILED and transformers.fix == "pip install 'blockline[smollm2]'"
    assert gguf.state == FACT and "comes with blockline[smollm2]" in gguf.detail


@pytest.mark.parametrize("version", ["12.9.0", "13.4.4"])
def test_the_extra_for_another_cuda_is_no_failure(install, version):
    install(**{"cuda-python": version})
    assert {finding.state for finding in findings_of(version_findings(), "cuda-python")} == {GOOD}
    install(**{"cuda-python": "11.0"})
    assert FAILED in {finding.state for finding in findings_of(version_findings(), "cuda-python")}


def test_another_onnxruntime_may_stand_in_place_of_the_one_asked_for(install):
    install(**{"onnxruntime-gpu": None, "onnxruntime": "1.31.1"})
    (finding,) = findings_of(version_findings(), "onnxruntime-gpu")
    assert finding == Finding("onnxruntime-gpu", GOOD, "not installed; onnxruntime 1.31.1 is in its place")


def test_another_python_is_a_failure(monkeypatch):
    monkeypatch.setattr("platform.python_version", lambda: "3.10.1")
    assert next(version_findings()) == Finding(
        "python", FAILED, "3.10.1, expected >=3.11,<3.15", "use a Python >=3.11,<3.15"
    )


def test_requirements_are_the_same_from_sources_and_from_metadata(monkeypatch):
    python, wanted = requirements()
    lines = [
        f'{requirement}; extra == "{extra}"' if extra else str(requirement)
        for requirement, extras in wanted.values()
        for extra in extras
    ]
    metadata = importlib.metadata.metadata("numpy")
    del metadata["Provides-Extra"], metadata["Requires-Python"]
    metadata["Requires-Python"] = python
    for extra in sorted({extra for _, extras in wanted.values() for extra in extras} - {""}):
        metadata["Provides-Extra"] = extra
    monkeypatch.setattr(runtime.doctor.installed, "_from_sources", lambda: None)
    monkeypatch.setattr("importlib.metadata.metadata", lambda name: metadata)
    monkeypatch.setattr(
        "importlib.metadata.requires", lambda name: [line.replace("; python", " ; python") for line in lines]
    )
    assert requirements()[0] == python
    assert {key: sorted(extras) for key, (_, extras) in requirements()[1].items()} == {
        key: sorted(extras) for key, (_, extras) in wanted.items()
    }


# --- what does not go together ---------------------------------------------------------------------------------------


def test_nothing_is_found_where_nothing_is_wrong(install):
    install(**{"tensorrt_rtx_cu13": "1.7.1", "cuda-bindings": "13.4.4"})
    assert list(conflict_findings(None, [])) == []
    assert list(conflict_findings((13, 0), [Gpu("NVIDIA RTX Test", "8.9")])) == []


def test_two_onnxruntimes_are_a_conflict(install):
    install(**{"onnxruntime-gpu": "1.31.1", "onnxruntime": "1.31.1"})
    (finding,) = conflict_findings(None, [])
    assert finding.state == FAILED and "pip uninstall -y onnxruntime onnxruntime-gpu" in finding.fix


def test_libraries_for_a_newer_cuda_than_the_driver_knows_are_a_conflict(install):
    install(**{"tensorrt_cu12": "10.15", "tensorrt_rtx_cu13": "1.7.1", "cuda-bindings": "13.4.4"})
    found = list(conflict_findings((12, 8), []))
    assert [finding.name for finding in found] == ["tensorrt_rtx_cu13 and the driver", "cuda-bindings and the driver"]
    assert "built for CUDA 13, the driver knows 12.8 at most" in found[0].detail and "for CUDA 12" in found[0].fix
    assert driver_problem((13, 2), (13, 0)) is None and driver_problem((12, 8), (13, 0)) is None


def test_tensorrt_rtx_alone_on_a_data_centre_gpu_is_a_conflict(install):
    install(tensorrt_rtx="1.7.1", tensorrt=None)
    (finding,) = conflict_findings((13, 0), [H200])
    assert finding.state == FAILED and "blockline[tensorrt]" in finding.fix
    install(tensorrt_rtx="1.7.1", tensorrt="10.15")
    assert list(conflict_findings((13, 0), [H200])) == []


# --- the machine -----------------------------------------------------------------------------------------------------


def test_too_little_room_is_a_failure_with_both_numbers(monkeypatch, tmp_path):
    assert {finding.state for finding in machine_findings(tmp_path) if finding.name != "GPU"} == {GOOD}
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 2**20}))
    monkeypatch.setattr(runtime.doctor.examine, "available_host_bytes", lambda: 2**29)
    disk, temporary, memory = (finding for finding in machine_findings(tmp_path) if finding.name != "GPU")
    assert {disk.state, temporary.state, memory.state} == {FAILED} and all(
        finding.fix for finding in (disk, temporary, memory)
    )
    assert "0.5 GiB free, 1.5 needed" in memory.detail and "0.0 GiB free, 1.1 needed" in disk.detail
    assert runtime.doctor.examine.MEMORY_BYTES_PER_PARAMETER == 4 * VALIDATION_COPIES


def test_no_gpu_is_a_fact_and_a_driver_without_one_is_not(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(runtime.doctor.examine, "visible_gpus", list)
    monkeypatch.setattr(runtime.doctor.examine, "KERNEL_DRIVER", tmp_path / "version")
    assert gpu_finding().state == FACT
    (tmp_path / "version").write_text("NVRM version")
    assert gpu_finding().state == FAILED
    monkeypatch.setattr(runtime.doctor.examine, "visible_gpus", lambda: [H200])
    monkeypatch.setattr(runtime.doctor.examine, "driver_cuda", lambda: (13, 0))
    assert gpu_finding() == Finding("GPU", GOOD, "NVIDIA Test H200, compute capability 9.0; the driver knows CUDA 13.0")


def test_make_has_the_target():
    assert "runtime doctor" in (ROOT / "Makefile").read_text()
