"""The wheel, installed outside of the source tree: its files, its commands and its imports."""

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

pytestmark = pytest.mark.slow

STAGES = ("exporter", "engines", "runtime")
OFFLINE = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-index")
DATA = {"exporter/measuring/prompts.txt", "exporter/validation/measured_errors.json"}  # read at run time


def run(*command: str | Path, cwd: Path) -> str:
    """Returns the output of a command that runs without PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=cwd, env=environment)
    assert result.returncode == 0, f"{command}: {result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of a copy of the tree. The copy leaves out the files of earlier builds."""
    source, target = tmp_path_factory.mktemp("source") / "blockline", tmp_path_factory.mktemp("wheel")
    hidden_and_built = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=hidden_and_built)
    options = (*OFFLINE, "--no-build-isolation", "--wheel-dir", target)
    run(sys.executable, "-m", "pip", "wheel", *options, source, cwd=target)
    (path,) = target.iterdir()
    return path


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    """An environment with the wheel and this environment's packages, but without its link to the source tree."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    (site_packages,) = folder.glob("lib/python3.*/site-packages")
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = ("--python", folder / "bin" / "python")
    run(sys.executable, "-m", "pip", *python, "install", *OFFLINE, wheel, cwd=folder)
    return folder


def test_the_wheel_has_only_the_three_stages_and_their_data(wheel):
    modules = {str(path.relative_to(ROOT)) for stage in STAGES for path in (ROOT / stage).rglob("*.py")}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == modules | DATA


def test_the_stages_have_no_other_files():
    others = {str(path.relative_to(ROOT)) for stage in STAGES for path in (ROOT / stage).rglob("*") if path.is_file()}
    assert {name for name in others if not name.endswith((".py", ".pyc"))} == DATA


def test_no_stage_finds_its_data_by_file_path():
    assert not [path for stage in STAGES for path in (ROOT / stage).rglob("*.py") if "__file__" in path.read_text()]


def test_it_requires_the_python_that_the_tests_run_on(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    assert "Requires-Python: <3.15,>=3.11\n" in metadata
    pythons = [(3, 11), (3, 12), (3, 13), (3, 14)]
    assert sys.version_info[:2] in pythons
    named = re.findall(r"^Classifier: Programming Language :: Python :: (\d+)\.(\d+)$", metadata, re.MULTILINE)
    assert [(int(major), int(minor)) for major, minor in named] == pythons


def test_its_modules_come_from_the_wheel_and_its_data_are_read(environment, tmp_path):
    code = """
import json, sys, exporter, engines, runtime
from exporter.measuring.agreement import prompts
from exporter.validation.tolerances import measured_operation_errors
modules = [exporter.__file__, engines.__file__, runtime.__file__]
loaded = sorted({name.split(".")[0] for name in sys.modules})
print(json.dumps([modules, len(prompts()), len(measured_operation_errors()), loaded]))
"""
    modules, n_prompts, n_backends, loaded = json.loads(run(environment / "bin" / "python", "-c", code, cwd=tmp_path))
    assert all(path.startswith(str(environment)) for path in modules)
    assert n_prompts > 0 and n_backends > 0
    assert not {"benchmarks", "tests", "locks"} & set(loaded)


def test_its_commands_export_verify_inspect_and_decode(environment, tiny_bundle, tmp_path):
    block, as_json = tiny_bundle("block", "fp16").folder, ("--format", "json")
    export, build, decode = (environment / "bin" / f"blockline-{name}" for name in ("export", "build", "run"))
    model = ("--model", "smollm2-135m")
    sizes = json.loads(run(export, "params", *model, *as_json, cwd=tmp_path))
    assert sizes["config"]["hidden_size"] == 576
    run(export, "export", *model, "--unit", "component:rms_norm", "-o", "norm", cwd=tmp_path)
    run(export, "verify", "norm", cwd=tmp_path)
    network = json.loads(run(build, "inspect", block, "--cache-capacity", "64", *as_json, cwd=tmp_path))
    assert network["kv_cache_updates"] == 2
    decoded = json.loads(run(decode, "decode", block, "--steps", "2", "--prompt-len", "3", *as_json, cwd=tmp_path))
    assert decoded["lengths"] == [5]
