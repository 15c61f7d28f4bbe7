"""Untrusted files of a checkpoint: config.json, shard indices, params.json and .pth shards.

Each test keeps a fault fixed that the campaign (benchmarks/campaigns/hostile_input) once found.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile

import pytest
import torch

from benchmarks.campaigns.hostile_input.originals import META, META_NAME
from exporter.checkpoint.formats import open_checkpoint
from exporter.common.errors import CheckpointError
from exporter.spec import catalogue
from tests.conftest import TINY
from tests.support import hostile_bundles
from tests.support.checkpoint_folders import write_huggingface

originals = hostile_bundles.originals  # fixtures


@pytest.mark.parametrize(
    "overrides",
    [{"architectures": 5}, {"architectures": {"a": 1}}, {"architectures": [["x"]]}, {"eos_token_id": "</s>"},
    {"eos_token_id": [1.5]},
     {"num_hidden_layers": 10**9}, {"rope_scaling": [1]}, {"hidden_act": [[1]]}],
)  # fmt: skip
def test_a_config_of_other_types_is_refused(tmp_path, overrides):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(write_huggingface(tmp_path / "checkpoint", TINY, **overrides))
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("shard", [None, 3, ["a"], "..", "../x", {"a": 1}])
def test_an_index_that_names_no_file_is_refused(tmp_path, shard):
    folder = write_huggingface(tmp_path / "checkpoint", TINY, shards=2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = shard
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError):
        open_checkpoint(folder)


@pytest.fixture
def meta(originals, tmp_path, monkeypatch):
    monkeypatch.setitem(catalogue.CATALOGUE, META_NAME, META)
    return shutil.copytree(originals / "meta", tmp_path / "meta")


def meta_refusal(folder) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder, META_NAME)
    return str(caught.value)


@pytest.mark.parametrize(
    "strange",
    [lambda t: t.to_sparse(), lambda t: torch.empty(t.shape, device="meta"), lambda t: torch.zeros(1).expand(t.shape),
     lambda t: t.double()],
    ids=["sparse", "meta", "expanded", "double"],
)  # fmt: skip
def test_tensors_without_plain_values_are_refused(meta, strange):
    path = meta / "consolidated.00.pth"
    shard = torch.load(path, weights_only=True)
    shard["norm.weight"] = strange(shard["norm.weight"])
    torch.save(shard, path)
    assert "norm.weight" in meta_refusal(meta) or "not a plain file of tensors" in meta_refusal(meta)


@pytest.mark.parametrize("shape", [(), (64, 2, 1)])
def test_a_tensor_of_another_number_of_axes_is_refused(meta, shape):
    path = meta / "consolidated.01.pth"
    shard = torch.load(path, weights_only=True)
    shard["output.weight"] = torch.zeros(shape)
    torch.save(shard, path)
    assert "output.weight" in meta_refusal(meta)


class Memory:
    """Pickles as a call that takes 64 GiB; torch's list of safe calls allows it."""

    def __reduce__(self):
        return bytearray, (2**36,)


def test_a_pickle_that_asks_for_memory_is_refused_before_it_is_read(meta):
    torch.save({"norm.weight": Memory()}, meta / "consolidated.00.pth")
    assert "it names" in meta_refusal(meta) and "bytearray" in meta_refusal(meta)


def test_compressed_records_are_refused(meta):
    path = meta / "consolidated.00.pth"
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    assert "its records are compressed" in meta_refusal(meta)


def test_a_pipe_is_refused_without_waiting(meta):
    (meta / "consolidated.00.pth").unlink()
    os.mkfifo(meta / "consolidated.00.pth")
    assert "not a plain file" in meta_refusal(meta)


def test_an_empty_shard_is_refused(meta):
    (meta / "consolidated.00.pth").write_bytes(b"")
    assert "consolidated.00.pth" in meta_refusal(meta)


@pytest.mark.parametrize(
    "params", [{"dim": "x"}, {"n_heads": 0}, {"ffn_dim_multiplier": 1e308}, {"multiple_of": -1}, {"n_heads": 10**400}]
)
def test_params_of_other_types_are_refused(meta, params):
    data = json.loads((meta / "params.json").read_text()) | params
    (meta / "params.json").write_text(json.dumps(data))
    assert "params.json" in meta_refusal(meta)
