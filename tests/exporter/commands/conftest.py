"""Bundles that the export command made of one tiny checkpoint, for the tests of all commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from exporter.commands.main import main as exporter
from tests.conftest import TINY
from tests.support.checkpoint_folders import write_huggingface

EXPORTS = {
    ("block", "fp32"): [],
    ("stack", "fp16"): ["--layers", "1:3", "--attention-dtype", "fp32"],
    ("model", "bf16"): ["--max-positions", "64"],
    ("component:swiglu_mlp", "fp16"): [],
    ("component:prepare_qkv", "bf16"): [],
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    return write_huggingface(tmp_path_factory.mktemp("cli") / "tiny checkpoint", TINY)


@pytest.fixture(scope="session")
def bundles(checkpoint, tmp_path_factory):
    """Bundles of the tiny checkpoint made by the command, once each; treat them as read-only."""
    made: dict[tuple[str, str], Path] = {}

    def export(unit: str, dtype: str) -> Path:
        if (unit, dtype) not in made:
            target = tmp_path_factory.mktemp("bundles") / "bundle"
            what = ["--checkpoint", str(checkpoint), "--unit", unit, "--dtype", dtype]
            assert exporter(["export", *what, *EXPORTS[unit, dtype], "-o", str(target)]) == 0
            made[unit, dtype] = target
        return made[unit, dtype]

    return export
