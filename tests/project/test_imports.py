"""The order of the source tree: imports run one way, folders and files stay small, and decoding loads no torch."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from locks.lockfile import normal
from tests.conftest import ROOT
from tests.project.rooms import ROOMS

RANK = {"exporter": 0, "engines": 1, "runtime": 2}
PURE = (  # rooms and modules that the runtime reads bundles with
    *("spec", "costs/ledger", "common/errors", "common/documents", "common/wire"),
    *("bundle/graph_form", "bundle/graph_messages", "bundle/manifest", "bundle/bundle"),
)


LARGEST_FOLDER, LONGEST_MODULE, LONGEST_FUNCTION = 12, 400, 60  # modules, lines, lines


def imported(path: Path) -> set[str]:
    """Returns every module that a file imports, and every name that it imports from a module."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def upward_imports(package: Path) -> list[str]:
    """Returns the imports in a package that lead to a later stage or to a later room."""
    rooms, found = ROOMS.get(package.name, ()), []
    for path in sorted(package.rglob("*.py")):
        own = path.relative_to(package).with_suffix("").parts[0]
        for name in sorted(imported(path)):
            other, _, rest = name.partition(".")
            room = rest.partition(".")[0]
            later_stage = RANK.get(other, -1) > RANK.get(package.name, len(RANK))
            upward = other == package.name and own in rooms and room in rooms and rooms.index(room) > rooms.index(own)
            if later_stage or upward:
                found.append(f"{path.relative_to(package.parent)} imports {name}")
    return found


@pytest.mark.parametrize("package", ROOMS)
def test_no_room_imports_a_later_room(package):
    assert upward_imports(ROOT / package) == []


def test_every_room_is_in_the_order():
    for package, rooms in ROOMS.items():
        there = {
            path.stem for path in (ROOT / package).glob("*") if path.suffix == ".py" or (path / "__init__.py").exists()
        }
        assert there - {"__init__", "__main__"} == set(rooms)


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("exporter/spec", "from exporter.model.block import Block"),
        ("exporter/spec", "import exporter.export"),
        ("exporter/validation", "from exporter import commands"),
        ("exporter/graph", "import engines"),
        ("engines/network", "def f():\n    from engines.comparison import compare"),
        ("runtime/policy", "import runtime.session"),
    ],
)
def test_a_planted_upward_import_is_found(tmp_path, room, line):
    path = tmp_path / room / "planted.py"
    path.parent.mkdir(parents=True)
    path.write_text(line + "\n")
    assert upward_imports(path.parents[1]) != []


def sources() -> list[Path]:
    return [path for folder in (*ROOMS, "tests", "locks") for path in sorted((ROOT / folder).rglob("*.py"))]


def test_no_folder_has_too_many_modules():
    counts = Counter(path.parent for path in sources() if path.name != "__init__.py")
    assert {str(folder): n for folder, n in counts.items() if n > LARGEST_FOLDER} == {}


def test_the_quick_run_has_a_file_in_every_folder_of_tests():
    """`make test QUICK=1` leaves out what is marked slow."""
    quick, folders = set(), set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        folders.add(path.parent)
        if "\npytestmark = pytest.mark.slow" not in path.read_text():
            quick.add(path.parent)
    assert folders - quick == set()


def test_no_module_and_no_function_is_too_long():
    long = []
    for path in sources():
        text = path.read_text()
        if text.count("\n") > LONGEST_MODULE:
            long.append(f"{path}: {text.count(chr(10))} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno + 1 > LONGEST_FUNCTION:
                long.append(f"{path}: {node.name} has {node.end_lineno - node.lineno + 1} lines")
    assert long == []


def test_no_two_modules_share_a_file_name():
    """A file name tells a reader where to look. Modules of commands have the names of the commands."""
    places: dict[str, list[str]] = {}
    for path in sources():
        if path.stem not in ("__init__", "__main__") and path.parent.name != "commands":
            places.setdefault(path.stem, []).append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
    assert {name for name in places if name in sys.stdlib_module_names} == set()


def test_the_pure_modules_import_only_the_standard_library_and_numpy():
    for name in PURE:
        place = ROOT / "exporter" / name
        for path in place.glob("*.py") if place.is_dir() else [place.with_suffix(".py")]:
            for module in imported(path):
                top = module.split(".")[0]
                allowed = top in sys.stdlib_module_names or top in ("numpy", "ml_dtypes", "exporter")
                assert allowed, f"{path} imports {module}"


UMBRELLAS = {"cuda": "cuda-python", "tensorrt_rtx": "tensorrt-rtx"}  # module → declared package that requires it
EXTRAS_OF_THE_STAGES = {"smollm2", "tensorrt", "tensorrt-rtx", "polygraphy"}


@pytest.mark.parametrize(
    ("folder", "extras"),
    [
        *((stage, EXTRAS_OF_THE_STAGES) for stage in RANK),
        ("tests", {*EXTRAS_OF_THE_STAGES, "test"}),
        ("locks", {"test"}),
    ],
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
            package = sorted(names) or "no installed package"
            assert names & declared, f"{path} imports {module} of {package}, expected a dependency in pyproject.toml"


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
heavy = {"torch", "onnx", "onnxscript", "transformers", "tensorrt"}
print(sorted({name.split('.')[0] for name in sys.modules} & heavy))
"""
    assert run_python(code, str(tiny_bundle("model").folder)).strip() == "[]"


def test_importing_engines_needs_no_tensorrt():
    assert run_python("import sys, engines; print([m for m in sys.modules if 'tensorrt' in m])").strip() == "[]"
