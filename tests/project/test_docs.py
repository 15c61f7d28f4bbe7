"""What the README and the guides say is true: commands parse, examples run, files and functions they name exist."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import engines.commands.main
import exporter.commands.main
import runtime.commands.main
from tests.conftest import ROOT
from tests.project.rooms import ROOMS

README = ROOT / "README.md"
PAGES = (README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md")))
TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in PAGES}
COMMANDS = {"exporter": exporter.commands.main, "engines": engines.commands.main, "runtime": runtime.commands.main}
LONGEST_README, FIRST_SCREENS = 150, 60  # lines


def blocks(kind: str) -> list[tuple[str, str]]:
    """(page, text) of every fenced block of this kind."""
    return [
        (page, code) for page, text in TEXTS.items() for code in re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)
    ]


SHELL_LINES = [
    (page, line.split("#")[0].strip())
    for page, code in blocks("bash")
    for line in code.splitlines()
    if line.split("#")[0].strip()
]
INLINE = [(page, text) for page, whole in TEXTS.items() for text in re.findall(r"`([^`\n]+)`", whole)]
SCRIPTS = sorted((ROOT / "scripts").glob("*.sh"))
SCRIPT_LINES = [
    (str(path.relative_to(ROOT)), line.split("#")[0].strip().replace('"$capacity"', "1024"))
    for path in SCRIPTS
    for line in path.read_text().splitlines()
    if line.startswith("python -m")
]


# --- the front page ---------------------------------------------------------------------------------------------------


def test_the_readme_is_short_and_says_first_what_a_newcomer_asks():
    lines = README.read_text().splitlines()
    first = "\n".join(lines[:FIRST_SCREENS])
    assert len(lines) <= LONGEST_README
    for wanted in ("make run", "make test", "text      ' Paris.", "Python 3.11", "**Limits.**", "No GPU", "GB of disk"):
        assert wanted in first, wanted


def test_the_table_of_commands_has_every_command():
    listed = set(re.findall(r"^\| `python -m (\w+ [\w-]+)` \|", README.read_text(), re.MULTILINE))
    actions = {name: module.make_parser()._subparsers._group_actions[0] for name, module in COMMANDS.items()}
    assert listed == {f"{name} {command}" for name, action in actions.items() for command in action.choices}


def test_readme_and_index_link_to_every_guide():
    for page in ("README.md", "docs/README.md"):
        links = {Path(link).name for link in re.findall(r"\]\(([^)#]+)", TEXTS[page])}
        guides = {path.name for path in PAGES if path.parent.name == "docs"} - {"README.md"}
        assert guides <= links, page


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "command"), [entry for entry in (*SHELL_LINES, *SCRIPT_LINES) if entry[1].startswith("python -m")]
)
def test_every_command_parses(page, command):
    _, _, module, *arguments = shlex.split(command)
    assert COMMANDS[module].make_parser().parse_args(arguments).run


def test_every_shell_line_is_of_a_kind_that_is_tested():
    known = ("python -m ", "make ", "bash scripts/", ". .venv/bin/activate", "rm -r .venv && make ", "pip-audit ")
    assert [entry for entry in SHELL_LINES if not entry[1].startswith(known)] == []


def test_the_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    said = {
        text for _, line in (*SHELL_LINES, *INLINE) for text in re.findall(r"(?:^|&& |^\w+=\S+ )make ([a-z-]+)", line)
    }
    assert {"run", "test", "gpu-check", "doctor", "bench"} <= said
    for target in said:
        assert re.search(rf"^{target}:.*##", makefile, re.MULTILINE), target


def test_every_module_that_a_page_runs_exists():
    said = {name for _, text in (*SHELL_LINES, *INLINE) for name in re.findall(r"python -m ([\w.]+)", text)}
    assert {"exporter", "benchmarks", "benchmarks.campaigns.kills"} <= said
    assert [name for name in said if importlib.util.find_spec(name) is None] == []


def test_the_scripts_are_those_that_the_guides_run():
    run = {line.split()[1] for _, line in SHELL_LINES if line.startswith("bash scripts/")}
    assert run == {str(path.relative_to(ROOT)) for path in SCRIPTS}


def run_script(name: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    values = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(["bash", ROOT / "scripts" / name], cwd=folder, env=values, capture_output=True, text=True)


@pytest.mark.slow
def test_polygraphy_reads_compiles_and_compares_what_we_leave_it(tmp_path):
    result = run_script("polygraphy_block.sh", tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "past_key_values.0.key [dtype=float16, shape=('batch_size', 3, 1024, 64)]" in result.stdout
    assert (tmp_path / "build" / "block.engine").stat().st_size > 5e6
    assert result.stderr.splitlines()[-1] == "build/onnxruntime.json: PASSED"


def test_the_trtexec_script_gives_a_shape_for_every_input(tmp_path):
    fake = tmp_path / "trtexec"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    result = run_script("trtexec_block.sh", tmp_path, TRTEXEC=str(fake))
    assert result.returncode == 0, result.stderr
    options = dict(line.removeprefix("--").split("=", 1) for line in result.stdout.splitlines())
    inputs = {
        "hidden_states": "1x1x576",
        "position_ids": "1x1",
        "write_indices": "1",
        "past_key_values.0.key": "1x3x1024x64",
    }
    inputs["past_key_values.0.value"] = inputs["past_key_values.0.key"]
    for which, length in {"min": 1, "opt": 512, "max": 1024}.items():
        shapes = dict(shape.split(":") for shape in options[f"{which}Shapes"].split(","))
        assert shapes == inputs | {"attention_mask": f"1x{length}"}
    assert options["onnx"] == "build/block/model.c1024.onnx"


# --- Python -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def in_workspace(tmp_path, monkeypatch, smollm2_bundle, smollm2_checkpoint):
    (tmp_path / "build" / "checkpoints").mkdir(parents=True)
    (tmp_path / "build" / "smollm2-135m").symlink_to(smollm2_bundle("fp16").folder)
    (tmp_path / "build" / "checkpoints" / "smollm2-135m").symlink_to(smollm2_checkpoint)
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "example"), blocks("python"))
def test_a_python_example_runs_and_prints_what_it_says(in_workspace, capsys, page, example):
    promised = re.search(r"print\(.*\)  # (.*)", example).group(1)
    exec(compile(example, page, "exec"), {})
    assert capsys.readouterr().out.strip() == promised


def test_the_examples_show_export_build_and_both_ways_to_use_a_session():
    calls = r"\b(export_bundle|build_bundle|prefill|decode|acquire|step|release)\("
    used = [set(re.findall(calls, code)) for _, code in blocks("python")]
    assert used[0] == {"export_bundle", "build_bundle", "prefill", "decode"}
    assert {"prefill", "decode"} in used and {"acquire", "step", "release"} in used


# --- names ------------------------------------------------------------------------------------------------------------


@cache
def names_in(path: Path) -> set[str]:
    """The functions, classes, methods (`Class.method`) and constants that a module defines."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
            inner = node.body if isinstance(node, ast.ClassDef) else []
            found |= {f"{node.name}.{child.name}" for child in inner if isinstance(child, ast.FunctionDef)}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return found


