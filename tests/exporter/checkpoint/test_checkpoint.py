"""Hugging Face folders: what is read from them, what is refused and how, and agreement with transformers."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from exporter.checkpoint.huggingface import adjacent_pairs, open_huggingface, parse_config
from exporter.common.errors import CheckpointError
from exporter.model.weights import RandomWeights
from exporter.spec.catalogue import RopeScaling
from exporter.spec.feeds import step_feeds
from exporter.spec.graph_spec import GraphSpec
from exporter.spec.unit import Unit
from exporter.steppers.eager_stepper import EagerStepper
from tests.conftest import TINY
from tests.support.checkpoint_folders import (
    ABSENT,
    canonical_names,
    half_split_pairs,
    huggingface_config,
    rewrite_tensors,
    write_huggingface,
    write_json,
)

TIED = dataclasses.replace(TINY, tie_word_embeddings=True)
SCALED = dataclasses.replace(TINY, rope_theta=500_000.0, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32))
LLAMA3_RULE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
N_TENSORS = 9 * TINY.n_layers + 3


@pytest.fixture
def folder(tmp_path):
    return write_huggingface(tmp_path / "checkpoint", TINY)


def edit_config(folder, **overrides):
    write_json(folder / "config.json", huggingface_config(TINY, **overrides))


def refusal(folder) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_huggingface(folder)
    return str(caught.value)


# --- what is read ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("config", [TINY, TIED], ids=["untied", "tied"])
def test_tensors_are_read_bit_equal_under_canonical_names(tmp_path, config, shards):
    opened = open_huggingface(write_huggingface(tmp_path / "checkpoint", config, seed=3, shards=shards))
    expected = RandomWeights(config, 3)
    assert opened.config == config
    assert opened.weights.counts["used"] == len(canonical_names(config)) == N_TENSORS - config.tie_word_embeddings
    for name in canonical_names(config):
        assert torch.equal(opened.weights.read(name), expected.read(name)), name
        assert torch.equal(opened.weights.read(name, slice(5, 9)), expected.read(name, slice(5, 9))), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_tensors_are_read_as_they_are_stored(tmp_path, dtype):
    weights = open_huggingface(write_huggingface(tmp_path / "checkpoint", TINY, dtype=dtype)).weights
    read = weights.read("blocks.1.attention.k_proj.weight")
    assert read.dtype == dtype
    assert torch.equal(read, RandomWeights(TINY, 0).read("blocks.1.attention.k_proj.weight").to(dtype))


def test_row_order_of_one_head_is_that_of_the_cases():
    meta = torch.arange(8.0)[:, None]
    assert half_split_pairs(meta, 8).flatten().tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert torch.equal(adjacent_pairs(half_split_pairs(meta, 8), 8), meta)


@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_scaling": {"type": "llama3", **LLAMA3_RULE}},
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3_RULE}},
        {
            "rope_theta": ABSENT,
            "rope_scaling": ABSENT,
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 500_000.0, **LLAMA3_RULE},
        },
        {"rope_scaling": ABSENT, "rope_parameters": {"rope_type": "llama3", "rope_theta": 500_000.0, **LLAMA3_RULE}},
    ],
    ids=["older, type", "older, rope_type", "newer", "newer, theta twice"],
)
def test_older_and_newer_rope_spellings_give_one_config(overrides):
    assert parse_config(huggingface_config(SCALED, **overrides)) == SCALED


@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_scaling": ABSENT},
        {"rope_scaling": {"rope_type": "default"}},
        {"rope_theta": ABSENT, "rope_parameters": {"rope_type": "default", "rope_theta": 70_000.0}},
    ],
)
def test_plain_rope_has_no_scaling(overrides):
    config = dataclasses.replace(TINY, rope_theta=70_000.0)
    assert parse_config(huggingface_config(config, **overrides)) == config


def test_theta_is_10000_where_a_config_has_none():
    assert parse_config(huggingface_config(SCALED, rope_theta=ABSENT)).rope_theta == 10_000.0


@pytest.mark.parametrize(
    ("head_dim", "expected"), [(ABSENT, 16), (None, 16), (24, 24)], ids=["absent", "null", "given"]
)
def test_head_dim_is_derived_only_where_it_is_not_given(head_dim, expected):
    assert parse_config(huggingface_config(TINY, head_dim=head_dim)).head_dim == expected


@pytest.mark.parametrize("kv_heads", [ABSENT, None])
def test_absent_kv_heads_mean_as_many_as_query_heads(kv_heads):
    assert parse_config(huggingface_config(TINY, num_key_value_heads=kv_heads)).n_kv_heads == TINY.n_heads


@pytest.mark.parametrize(
    ("in_config", "in_generation_config", "expected"),
    [
        (2, None, (2,)),
        ([2, 7], None, (2, 7)),
        (ABSENT, None, ()),
        (2, {"eos_token_id": [9, 4]}, (9, 4)),
        (2, {"eos_token_id": 9}, (9,)),
        (2, {"temperature": 0.6}, (2,)),
    ],
)
def test_end_tokens_are_those_of_the_generation_config_else_of_the_config(
    folder, in_config, in_generation_config, expected
):
    edit_config(folder, eos_token_id=in_config)
    if in_generation_config:
        write_json(folder / "generation_config.json", in_generation_config)
    assert open_huggingface(folder).end_token_ids == expected


def test_stored_rope_frequencies_are_passed_over(folder):
    inv_freq = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(8) for layer in range(TINY.n_layers)}
    rewrite_tensors(folder, lambda tensors: tensors.update(inv_freq))
    assert open_huggingface(folder).weights.counts == {"used": N_TENSORS, "derived": TINY.n_layers}


def test_a_tied_checkpoint_may_repeat_the_same_head(tmp_path):
    folder = write_huggingface(tmp_path / "checkpoint", TIED)
    rewrite_tensors(
        folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    )
    assert open_huggingface(folder).config.tie_word_embeddings


def test_tokenizer_files_are_found_where_they_lie(folder):
    (folder / "tokenizer.json").write_text("{}")
    assert open_huggingface(folder).tokenizer_files == (folder / "tokenizer.json",)


# --- refusals: config.json ---------------------------------------------------------------------------------------------


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
        ({"hidden_size": "64"}, ["hidden_size", "'64'"]),
        ({"num_hidden_layers": 0}, ["n_layers", "0"]),
        ({"rope_theta": "fast"}, ["rope_theta", "fast"]),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3_RULE, "factor": "big"}}, ["factor", "big"]),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3_RULE, "low_freq_factor": "low"}},
            ["low_freq_factor", "low"],
        ),
        ({"intermediate_size": ABSENT, "rms_norm_eps": ABSENT}, ["missing", "intermediate_size", "rms_norm_eps"]),
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
    edit_config(folder, **overrides)
    message = refusal(folder)
    for words in said:
        assert words in message


# --- refusals: files and tensors ---------------------------------------------------------------------------------------


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
    name = "model.embed_tokens.weight"  # it lies in the first shard
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
    edit_config(folder, num_hidden_layers=2)
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


# --- the independent oracle --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain rope", "llama3 rope"])
def test_a_folder_saved_by_transformers_gives_transformers_logits(tmp_path, scaled, tied):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    rope = (
        {"rope_type": "llama3", "rope_theta": 500_000.0, **LLAMA3_RULE}
        if scaled
        else {"rope_type": "default", "rope_theta": 10_000.0}
    )
    sizes = {
        key: value
        for key, value in huggingface_config(TINY).items()
        if isinstance(value, int) and not isinstance(value, bool)
    }
    config = transformers.LlamaConfig(**sizes, rope_parameters=rope, tie_word_embeddings=tied, initializer_range=0.2)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():  # norms of 1 would hide that one was left out
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0, 0.1)
    model.save_pretrained(tmp_path)

    opened = open_huggingface(tmp_path)
    assert opened.config.tie_word_embeddings == tied
    assert (opened.config.rope_scaling is not None) == scaled
    tokens = torch.randint(0, 101, (1, 7))
    unit = Unit("model", n_layers=3, logits="all")
    stepper = EagerStepper.from_weights(GraphSpec(opened.config, unit, "fp32", 64), opened.weights)
    feeds = step_feeds("input_ids", tokens.numpy(), np.array([0]), np.array([7]))
    got = stepper.run(feeds, stepper.new_cache(1, 16))["logits"]
    with torch.no_grad():
        expected = model(tokens).logits.numpy()
    assert np.abs(expected).max() > 1  # so that 1e-4 is a small part of it
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)
