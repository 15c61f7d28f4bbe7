"""Hugging Face folders that are refused, and the words of each refusal."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from exporter.checkpoint.huggingface import open_huggingface
from exporter.common.errors import CheckpointError
from tests.conftest import TINY
from tests.support.checkpoint_folders import (
    ABSENT,
    LLAMA3_RULE,
    edit_config,
    rewrite_tensors,
    write_huggingface,
    write_json,
)

TIED = dataclasses.replace(TINY, tie_word_embeddings=True)
N_TENSORS = 9 * TINY.n_layers + 3


@pytest.fixture
def folder(tmp_path):
    return write_huggingface(tmp_path / "checkpoint", TINY)


def refusal(folder) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_huggingface(folder)
    return str(caught.value)


# --- refusals: config.json --------------------------------------------------------------------------------------------


def test_missing_folder_is_refused_by_name(tmp_path):
    message = refusal(tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in message
    assert "no such folder" in message


def test_folder_without_a_config_is_refused(folder):
    (folder / "config.json").unlink()
    message = refusal(folder)
    assert str(folder) in message
    assert "config.json" in message


@pytest.mark.parametrize(("content", "said"), [("{not json", "JSON"), ("[1, 2]", "list"), ("", "JSON")])
def test_config_that_is_no_json_object_is_refused(folder, content, said):
    (folder / "config.json").write_text(content)
    message = refusal(folder)
    assert str(folder / "config.json") in message
    assert said in message


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            {"architectures": ["MistralForCausalLM"], "model_type": "mistral"},
            ["MistralForCausalLM", "LlamaForCausalLM"],
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForSequenceClassification", "LlamaForCausalLM"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["yarn", "llama3"]),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, ["linear"]),
        ({"rope_scaling": {"rope_type": "llama3"}}, ["factor"]),
        ({"rope_scaling": "llama3"}, ["rope_scaling", "object"]),
        ({"attention_bias": True}, ["attention_bias", "True"]),
        ({"mlp_bias": True}, ["mlp_bias", "True"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        (
            {"rope_parameters": {"rope_type": "llama3", **LLAMA3_RULE, "partial_rotary_factor": 0.5}},
            ["partial_rotary_factor", "0.5"],
        ),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        (
            {"head_dim": ABSENT, "num_attention_heads": 3, "num_key_value_heads": 3},
            ["64", "3", "hidden_size", "num_attention_heads"],
        ),
        ({"num_key_value_heads": 3}, ["4", "3", "n_kv_heads"]),
        ({"head_dim": 15}, ["head_dim", "15", "even"]),
        ({"num_key_value_heads": 0}, ["n_kv_heads", "0"]),
        ({"num_key_value_heads": False}, ["n_kv_heads", "False"]),
        ({"head_dim": 0}, ["head_dim", "0"]),
        ({"head_dim": False}, ["head_dim", "False"]),
        ({"architectures": []}, ["architectures", "[]", "LlamaForCausalLM"]),
        ({"architectures": False}, ["architectures", "False"]),
        ({"rope_scaling": False}, ["rope_scaling", "False", "object"]),
        ({"rope_parameters": []}, ["rope_parameters", "[]", "object"]),
        ({"rope_theta": 0}, ["rope_theta", "0"]),
        ({"rope_theta": 1.0, "rope_parameters": {"rope_theta": True}}, ["rope_theta", "True", "1.0"]),
        ({"attention_bias": 0}, ["attention_bias", "0"]),
        ({"partial_rotary_factor": True}, ["partial_rotary_factor", "True"]),
        ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": True}}, ["partial_rotary_factor", "True"]),
        ({"rope_scaling": {"rope_type": "default", "type": "llama3"}}, ["rope_type 'default'", "type 'llama3'"]),
        (
            {"rope_scaling": {"rope_type": "llama3", "type": "default", **LLAMA3_RULE}},
            ["rope_type 'llama3'", "type 'default'"],
        ),
        ({"rope_parameters": {"rope_type": "default", "type": "linear"}}, ["rope_type 'default'", "type 'linear'"]),
        ({"tie_word_embeddings": 0}, ["tie_word_embeddings", "0"]),
        ({"eos_token_id": TINY.vocab_size}, ["eos_token_id", str(TINY.vocab_size), f"0 to {TINY.vocab_size - 1}"]),
        ({"eos_token_id": [2, -1]}, ["eos_token_id", "-1"]),
        ({"eos_token_id": False}, ["eos_token_id", "False"]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'"]),
        ({"num_hidden_layers": 0}, ["n_layers", "0"]),
        ({"rope_theta": "fast"}, ["rope_theta", "fast"]),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3_RULE, "factor": "big"}}, ["factor", "big"]),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3_RULE, "low_freq_factor": "low"}},
            ["low_freq_factor", "low"],
        ),
        ({"intermediate_size": ABSENT, "vocab_size": ABSENT}, ["missing", "intermediate_size", "vocab_size"]),
        ({"rms_norm_eps": float("inf")}, ["norm_eps", "inf"]),
        ({"rope_theta": float("nan")}, ["rope_theta", "nan"]),
        ({"rope_scaling": {"rope_type": float("nan")}}, ["rope_scaling", "nan"]),
        ({"rope_scaling": {"rope_type": "default", "factor": 4.0}}, ["rope_scaling", "factor"]),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3_RULE, "attention_factor": 2.0}}, ["attention_factor"]),
        (
            {"rope_theta": 10_000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
            ["10000.0", "500000.0", "rope_theta"],
        ),
        (
            {
                "rope_scaling": {"type": "llama3", **LLAMA3_RULE},
                "rope_parameters": {"rope_type": "llama3", **LLAMA3_RULE, "factor": 32.0},
            },
            ["8.0", "32.0", "rope_parameters"],
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_config_that_cannot_be_reproduced_is_refused_with_its_values(folder, overrides, said):
    edit_config(folder, TINY, **overrides)
    message = refusal(folder)
    for words in said:
        assert words in message


# --- refusals: files and tensors --------------------------------------------------------------------------------------


def test_folder_without_safetensors_is_refused(folder):
    (folder / "model.safetensors").unlink()
    message = refusal(folder)
    assert str(folder) in message
    assert "model.safetensors" in message


@pytest.fixture
def sharded(tmp_path):
    return write_huggingface(tmp_path / "sharded", TINY, shards=3)


SHARD = "model-00002-of-00003.safetensors"


def test_missing_shard_is_refused_by_name(sharded):
    (sharded / SHARD).unlink()
    message = refusal(sharded)
    assert SHARD in message
    assert "missing" in message


@pytest.mark.parametrize("kept", [0, 4, 60, 0.5, 0.999])
def test_truncated_shard_is_refused_by_name(sharded, kept):
    data = (sharded / SHARD).read_bytes()
    (sharded / SHARD).write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    message = refusal(sharded)
    assert str(sharded / SHARD) in message
    assert "safetensors" in message


def edit_index(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    write_json(path, index)


@pytest.mark.parametrize("outside", ["../x.safetensors", "/tmp/x.safetensors", "sub/x.safetensors"])
def test_index_that_names_a_file_outside_the_folder_is_refused(sharded, outside):
    (sharded.parent / "x.safetensors").write_bytes((sharded / SHARD).read_bytes())
    edit_index(
        sharded,
        lambda index: index["weight_map"].update(
            {name: outside for name, shard in index["weight_map"].items() if shard == SHARD}
        ),
    )
    message = refusal(sharded)
    assert outside in message
    assert "inside the folder" in message


def test_index_that_puts_a_tensor_into_another_shard_is_refused(sharded):
    name = "model.embed_tokens.weight"  # it is in the first shard
    edit_index(sharded, lambda index: index["weight_map"].update({name: SHARD}))
    message = refusal(sharded)
    assert name in message
    assert "model.safetensors.index.json" in message


@pytest.mark.parametrize("content", [{}, {"weight_map": {}}, {"weight_map": ["model.norm.weight"]}])
def test_index_without_a_weight_map_is_refused(sharded, content):
    write_json(sharded / "model.safetensors.index.json", content)
    message = refusal(sharded)
    assert "model.safetensors.index.json" in message
    assert "weight_map" in message


def test_missing_tensor_is_refused_with_counts(folder):
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite_tensors(folder, lambda tensors: tensors.pop(name))
    message = refusal(folder)
    assert f"{N_TENSORS - 1} of {N_TENSORS}" in message
    assert f"missing 1 ({name})" in message
    assert "unexpected none" in message


def test_unexpected_bias_is_refused_with_counts(folder):
    name = "model.layers.0.self_attn.q_proj.bias"
    rewrite_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(64)}))
    message = refusal(folder)
    assert f"{N_TENSORS} of {N_TENSORS}" in message
    assert f"unexpected 1 ({name})" in message


def test_renamed_prefix_is_refused_with_counts(folder):
    def strip_prefix(tensors):
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    rewrite_tensors(folder, strip_prefix)
    message = refusal(folder)
    assert f"1 of {N_TENSORS}" in message  # lm_head has no prefix
    assert f"missing {N_TENSORS - 1} (model.embed_tokens.weight" in message
    assert f"unexpected {N_TENSORS - 1} (embed_tokens.weight" in message


def test_a_layer_too_many_is_refused(folder):
    edit_config(folder, TINY, num_hidden_layers=2)
    assert "unexpected 9 (model.layers.2." in refusal(folder)


def test_wrong_shape_is_refused_with_both_shapes(folder):
    name = "model.layers.2.self_attn.k_proj.weight"
    rewrite_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(64, 64)}))
    message = refusal(folder)
    for words in ("model.safetensors", name, "[64, 64]", "[32, 64]"):
        assert words in message


def test_integer_tensor_is_refused_with_its_dtype(folder):
    name = "model.embed_tokens.weight"
    rewrite_tensors(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.int64)}))
    message = refusal(folder)
    for words in ("model.safetensors", name, "I64", "BF16"):
        assert words in message


def test_tied_config_with_a_differing_head_is_refused(tmp_path):
    folder = write_huggingface(tmp_path / "checkpoint", TIED)
    rewrite_tensors(
        folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    )
    message = refusal(folder)
    assert "lm_head.weight" in message
    assert "tie_word_embeddings" in message
