"""The table of known failures (tests/reliability/cases.md): every row has a test, and every named test exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.conftest import ROOT

FOLDER = ROOT / "tests"
TABLE = Path(__file__).parent / "cases.md"
MIN_ROWS = 60  # number of rows when the table was made


def rows(text: str) -> list[tuple[str, list[str]]]:
    """Returns (case, names of its tests) for every row of a table."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| case |")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [(case, [name.strip() for name in tests.split(",") if name.strip()]) for case, tests in cells]


def problems(text: str, folder: Path = FOLDER) -> list[str]:
    """Returns what is wrong with a table: rows without a test, and tests that do not exist."""
    found = []
    for case, names in rows(text):
        if not names:
            found.append(f"{case}: it has no test")
        for name in names:
            match = re.fullmatch(r"(test_\w+\.py)::(test_\w+)(?:\[(\w+)\])?", name)
            if match is None:
                found.append(f"{case}: {name!r} is no test's name")
            elif not any(has_test(path, match[2], match[3]) for path in folder.rglob(match[1])):
                found.append(f"{case}: {name} does not exist")
    return found


def has_test(path: Path, function: str, case: str | None) -> bool:
    """Whether a file defines a test. The id of a parameter must be a name that the file uses."""
    if not path.is_file():
        return False
    tree = ast.parse(path.read_text(encoding="utf-8"))
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | defined
    return function in defined and (case is None or case in names)


def test_every_case_has_a_test_that_exists():
    text = TABLE.read_text(encoding="utf-8")
    assert problems(text) == []
    assert len(rows(text)) >= MIN_ROWS


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("| a case | |", "a case: it has no test"),
        ("| a case | test_cases.py::test_gone |", "a case: test_cases.py::test_gone does not exist"),
        ("| a case | test_gone.py::test_x |", "a case: test_gone.py::test_x does not exist"),
        ("| a case | rows |", "a case: 'rows' is no test's name"),
        ("| a case | test_cases.py::rows |", "a case: 'test_cases.py::rows' is no test's name"),
        ("| a case | test_cases.py::test_every_case_has_a_test_that_exists[gone] |", "exists[gone] does not exist"),
    ],
)
def test_a_gap_in_the_table_is_found(row, problem):
    (found,) = problems(f"| case | tests |\n|---|---|\n{row}\n")
    assert found.endswith(problem)
