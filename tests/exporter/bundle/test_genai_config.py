"""The tokens in genai_config.json are the checkpoint's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exporter.bundle.bundle import file_entry
from exporter.checkpoint.huggingface import open_huggingface
from exporter.commands.main import main as exporter
from exporter.common.errors import CheckpointError
from exporter.validation.verify import verify_bundle
from tests.conftest import TINY
from tests.support.checkpoint_folders import ABSENT, write_huggingface, write_json

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def exported(tmp_path: Path, generation: dict | None = None, **config) -> Path:
    """Exports a checkpoint with these tokens in its config.json and generation_config.json; returns the bundle."""
    checkpoint = write_huggingface(tmp_path / "checkpoint", TINY, **config)
    if generation is not None:
        write_json(checkpoint / "generation_config.json", generation)
    arguments = [
        "--checkpoint",
        checkpoint,
        "--unit",
        "model",
        "--dtype",
        "fp32",
        "--cache",
        "growing",
        "--no-validate",
    ]
    assert exporter(["export", *map(str, arguments), "-o", str(tmp_path / "bundle")]) == 0
    return tmp_path / "bundle"


def tokens(bundle: Path) -> tuple:
    model = json.loads((bundle / "genai_config.json").read_text())["model"]
    return tuple(model.get(key) for key in TOKENS)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 5}, None, (1, 2, 5)),
        ({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 5}, {"bos_token_id": 7, "pad_token_id": 0}, (7, 2, 0)),
        ({"bos_token_id": 0, "eos_token_id": [2, 3], "pad_token_id": None}, None, (0, [2, 3], 2)),
        ({"bos_token_id": None, "eos_token_id": 2, "pad_token_id": -1}, None, (None, 2, 2)),
        ({"bos_token_id": ABSENT, "eos_token_id": ABSENT, "pad_token_id": ABSENT}, None, (None, [], None)),
    ],
    ids=["all", "generation config", "no pad token", "no begin token", "none"],
)
def test_the_tokens_are_the_checkpoints_own(tmp_path, config, generation, expected):
    bundle = exported(tmp_path, generation, **config)
    assert tokens(bundle) == expected
    assert verify_bundle(bundle).problems == ()


@pytest.mark.parametrize("value", ["<s>", 1.5, True, [1], -2])
def test_a_begin_token_that_is_none_is_refused(tmp_path, value):
    checkpoint = write_huggingface(tmp_path / "checkpoint", TINY, bos_token_id=value)
    with pytest.raises(CheckpointError, match=r"got bos_token_id .*expected a whole number"):
        open_huggingface(checkpoint)


def changed(bundle: Path, **model) -> Path:
    """Changes values of the settings, and their checksum in the manifest."""
    path, manifest = bundle / "genai_config.json", bundle / "manifest.json"
    settings = json.loads(path.read_text())
    settings["model"] |= model
    write_json(path, settings)
    listing = json.loads(manifest.read_text())
    listing["files"][path.name] = file_entry(path)
    write_json(manifest, listing)
    return bundle


def test_a_bundle_of_an_older_version_with_other_tokens_is_still_right(tmp_path):
    bundle = exported(tmp_path, bos_token_id=1, eos_token_id=2, pad_token_id=5)
    assert verify_bundle(changed(bundle, bos_token_id=2, pad_token_id=2)).problems == ()
    (problem,) = verify_bundle(changed(bundle, bos_token_id="<s>")).problems
    assert problem.problem.startswith("model.bos_token_id: got '<s>', expected a whole number")
    (problem,) = verify_bundle(changed(bundle, bos_token_id=1, vocab_size=5)).problems
    assert problem.problem.startswith("model.vocab_size: got 5, expected 101")
