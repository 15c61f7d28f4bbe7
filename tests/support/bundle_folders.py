"""Helpers for tests of bundle folders: bundles that a test may damage, and the content of a folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from exporter.bundle.manifest import DATA_FILE, GRAPH_FILE, MANIFEST_FILE

IDENTITY_FILES = (GRAPH_FILE, DATA_FILE, MANIFEST_FILE)


def contents(folder: Path) -> dict[str, bytes]:
    """Returns path → content of every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def identity(folder: Path) -> dict[str, bytes]:
    """Returns name → content of graph, data and manifest."""
    return {name: (folder / name).read_bytes() for name in IDENTITY_FILES}


@pytest.fixture
def bundle(tiny_bundle, tmp_path) -> Path:
    """A copy of the tiny block's bundle that a test may damage."""
    return Path(shutil.copytree(tiny_bundle("block").folder, tmp_path / "bundle"))


@pytest.fixture
def component(tiny_bundle, tmp_path) -> Path:
    """A copy of another bundle, which differs from `bundle`."""
    return Path(shutil.copytree(tiny_bundle("component:rms_norm").folder, tmp_path / "component"))
