"""What the tests of bundle folders share: bundles free to be damaged, what a folder holds, and a child that may be killed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from exporter.bundle.manifest import DATA_FILE, GRAPH_FILE, MANIFEST_FILE

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
