"""Output that cannot be written as it is: a narrow encoding, a reader that leaves, a full disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

COMMAND = """
import os, subprocess, sys
from exporter.common import command, terminal
from exporter.common.terminal import print_json, say

def main(arguments):
    {body}

sys.exit(command.run(main, command.CommandParser(), {arguments}))
"""


def run(body: str, arguments: list[str] | None = None, encoding: str = "utf-8", **options):
    return subprocess.run(python(body, arguments), env=environment(encoding), timeout=60, **(CAPTURED | options))


CAPTURED = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def python(body: str, arguments: list[str] | None = None) -> list[str]:
    return [sys.executable, "-c", COMMAND.format(body=body, arguments=arguments or [])]


def environment(encoding: str, unbuffered: str = "") -> dict[str, str]:
    added = {"PYTHONIOENCODING": encoding, "PYTHONUNBUFFERED": unbuffered, "PYTHONPATH": str(ROOT)}
    return {**os.environ, **added}


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("ascii", b"caf\\xe9 \\u20ac \\U0001f600\n"),
        ("latin-1", b"caf\xe9 \\u20ac \\U0001f600\n"),
        ("ascii:replace", b"caf? ? ?\n"),
        ("utf-8", "café € 😀\n".encode()),
    ],
)
def test_characters_that_the_encoding_lacks_are_escaped_and_this_is_said(encoding, expected):
    result = run("print('café € 😀')", encoding=encoding)
    assert (result.returncode, result.stdout) == (0, expected)
    note = result.stderr.decode()
    assert ("PYTHONIOENCODING=utf-8" in note) == (b"\\u20ac" in expected) and note.count("\n") == bool(note)


def test_json_uses_its_own_escapes():
    result = run("print_json({'text': 'café 😀'})", encoding="ascii")
    assert (result.returncode, result.stderr) == (0, b"")
    assert b"\\u00e9" in result.stdout and json.loads(result.stdout) == {"text": "café 😀"}


@pytest.mark.parametrize(
    "body",
    [
        "print('x' * 10**6)",
        "[print_json(['x' * 10**6]) for _ in range(3)]",
        "[print('x', flush=True) for _ in range(10**5)]",
        "[say('x' * 100) for _ in range(10**4)]",
    ],
    ids=["print", "JSON", "line by line", "stderr"],
)
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_a_reader_that_leaves_ends_the_command_quietly(body, unbuffered):
    read_end = {"stderr": subprocess.STDOUT} if "say" in body else {}
    with subprocess.Popen(python(body), env=environment("utf-8", unbuffered), **(CAPTURED | read_end)) as process:
        assert process.stdout.read(1)
        process.stdout.close()
        assert (process.stderr.read() if process.stderr else b"") == b""
        assert process.wait(60) == 128 + 13


def test_a_reader_of_the_help_that_leaves_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    result = run("pass", ["--help"], stdout=writing)
    os.close(writing)
    assert (result.returncode, result.stderr) == (128 + 13, b"")


def test_another_broken_pipe_is_an_error():
    body = "reading, writing = os.pipe(); os.close(reading); os.write(writing, b'x')"
    result = run(body)
    assert (result.returncode, result.stderr) == (2, b"error: a file: Broken pipe\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_under_stdout_is_one_line():
    with open("/dev/full", "wb") as full:
        result = run("print('x')", stdout=full)
    assert (result.returncode, result.stderr) == (2, b"error: stdout: No space left on device\n")
