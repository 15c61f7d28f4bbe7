"""Meta folders: one file or model-parallel shards give the same bundle as Hugging Face, and no pickled code is run."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle

import pytest
import torch

from exporter.checkpoint.formats import open_checkpoint
from exporter.common.errors import CheckpointError, InputError
from exporter.export import ExportRequest, export_bundle
from exporter.model.weights import RandomWeights
from exporter.spec import catalogue
from exporter.spec.parameters import weight_shapes
from exporter.spec.unit import Unit
from tests.support.checkpoint_folders import meta_shards, write_huggingface

CONFIG = catalogue.ModelConfig(
    hidden_size=96,
    n_layers=2,
    n_heads=6,
    n_kv_heads=3,
    head_dim=16,
    intermediate_size=96,
    vocab_size=99,
    context_length=128,
    rope_theta=500_000.0,
)
N_TENSORS = 2 * 9 + 3


@pytest.fixture(autouse=True)
def tiny_catalogue(monkeypatch):
    """Adds the tiny geometry to the catalogue: as it is, with RoPE scaling, and with a tied head."""
    scaled = dataclasses.replace(CONFIG, rope_scaling=catalogue.RopeScaling(8.0, original_context_length=64))
    tied = dataclasses.replace(CONFIG, tie_word_embeddings=True)
    for name, config in {"tiny": CONFIG, "tiny-scaled": scaled, "tiny-tied": tied}.items():
        monkeypatch.setitem(catalogue.CATALOGUE, name, config)


def write_meta(folder, shards=1, embedding_axis=0, params=None, change=lambda shards: None, tied=False):
    """Writes the weights of RandomWeights(CONFIG, 0), split as a model-parallel run of `shards` saves them."""
    folder.mkdir()
    parts = meta_shards(
        dataclasses.replace(CONFIG, tie_word_embeddings=tied), RandomWeights(CONFIG, 0), shards, embedding_axis
    )
    for part in parts:
        part["rope.freqs"] = torch.ones(8)
    change(parts)
    for index, part in enumerate(parts):
        torch.save(part, folder / f"consolidated.{index:02d}.pth")
    stated = {"dim": 96, "n_layers": 2, "n_heads": 6, "n_kv_heads": 3, "vocab_size": 99, "multiple_of": 96}
    stated |= {"ffn_dim_multiplier": 0.3, "norm_eps": 1e-5, "rope_theta": 500_000.0, **(params or {})}
    (folder / "params.json").write_text(json.dumps({k: v for k, v in stated.items() if v is not ...}))
    return folder


@pytest.mark.parametrize(("shards", "embedding_axis"), [(1, 0), (3, 0), (3, 1)])
def test_every_weight_comes_back_bit_equal_whole_and_by_columns(tmp_path, shards, embedding_axis):
    opened = open_checkpoint(write_meta(tmp_path / "meta", shards, embedding_axis), "tiny")
    assert opened.config == CONFIG and opened.weights.counts == {"used": N_TENSORS, "derived": 1}
    source = RandomWeights(CONFIG, 0)
    for name in weight_shapes(CONFIG, Unit("model", n_layers=CONFIG.n_layers)):
        assert torch.equal(opened.weights.read(name), source.read(name)), name
        for columns in (slice(0, 10), slice(20, 70), slice(90, 96)):
            assert torch.equal(opened.weights.read(name, columns), source.read(name, columns)), (name, columns)


def test_both_formats_give_the_same_bundle(tmp_path):
    checkpoints = {
        "hf": open_checkpoint(write_huggingface(tmp_path / "hf", CONFIG)),
        "hf-sharded": open_checkpoint(write_huggingface(tmp_path / "hf-sharded", CONFIG, shards=2)),
        "meta": open_checkpoint(write_meta(tmp_path / "meta"), "tiny"),
        "meta-sharded": open_checkpoint(write_meta(tmp_path / "meta-sharded", 3), "tiny"),
    }
    files = []
    for name, opened in checkpoints.items():
        request = ExportRequest(opened.config, Unit.parse("model", opened.config), opened.weights, "fp16")
        export_bundle(request, tmp_path / f"bundle-{name}", validated=False)
        names = ("model.onnx", "model.onnx.data", "manifest.json")
        files.append([(tmp_path / f"bundle-{name}" / file).read_bytes() for file in names])
    assert all(content == files[0] for content in files[1:])


def test_a_head_equal_to_the_embedding_is_stored_once(tmp_path):
    assert open_checkpoint(write_meta(tmp_path / "meta", tied=True), "tiny").config.tie_word_embeddings
    assert open_checkpoint(write_meta(tmp_path / "sharded", 3, tied=True), "tiny").config.tie_word_embeddings
    assert open_checkpoint(tmp_path / "meta", "tiny-tied").config.tie_word_embeddings


def test_scaled_rope_takes_its_rule_from_the_named_model(tmp_path):
    folder = write_meta(tmp_path / "meta", params={"use_scaled_rope": True})
    assert open_checkpoint(folder, "tiny-scaled").config.rope_scaling.factor == 8.0
    with pytest.raises(CheckpointError, match="tiny has no rule for it"):
        open_checkpoint(folder, "tiny")


def test_a_vocabulary_that_params_leave_open_is_read_from_the_head(tmp_path):
    for number, size in enumerate((-1, None, ...)):
        folder = write_meta(tmp_path / f"meta{number}", 3, params={"vocab_size": size})
        assert open_checkpoint(folder, "tiny").config.vocab_size == 99


def test_a_value_that_was_rounded_to_float32_agrees(tmp_path):
    folder = write_meta(tmp_path / "meta", params={"norm_eps": 9.999999747378752e-06, "rope_theta": 500_000})
    assert open_checkpoint(folder, "tiny").config.norm_eps == 9.999999747378752e-06


def test_an_absent_theta_is_that_of_metas_code(tmp_path, monkeypatch):
    monkeypatch.setitem(catalogue.CATALOGUE, "older", dataclasses.replace(CONFIG, rope_theta=10_000.0))
    for number, theta in enumerate((..., None, 10_000)):
        folder = write_meta(tmp_path / f"meta{number}", params={"rope_theta": theta})
        assert open_checkpoint(folder, "older").config.rope_theta == 10_000


@pytest.mark.parametrize(
    ("params", "model", "message"),
    [
        ({}, None, "lacks the context length; give model, a name of the catalogue"),
        ({"use_scaled_rope": True}, None, "and the RoPE scaling rule"),
        ({}, "llama3-8b", r"not of llama3-8b: hidden_size 96, expected 4096"),
        ({"dim": ...}, "tiny", r"missing keys \['dim'\]"),
        ({"moe": 8}, "tiny", r"unknown keys \['moe'\]"),
        ({"n_heads": 5}, "tiny", "dim 96 and n_heads 5"),
        ({"vocab_size": 98}, "tiny", "not of tiny: vocab_size 98, expected 99"),
        ({"vocab_size": 0}, "tiny", "vocab_size: got 0"),
        ({"vocab_size": False}, "tiny", "vocab_size: got False"),
        ({"vocab_size": "many"}, "tiny", "vocab_size: got 'many'"),
        ({"vocab_size": -2}, "tiny", "vocab_size: got -2"),
        ({"n_kv_heads": 0}, "tiny", "n_kv_heads: got 0"),
        ({"n_kv_heads": False}, "tiny", "n_kv_heads: got False"),
        ({"n_kv_heads": ...}, "tiny", "n_kv_heads 6, expected 3"),
        ({"ffn_dim_multiplier": 0}, "tiny", "ffn_dim_multiplier: got 0"),
        ({"ffn_dim_multiplier": ...}, "tiny", "intermediate_size 288, expected 96"),
        ({"rope_theta": ...}, "tiny", r"rope_theta 10000\.0, expected 500000\.0"),
        ({"rope_theta": 10_000}, "tiny", r"rope_theta 10000, expected 500000\.0"),
        ({"rope_theta": 0}, "tiny", "rope_theta: got 0"),
        ({"norm_eps": 1e-6}, "tiny", "norm_eps 1e-06, expected 1e-05"),
        ({"norm_eps": 0}, "tiny", "norm_eps: got 0"),
        ({}, "tiny-scaled", r"rope_scaling None, expected RopeScaling\(factor=8\.0"),
        ({"use_scaled_rope": False}, "tiny-scaled", r"rope_scaling None, expected RopeScaling\(factor=8\.0"),
        ({"use_scaled_rope": "no"}, "tiny-scaled", "use_scaled_rope: got 'no', expected true or false"),
        ({"use_scaled_rope": 1}, "tiny-scaled", "use_scaled_rope: got 1, expected true or false"),
        ({}, "tiny-tied", "an output head of its own, and that of tiny-tied is its embedding"),
    ],
)
def test_params_that_do_not_fit_are_refused(tmp_path, params, model, message):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(write_meta(tmp_path / "meta", params=params), model)


def drop(name):
    return lambda shards: shards[-1].pop(name)


def add(name, tensor):
    return lambda shards: shards[0].__setitem__(name, tensor)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            drop("layers.1.attention.wq.weight"),
            r"20 of 21 expected tensors found; missing 1 \(layers\.1\.attention\.wq\.weight\)",
        ),
        (add("layers.0.attention.wq.bias", torch.zeros(96)), r"unexpected 1 \(layers\.0\.attention\.wq\.bias\)"),
        (add("norm.weight", torch.zeros(96)), "norm.weight is whole in every shard and differs"),
        (
            add("layers.0.feed_forward.w2.weight", torch.zeros(96, 31)),
            r"layers\.0\.feed_forward\.w2\.weight has shapes",
        ),
        (add("layers.0.attention.wk.weight", torch.zeros(16, 96, dtype=torch.int8)), "int8"),
    ],
)
def test_shards_that_do_not_cover_the_model_are_refused_by_name(tmp_path, change, message):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(write_meta(tmp_path / "meta", 3, change=change), "tiny")


def test_missing_and_truncated_shards_are_refused(tmp_path):
    folder = write_meta(tmp_path / "meta", 3)
    (folder / "consolidated.01.pth").rename(folder / "elsewhere")
    with pytest.raises(CheckpointError, match="without a gap"):
        open_checkpoint(folder, "tiny")
    (folder / "consolidated.01.pth").write_bytes((folder / "elsewhere").read_bytes()[:-500])
    with pytest.raises(CheckpointError, match=r"consolidated\.01\.pth: not a plain file of tensors"):
        open_checkpoint(folder, "tiny")


class Evil:
    """Runs a command when it is unpickled by a loader that allows it."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize(
    "save", [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content))], ids=["zip", "bare pickle"]
)
def test_pickled_code_is_refused_and_not_run(tmp_path, save):
    folder = write_meta(tmp_path / "meta")
    proof = tmp_path / "run"
    save({"norm.weight": Evil(f"touch {proof}")}, folder / "consolidated.00.pth")
    with pytest.raises(CheckpointError, match="nothing in it was run"):
        open_checkpoint(folder, "tiny")
    assert not proof.exists()


def test_a_folder_must_be_of_one_format(tmp_path):
    folder = write_meta(tmp_path / "meta")
    (folder / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="both"):
        open_checkpoint(folder, "tiny")
    with pytest.raises(InputError, match="leave model out"):
        open_checkpoint(write_huggingface(tmp_path / "hf", CONFIG), "tiny")
