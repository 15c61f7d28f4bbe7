"""Checkpoints made to do harm are refused with the reason.

Nothing in them is executed, no memory is taken because a header says so, and nothing is written outside.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from exporter.checkpoint.formats import open_checkpoint
from exporter.common.errors import CheckpointError
from exporter.common.memory import peak_memory_bytes
from tests.conftest import ROOT, TINY
from tests.support.checkpoint_folders import write_huggingface


@pytest.fixture
def folder(tmp_path):
    return write_huggingface(tmp_path / "checkpoint", TINY)


def rewrite_header(folder, change) -> None:
    """Lets `change` alter the header's JSON, or return other bytes for it."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    new = change(header)
    text = json.dumps(header).encode() if new is None else new
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def beyond_the_file(header):
    begin, end = header["lm_head.weight"]["data_offsets"]
    header["lm_head.weight"]["data_offsets"] = [begin, end + (1 << 40)]


def onto_another_tensor(header):
    header["lm_head.weight"]["data_offsets"] = header["model.embed_tokens.weight"]["data_offsets"]


def backwards(header):
    header["lm_head.weight"]["data_offsets"] = header["lm_head.weight"]["data_offsets"][::-1]


def negative(header):
    header["lm_head.weight"]["data_offsets"] = [-8, 100]


def another_shape_over_the_same_bytes(header):
    rows, columns = header["lm_head.weight"]["shape"]
    header["lm_head.weight"]["shape"] = [rows * 2, columns]


def astronomical_shape(header):
    header["lm_head.weight"]["shape"] = [1 << 40, 1 << 40]


def unknown_dtype(header):
    header["lm_head.weight"]["dtype"] = "F4096"


def not_json(header):
    return b"{" * 1000


def nested_too_deep(header):
    return b"[" * 100_000 + b"]" * 100_000


def no_utf8(header):
    return b"\xff\xfe" * 500


CHANGES = [
    *(beyond_the_file, onto_another_tensor, backwards, negative, another_shape_over_the_same_bytes),
    *(astronomical_shape, unknown_dtype, not_json, nested_too_deep, no_utf8),
]


@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__ for change in CHANGES])
def test_a_lying_header_is_refused_with_the_file_named(folder, change):
    rewrite_header(folder, change)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_checkpoint(folder)


@pytest.mark.parametrize("length", [1 << 62, (1 << 64) - 1, 200 << 20, 0, 1])
def test_a_header_of_absurd_size_is_refused_and_not_allocated(folder, length):
    path = folder / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew at the present size
    before = peak_memory_bytes()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_checkpoint(folder)
    assert peak_memory_bytes() - before < 100e6


@pytest.mark.parametrize("change", [beyond_the_file, not_json], ids=["offsets", "header"])
def test_the_command_refuses_in_one_line_and_writes_nothing(folder, tmp_path, change):
    rewrite_header(folder, change)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    arguments = ["export", "--checkpoint", str(folder), "--unit", "model", "-o", str(tmp_path / "out" / "bundle")]
    command, environment = [sys.executable, "-m", "exporter", *arguments], os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert run.returncode == 2 and "Traceback" not in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1 and "model.safetensors" in run.stderr
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_a_shard_that_is_a_link_out_of_the_folder_is_read_and_never_written(folder, tmp_path):
    """Content-addressed stores keep their files as links, so a link is allowed. It is opened for reading only."""
    real = tmp_path / "elsewhere.safetensors"
    (folder / "model.safetensors").rename(real)
    (folder / "model.safetensors").symlink_to(real)
    content = real.read_bytes()
    open_checkpoint(folder).weights.read("embedding.weight")
    assert real.read_bytes() == content
