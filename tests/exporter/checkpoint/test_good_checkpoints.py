"""Checkpoints that transformers reads and that were sent away: keys that nothing reads, other names of one value."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import shutil
import stat
from pathlib import Path

import pytest
import torch

from exporter.bundle.bundle import Bundle
from exporter.bundle.engine_records import read_records
from exporter.checkpoint.formats import open_checkpoint
from exporter.checkpoint.smollm2 import save_weights
from exporter.common.errors import BundleError, CheckpointError
from tests.conftest import TINY
from tests.support.checkpoint_folders import ABSENT, LLAMA3_RULE, edit_config, write_huggingface, write_json

SCALED = {"rope_type": "llama3", **LLAMA3_RULE}


@pytest.fixture
def folder(tmp_path):
    return write_huggingface(tmp_path / "checkpoint", TINY)


@pytest.mark.parametrize(
    "overrides",
    [
        {"time_step_limit": [0.0, float("inf")]},
        {"unread": float("nan"), "task_specific_params": {"x": -float("inf")}},
        {"hidden_act": "swish"},
        {"rope_scaling": {"rope_type": "default", "factor": 1.0}},
        {"rope_scaling": {"rope_type": "default", "original_max_position_embeddings": 32, "low_freq_factor": 1.0}},
        {"rope_scaling": {"type": "default", "factor": None, "beta_fast": 32, "beta_slow": 1, "attention_factor": 1.0}},
        {"rope_theta": ABSENT, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "factor": None}},
    ],
    ids=str,
)
def test_keys_that_change_nothing_are_accepted(folder, overrides):
    edit_config(folder, TINY, **overrides)
    assert open_checkpoint(folder).config == TINY


def test_keys_of_other_rules_beside_llama3_are_accepted(folder):
    edit_config(folder, TINY, rope_scaling={**SCALED, "attention_factor": 1.0, "beta_fast": 32, "mscale": 1})
    scaling = open_checkpoint(folder).config.rope_scaling
    edit_config(folder, TINY, rope_scaling=SCALED)
    assert scaling is not None and scaling == open_checkpoint(folder).config.rope_scaling


@pytest.mark.parametrize("absent", [ABSENT, None])
def test_the_epsilon_of_a_config_without_one_is_that_of_transformers(folder, absent):
    from transformers import LlamaConfig

    edit_config(folder, TINY, rms_norm_eps=absent)
    assert open_checkpoint(folder).config == dataclasses.replace(TINY, norm_eps=LlamaConfig().rms_norm_eps)


def test_infinity_in_the_generation_config_is_accepted_where_it_is_not_read(folder):
    write_json(folder / "generation_config.json", {"eos_token_id": 3, "max_time": float("inf")})
    assert open_checkpoint(folder).end_token_ids == (3,)
    write_json(folder / "generation_config.json", {"eos_token_id": float("inf")})
    with pytest.raises(CheckpointError, match="eos_token_id"):
        open_checkpoint(folder)


# --- who may read -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_imported_weights_are_as_readable_as_the_users_other_files(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        save_weights({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model.safetensors").stat().st_mode) == mode


@pytest.fixture
def forbid(monkeypatch):
    """Returns a function that forbids to open one file, for root too."""

    def install(path: Path) -> None:
        whole = io.open

        def refuse(file, *more, **named):
            if not isinstance(file, int) and Path(file) == path:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
            return whole(file, *more, **named)

        monkeypatch.setattr("builtins.open", refuse)
        monkeypatch.setattr("io.open", refuse)

    return install


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_that_cannot_be_opened_is_not_called_damaged(folder, forbid, name):
    forbid(folder / name)
    with pytest.raises(CheckpointError, match=r"it cannot be opened \(Permission denied\).*check its permissions$"):
        open_checkpoint(folder)


def test_a_folder_that_cannot_be_opened_is_refused_so(folder, monkeypatch):
    monkeypatch.setattr("os.access", lambda *arguments: False)
    with pytest.raises(CheckpointError, match="the folder cannot be opened"):
        open_checkpoint(folder)


def test_a_meta_shard_that_cannot_be_opened_is_not_called_damaged(tmp_path, forbid):
    params = {"dim": 64, "n_layers": 1, "n_heads": 4, "norm_eps": 1e-5, "multiple_of": 32}
    write_json(tmp_path / "params.json", params)
    torch.save({}, tmp_path / "consolidated.00.pth")
    forbid(tmp_path / "consolidated.00.pth")
    with pytest.raises(CheckpointError, match=r"it cannot be opened \(Permission denied\).*check its permissions$"):
        open_checkpoint(tmp_path, "llama3-8b")


@pytest.mark.parametrize("name", ["manifest.json", "report.json", "engines.json"])
def test_a_bundles_document_that_cannot_be_opened_is_not_called_damaged(tmp_path, forbid, tiny_bundle, name):
    folder = tmp_path / "bundle"
    shutil.copytree(tiny_bundle("block").folder, folder)
    (folder / "engines.json").write_text(json.dumps({"format_version": 1, "engines": []}))
    forbid(folder / name)
    with pytest.raises(BundleError, match=r"it cannot be opened \(Permission denied\).*check its permissions$"):
        Bundle.open(folder).read_report()
        read_records(folder)
