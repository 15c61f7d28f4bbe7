"""The wheel, installed away from the source tree: what it holds, and that its commands and `import runtime` need nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT

STAGES = ("exporter", "engines", "runtime")
DATA = {"engines/comparison/prompts.txt", "exporter/validation/measured_errors.json"}  # read at run time


def run(*command: str | Path, cwd: Path) -> str:
    """Output of a command that finds no package by PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=cwd, env=environment)
    assert result.returncode == 0, f"{command}: {result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of a copy of the tree, so that nothing an earlier build left behind gets in."""
    source, target = tmp_path_factory.mktemp("source") / "blockline", tmp_path_factory.mktemp("wheel")
    hidden_and_built = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=hidden_and_built)
    options = (
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--wheel-dir",
        target,
    )
    run(sys.executable, "-m", "pip", "wheel", *options, source, cwd=target)
    (path,) = target.iterdir()
    return path


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    """An environment that holds the wheel alone and sees this one's packages, whose link to the source tree isn't followed there."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    (site_packages,) = folder.glob("lib/python3.*/site-packages")
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = ("--python", folder / "bin" / "python")
    run(
        sys.executable,
        "-m",
        "pip",
        *python,
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=folder,
    )
    return folder


def test_the_wheel_holds_the_three_stages_and_their_data_alone(wheel):
    modules = {str(path.relative_to(ROOT)) for stage in STAGES for path in (ROOT / stage).rglob("*.py")}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == modules | DATA


def test_no_other_file_lies_in_the_stages():
    others = {str(path.relative_to(ROOT)) for stage in STAGES for path in (ROOT / stage).rglob("*") if path.is_file()}
    assert {name for name in others if not name.endswith((".py", ".pyc"))} == DATA


def test_no_stage_looks_for_files_beside_its_modules_but_by_their_package():
    assert not [path for stage in STAGES for path in (ROOT / stage).rglob("*.py") if "__file__" in path.read_text()]


def test_it_says_the_pythons_that_the_tests_run_on(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    assert "Requires-Python: <3.15,>=3.11\n" in metadata
    pythons = [(3, 11), (3, 12), (3, 13), (3, 14)]
    assert sys.version_info[:2] in pythons
    named = re.findall(r"^Classifier: Programming Language :: Python :: (\d+)\.(\d+)$", metadata, re.MULTILINE)
    assert [(int(major), int(minor)) for major, minor in named] == pythons


def test_its_modules_are_found_in_it_and_its_data_are_read(environment, tmp_path):
    code = """
import json, sys, exporter, engines, runtime
from engines.comparison.agreement import prompts
from exporter.validation.tolerances import measured_operation_errors
modules = [exporter.__file__, engines.__file__, runtime.__file__]
print(json.dumps([modules, len(prompts()), len(measured_operation_errors()), sorted({name.split(".")[0] for name in sys.modules})]))
"""
    modules, n_prompts, n_backends, loaded = json.loads(run(environment / "bin" / "python", "-c", code, cwd=tmp_path))
    assert all(path.startswith(str(environment)) for path in modules)
    assert n_prompts > 0 and n_backends > 0
    assert not {"benchmarks", "tests", "locks"} & set(loaded)


def test_its_commands_export_verify_inspect_and_decode(environment, tiny_bundle, tmp_path):
    commands, block = environment / "bin", tiny_bundle("block", "fp16").folder
    sizes = json.loads(
        run(commands / "blockline-export", "params", "--model", "smollm2-135m", "--format", "json", cwd=tmp_path)
    )
    assert sizes["config"]["hidden_size"] == 576
    run(
        commands / "blockline-export",
        "export",
        "--model",
        "smollm2-135m",
        "--unit",
        "component:rms_norm",
        "-o",
        "norm",
        cwd=tmp_path,
    )
    run(commands / "blockline-export", "verify", "norm", cwd=tmp_path)
    network = json.loads(
        run(commands / "blockline-build", "inspect", block, "--cache-capacity", "64", "--format", "json", cwd=tmp_path)
    )
    assert network["kv_cache_updates"] == 2
    decoded = json.loads(
        run(
            commands / "blockline-run",
            "decode",
            block,
            "--steps",
            "2",
            "--prompt-len",
            "3",
            "--format",
            "json",
            cwd=tmp_path,
        )
    )
    assert decoded["lengths"] == [5]
