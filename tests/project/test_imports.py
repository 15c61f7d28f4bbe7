"""Imports run one way, and decoding on onnxruntime loads no torch."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement

from locks.lockfile import normal
from tests.conftest import ROOT

RANK = {"exporter": 0, "engines": 1, "runtime": 2}
PURE = (
    *("spec/catalogue", "spec/contract", "costs/ledger", "common/errors", "common/documents", "common/wire"),
    *("bundle/graph_form", "bundle/manifest", "bundle/bundle"),
)


def imported(path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    return names


@pytest.mark.parametrize("package", RANK)
def test_no_stage_imports_a_later_one(package):
    for path in (ROOT / package).rglob("*.py"):
        for name in imported(path):
            other = name.split(".")[0]
            assert RANK.get(other, -1) <= RANK[package], f"{path} imports {name}"


def test_the_pure_modules_import_only_the_standard_library_and_numpy():
    for name in PURE:
        for module in imported(ROOT / "exporter" / f"{name}.py"):
            top = module.split(".")[0]
            assert top in sys.stdlib_module_names or top in ("numpy", "ml_dtypes", "exporter"), f"{name} imports {module}"


UMBRELLAS = {"cuda": "cuda-python", "tensorrt_rtx": "tensorrt-rtx"}  # modules of packages that a declared one asks for
EXTRAS_OF_THE_STAGES = {"smollm2", "tensorrt", "tensorrt-rtx", "polygraphy"}


@pytest.mark.parametrize(
    ("folder", "extras"), [*((stage, EXTRAS_OF_THE_STAGES) for stage in RANK), ("tests", {*EXTRAS_OF_THE_STAGES, "test"}), ("locks", {"test"})]
)
def test_every_package_that_is_imported_anywhere_is_a_dependency(folder, extras):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(text for extra in extras for text in project["optional-dependencies"][extra])]
    declared = {normal(Requirement(text).name) for text in texts}
    providers = importlib.metadata.packages_distributions()
    for path in (ROOT / folder).rglob("*.py"):
        for module in imported(path):
            top = module.split(".")[0]
            if top in sys.stdlib_module_names or top in (*RANK, "tests", "locks", "benchmarks"):
                continue
            names = {UMBRELLAS[top]} if top in UMBRELLAS else {normal(name) for name in providers.get(top, [])}
            assert names & declared, f"{path} imports {module} of {sorted(names) or 'no installed package'}, which pyproject.toml does not ask for"


def run_python(code: str, *arguments: str) -> str:
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_decoding_on_onnxruntime_loads_no_torch_and_no_onnx(tiny_bundle):
    code = """
import sys, numpy as np
from runtime import DecodeSession
with DecodeSession.open(sys.argv[1]) as session:
    session.prefill(np.array([[1, 2, 3]]))
    session.decode(np.array([4]))
print(sorted({name.split('.')[0] for name in sys.modules} & {"torch", "onnx", "onnxscript", "transformers", "tensorrt"}))
"""
    assert run_python(code, str(tiny_bundle("model").folder)).strip() == "[]"


def test_importing_engines_needs_no_tensorrt():
    assert run_python("import sys, engines; print([m for m in sys.modules if 'tensorrt' in m])").strip() == "[]"
