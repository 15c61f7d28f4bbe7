"""What the tests of bundle folders share: bundles free to be damaged, what a folder holds, and a child that may be killed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from exporter.bundle import DATA_FILE, GRAPH_FILE, MANIFEST_FILE

IDENTITY_FILES = (GRAPH_FILE, DATA_FILE, MANIFEST_FILE)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def identity(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in IDENTITY_FILES}


@pytest.fixture
def bundle(tiny_bundle, tmp_path) -> Path:
    """A copy of the tiny block's bundle, free to be damaged."""
    return Path(shutil.copytree(tiny_bundle("block").folder, tmp_path / "bundle"))


@pytest.fixture
def component(tiny_bundle, tmp_path) -> Path:
    """A copy of another bundle, to tell the old from the new."""
    return Path(shutil.copytree(tiny_bundle("component:rms_norm").folder, tmp_path / "component"))


def in_child(body) -> int:
    """Runs `body` in a forked child; returns its exit code: what it returned, 99 where it raised, or minus the signal's number."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # OpenMP's threads did not come along; waiting for them never ends
        try:
            os._exit(body())
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
