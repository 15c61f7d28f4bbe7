"""What the README tells people to run is run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import engines.commands.main
import exporter.commands.main
import runtime.commands.main
from tests.conftest import ROOT

pytestmark = pytest.mark.slow

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(bash|python)\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    line.split("#")[0].strip()
    for kind, text in BLOCKS
    if kind == "bash"
    for line in text.splitlines()
    if "python -m" in line
]


@pytest.fixture
def in_workspace(tmp_path, monkeypatch, smollm2_bundle):
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "smollm2-135m").symlink_to(smollm2_bundle("fp16").folder)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("example", [text for kind, text in BLOCKS if kind == "python"])
def test_an_embedding_example_runs_and_prints_what_it_says(in_workspace, capsys, example):
    promised = re.search(r"print\(.*?\)  # (.*)", example).group(1)
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip() == promised


def test_the_examples_are_the_two_ways_to_use_a_session():
    used = [
        re.findall(r"session\.(prefill|decode|acquire|step|release)\(", text)
        for kind, text in BLOCKS
        if kind == "python"
    ]
    assert [set(calls) for calls in used] == [{"prefill", "decode"}, {"acquire", "step", "release"}]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_parses(command):
    _, _, module, *arguments = shlex.split(command)
    mains = {"exporter": exporter.commands.main, "engines": engines.commands.main, "runtime": runtime.commands.main}
    assert mains[module].make_parser().parse_args(arguments).run


def test_polygraphy_reads_compiles_and_compares_what_we_leave_it(tmp_path):
    (script,) = [text for kind, text in BLOCKS if kind == "bash" and "polygraphy" in text]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "past_key_values.0.key [dtype=float16, shape=('batch_size', 3, 1024, 64)]" in result.stdout
    assert (tmp_path / "build" / "block.engine").stat().st_size > 5e6
    assert "PASSED" in result.stdout.splitlines()[-1]


def test_the_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([a-z-]+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:.*##", makefile, re.MULTILINE), target
