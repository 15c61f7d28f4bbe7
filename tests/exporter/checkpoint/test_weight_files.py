"""Which weights a Hugging Face folder holds, where it holds several candidates or its index is not exact."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from exporter.checkpoint.formats import open_checkpoint
from exporter.commands.main import main
from exporter.common.errors import CheckpointError
from tests.conftest import TINY
from tests.support.checkpoint_folders import rewrite_tensors, write_huggingface, write_json

INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00003.safetensors"
TIED = dataclasses.replace(TINY, tie_word_embeddings=True)
FREQUENCIES = ("model.rotary_emb.inv_freq", "model.layers.1.self_attn.rotary_emb.inv_freq")


def both(folder, one_seed: int = 0, config=TINY, dtype=torch.float32):
    """Writes a folder with three shards of seed 0, and beside them one file of a seed."""
    write_huggingface(folder, config, shards=3)
    other = write_huggingface(folder.parent / "one", config, seed=one_seed, dtype=dtype)
    shutil.move(other / "model.safetensors", folder)
    return folder


def embedding(folder) -> torch.Tensor:
    return open_checkpoint(folder).weights.read("embedding.weight")


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    write_json(folder / INDEX, index)


@pytest.mark.parametrize("gone", [[SHARD], ["model-*"]])
def test_one_whole_file_beside_the_index_of_shards_that_are_gone_is_taken(tmp_path, gone):
    folder = both(tmp_path / "both", one_seed=1)
    expected = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    for pattern in gone:
        for path in folder.glob(pattern):
            path.unlink()
    assert torch.equal(embedding(folder), expected)
    (note,) = open_checkpoint(folder).notes
    assert "those of model.safetensors; the shards of model.safetensors.index.json" in note and "is missing" in note


def test_an_index_that_names_the_whole_file_wrongly_is_left_out(tmp_path):
    folder = write_huggingface(tmp_path / "checkpoint", TINY)
    write_json(folder / INDEX, {"weight_map": {"model.norm.weight": "model.safetensors"}})
    (note,) = open_checkpoint(folder).notes
    assert "does not match its shards" in note


def test_an_index_over_one_file_needs_no_note(tmp_path):
    folder = write_huggingface(tmp_path / "checkpoint", TINY)
    names = load_file(folder / "model.safetensors")
    write_json(folder / INDEX, {"weight_map": dict.fromkeys(names, "model.safetensors")})
    assert open_checkpoint(folder).notes == ()


def test_shards_beside_a_file_that_is_not_the_whole_model_are_taken(tmp_path):
    folder = both(tmp_path / "both", one_seed=1)
    expected = embedding(write_huggingface(tmp_path / "alone", TINY))
    rewrite_tensors(folder, lambda tensors: tensors.pop("model.norm.weight"))
    assert torch.equal(embedding(folder), expected)
    assert "those of the shards of model.safetensors.index.json; model.safetensors" in open_checkpoint(folder).notes[0]
    (folder / "model.safetensors").write_bytes(b"half a download")
    assert torch.equal(embedding(folder), expected)
    assert "not a whole safetensors file" in open_checkpoint(folder).notes[0]


def test_one_file_and_shards_of_the_same_weights_are_said_to_be_the_same(tmp_path):
    assert "holds the same ones" in open_checkpoint(both(tmp_path / "both")).notes[0]


@pytest.mark.parametrize("change", ["value", "dtype", "all"])
def test_one_file_and_shards_that_differ_are_refused_with_the_first_weight_that_does(tmp_path, change):
    dtype = torch.bfloat16 if change == "dtype" else torch.float32
    folder = both(tmp_path / "both", one_seed=int(change == "all"), dtype=dtype)
    if change == "value":
        rewrite_tensors(folder, lambda tensors: tensors["model.layers.2.mlp.down_proj.weight"][5, 7].add_(1e-3))
    with pytest.raises(CheckpointError, match=r"both hold the whole model, and they differ in (\S+); .* move one") as e:
        open_checkpoint(folder)
    assert ("model.layers.2.mlp.down_proj.weight" in str(e.value)) == (change == "value")


def test_two_candidates_of_which_neither_can_be_read_give_both_reasons(tmp_path):
    folder = both(tmp_path / "both")
    (folder / SHARD).unlink()
    (folder / "model.safetensors").write_bytes(b"half a download")
    with pytest.raises(CheckpointError, match=r"neither can be read.*not a whole safetensors file.*is missing"):
        open_checkpoint(folder)


def test_the_command_says_and_records_which_weights_were_taken(tmp_path, capsys):
    folder = both(tmp_path / "both")
    (folder / SHARD).unlink()
    assert main(["export", "--checkpoint", str(folder), "--no-validate", "-o", str(tmp_path / "bundle")]) == 0
    assert "note: the weights are those of model.safetensors;" in " ".join(capsys.readouterr().err.split())
    report = json.loads((tmp_path / "bundle" / "report.json").read_text())
    assert "is missing" in report["provenance"]["notes"][0]


# --- an index and shards that disagree about what is not needed -------------------------------------------------------


@pytest.mark.parametrize("name", FREQUENCIES)
@pytest.mark.parametrize("where", ["shard", "index", "another shard"])
def test_stored_rope_frequencies_that_only_one_of_them_knows_are_ignored(tmp_path, name, where):
    folder = write_huggingface(tmp_path / "checkpoint", TINY, shards=3)
    if where != "index":
        tensors = load_file(folder / SHARD) | {name: torch.ones(8)}
        save_file(tensors, folder / SHARD, metadata={"format": "pt"})
    if where != "shard":
        edit_index(folder, lambda index: index.update({name: "model-00001-of-00003.safetensors"}))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.notes == () and checkpoint.weights.counts["derived"] == (where != "index")


@pytest.mark.parametrize("name", FREQUENCIES)
def test_frequencies_in_several_shards_are_ignored(tmp_path, name):
    folder = write_huggingface(tmp_path / "checkpoint", TINY, shards=3)
    for shard in sorted(folder.glob("model-*")):
        save_file(load_file(shard) | {name: torch.ones(8)}, shard, metadata={"format": "pt"})
    open_checkpoint(folder)


@pytest.mark.parametrize("where", ["shard", "index"])
def test_a_tied_head_that_only_one_of_them_knows_is_ignored(tmp_path, where):
    folder = write_huggingface(tmp_path / "checkpoint", TIED, shards=3)
    if where == "shard":
        first = load_file(folder / "model-00001-of-00003.safetensors")
        head = {"lm_head.weight": first["model.embed_tokens.weight"].clone()}
        save_file(load_file(folder / SHARD) | head, folder / SHARD, metadata={"format": "pt"})
    else:
        edit_index(folder, lambda index: index.update({"lm_head.weight": SHARD}))
    assert open_checkpoint(folder).config.tie_word_embeddings


def test_an_own_head_that_the_index_lists_and_no_shard_holds_is_refused(tmp_path):
    folder = write_huggingface(tmp_path / "checkpoint", TIED, shards=3, tie_word_embeddings=False)
    edit_index(folder, lambda index: index.update({"lm_head.weight": SHARD}))
    with pytest.raises(CheckpointError, match=r"does not match its shards for 1 \(lm_head\.weight\)"):
        open_checkpoint(folder)


# --- folders without weights that can be read -------------------------------------------------------------------------


def test_shards_without_an_index_and_pickles_are_named_with_the_fix(tmp_path):
    folder = write_huggingface(tmp_path / "checkpoint", TINY, shards=3)
    (folder / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"neither .* but 3 \(model-00001.*fetch model.safetensors.index.json"):
        open_checkpoint(folder)
    for path in folder.glob("model-*"):
        path.rename(path.with_suffix(".bin"))
    with pytest.raises(CheckpointError, match=r"convert the weights to safetensors"):
        open_checkpoint(folder)