def missing(text: str, root: Path = ROOT) -> str | None:
    """What `path/file.py:name`, or a path that begins with a folder of the project, names without its being there."""
    match = re.fullmatch(r"((?:[\w.-]+/)+[\w.-]*)(?::([\w.]+))?", text)
    if match is None or not (root / match[1].split("/")[0]).is_dir() or match[1].startswith("build/"):
        return None
    path = root / match[1]
    if not path.exists():
        return f"{text}: there is no {match[1]}"
    if match[2] is not None and match[2] not in names_in(path):
        return f"{text}: {match[1]} does not define {match[2]}"
    return None


def test_every_file_and_function_that_a_page_names_exists():
    assert [f"{page}: {problem}" for page, text in INLINE if (problem := missing(text))] == []


def test_a_wrong_name_would_be_found(tmp_path):
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "a.py").write_text("X = 1\n\nclass A:\n    def f(self): ...\n")
    names = ("room/a.py", "room/a.py:X", "room/a.py:A.f", "room/b.py", "room/a.py:B", "room/a.py:A.g", "no folder/a.py")
    assert [missing(name, tmp_path) is None for name in names] == [True, True, True, False, False, False, True]


def test_the_walks_of_the_architecture_name_functions():
    walks = TEXTS["docs/architecture.md"].split("step by step\n")[1:]
    assert len(walks) == 3
    assert all(len(re.findall(r"`[\w/]+\.py:[\w.]+`", walk)) >= 8 for walk in walks)


def test_every_link_leads_somewhere():
    broken = []
    for page, text in TEXTS.items():
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            place, _, anchor = link.partition("#")
            target = ((ROOT / page).parent / place).resolve() if place else ROOT / page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{page}: {link}")
    assert broken == []


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_tables_of_rooms_are_those_that_are_enforced_in_their_order():
    sections = re.split(r"^### ", TEXTS["docs/architecture.md"].split("## One export")[0], flags=re.MULTILINE)[1:]
    tables = {
        section.split("\n")[0]: tuple(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) for section in sections
    }
    assert tables == {package: tuple(rooms) for package, rooms in ROOMS.items()}


# --- figures ----------------------------------------------------------------------------------------------------------


def test_the_page_of_figures_shows_every_target_and_whether_it_was_met():
    targets = json.loads((ROOT / "benchmarks" / "records" / "bench.json").read_text())["targets"]
    states = re.findall(r"\| (met|missed) \|$", TEXTS["docs/measured.md"], re.MULTILINE)
    assert states.count("met") == sum(target["met"] for target in targets)
    assert states.count("missed") == sum(not target["met"] for target in targets)


def test_the_page_of_figures_shows_every_plot():
    shown = set(re.findall(r"\(figures/([\w.-]+)\)", TEXTS["docs/measured.md"]))
    assert shown == {path.name for path in (ROOT / "docs" / "figures").iterdir()}


def test_the_tables_of_layouts_name_the_tensors_that_the_code_makes():
    from exporter.spec.parameters import MERGED_WEIGHTS, ROPE_TABLES
    from exporter.spec.weight_formats import QUANTIZED_TENSORS

    page = TEXTS["docs/bundle_format.md"]
    assert all(f"`NAME.{part}`" in page for part in QUANTIZED_TENSORS)
    assert all(f"`blocks.{{i}}.{name}.weight`" in page for name in MERGED_WEIGHTS)
    assert all(f"`{name}`" in page for name in ROPE_TABLES)
