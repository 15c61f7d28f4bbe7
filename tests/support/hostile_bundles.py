"""Good bundles that a test damages on purpose, and helpers that change their manifest and graph."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from benchmarks.campaigns.hostile_input.originals import make_originals
from exporter.bundle.bundle import Bundle, file_entry
from exporter.common.errors import BundleError

SECRET = "a text that no message may repeat"


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A folder with a good bundle of a block and of a model, and good checkpoints."""
    folder = tmp_path_factory.mktemp("originals")
    make_originals(folder, ("block", "model"))
    return folder


@pytest.fixture
def bundle(originals, tmp_path):
    """A copy of the block's bundle, with a secret file beside it."""
    (tmp_path / "secret").write_text(json.dumps({"format_version": SECRET}))
    return shutil.copytree(originals / "block", tmp_path / "bundle")


@pytest.fixture
def text_bundle(originals, tmp_path):
    """A copy of the model's bundle, which has a tokenizer."""
    return shutil.copytree(originals / "model", tmp_path / "bundle")


def seal(folder: Path) -> None:
    """Writes the sizes and checksums of the files as they are now into the manifest."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = {name: file_entry(folder / name) for name in manifest["files"]}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def change_graph(folder: Path, change: Callable) -> None:
    """Calls `change` with the graph's ModelProto, writes it back and seals the manifest."""
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    change(model)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    seal(folder)


def change_manifest(folder: Path, change: Callable) -> None:
    """Calls `change` with the manifest's JSON data and writes it back."""
    data = json.loads((folder / "manifest.json").read_text())
    change(data)
    (folder / "manifest.json").write_text(json.dumps(data))


def refusal(folder: Path) -> str:
    """Checks that the bundle is refused; returns the message."""
    with pytest.raises(BundleError) as caught:
        Bundle.open(folder, "full")
    return str(caught.value)
