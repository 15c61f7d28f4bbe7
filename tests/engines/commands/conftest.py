"""A machine without GPU, bundles, and helpers for the tests of the commands."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from engines.commands.main import main
from exporter.bundle.engine_records import EngineRecord, read_records

ENGINE = "model.c64.tensorrt-rtx.engine"
SHAPES = {  # min, opt and max shapes of the tiny block's inputs
    which: {
        "hidden_states": (batch, sequence, 64),
        "position_ids": (batch, sequence),
        "write_indices": (batch,),
        "attention_mask": (batch, total),
        "past_key_values.0.key": (batch, 2, 64, 16),
        "past_key_values.0.value": (batch, 2, 64, 16),
    }
    for which, (batch, sequence, total) in {"min": (1, 1, 1), "opt": (2, 4, 32), "max": (3, 8, 64)}.items()
}


@pytest.fixture(autouse=True)
def no_gpu_and_no_tensorrt(monkeypatch):
    """The same machine for every test, also where there is a GPU."""
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    modules = ("library.backend", "building.preparation", "building.build", "building.inspection", "building.refit")
    for module in modules:
        monkeypatch.setattr(f"engines.{module}.visible_gpus", list)


@pytest.fixture
def bundle(tiny_bundle, tmp_path) -> Path:
    """A copy of the tiny block's bundle, which a test may change."""
    return Path(shutil.copytree(tiny_bundle("block", "fp16").folder, tmp_path / "bundle"))


@pytest.fixture(scope="module")
def built(tiny_bundle, tmp_path_factory) -> Path:
    """The tiny block with one engine. Tests must not change it."""
    folder = Path(shutil.copytree(tiny_bundle("block", "fp16").folder, tmp_path_factory.mktemp("built") / "bundle"))
    assert main(["build", str(folder), "--backend", "tensorrt-rtx"]) == 0
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def spelt(which: str, spelling: str) -> list[str]:
    """The arguments that give the shapes, written as in trtexec or as in Polygraphy."""
    flag, shapes = f"--{which}-shapes", SHAPES[which].items()
    if spelling == "trtexec":
        return [flag, ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes)]
    return [flag, *(f"{name}:[{','.join(map(str, shape))}]" for name, shape in shapes)]


def only_record(folder: Path) -> EngineRecord:
    """The only engine record of a folder."""
    (record,) = read_records(folder)
    return record
