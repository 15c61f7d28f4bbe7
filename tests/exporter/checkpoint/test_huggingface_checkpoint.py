"""Hugging Face folders: what is read from them, and agreement with transformers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from exporter.checkpoint.huggingface import adjacent_pairs, open_huggingface, parse_config
from exporter.model.weights import RandomWeights
from exporter.spec.catalogue import RopeScaling
from exporter.spec.feeds import step_feeds
from exporter.spec.graph_spec import GraphSpec
from exporter.spec.unit import Unit
from exporter.steppers.eager_stepper import EagerStepper
from tests.conftest import TINY
from tests.support.checkpoint_folders import (
    ABSENT,
    LLAMA3_RULE,
    canonical_names,
    edit_config,
    half_split_pairs,
    huggingface_config,
    rewrite_tensors,
    write_huggingface,
    write_json,
)

TIED = dataclasses.replace(TINY, tie_word_embeddings=True)
SCALED = dataclasses.replace(TINY, rope_theta=500_000.0, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32))
N_TENSORS = 9 * TINY.n_layers + 3


@pytest.fixture
def folder(tmp_path):
    return write_huggingface(tmp_path / "checkpoint", TINY)


# --- what is read -----------------------------------------------------------------------------------------------------


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


NULLABLE = (
    *("architectures", "attention_bias", "hidden_act", "mlp_bias", "partial_rotary_factor", "quantization_config"),
    *("head_dim", "num_key_value_heads", "rope_parameters", "rope_scaling", "rope_theta", "tie_word_embeddings"),
)


@pytest.mark.parametrize("key", NULLABLE)
def test_null_means_what_absence_means(key):
    absent, null = (parse_config(huggingface_config(TINY, **{key: value})) for value in (ABSENT, None))
    assert absent == null


def test_nulls_in_a_rope_rule_say_nothing():
    rule = {"rope_type": None, "type": "llama3", "rope_theta": None, **LLAMA3_RULE}
    assert parse_config(huggingface_config(TINY, rope_scaling=rule)).rope_scaling.factor == LLAMA3_RULE["factor"]


def test_two_equal_types_of_a_rope_rule_are_one_statement():
    rule = {"rope_type": "llama3", "type": "llama3", **LLAMA3_RULE}
    assert parse_config(huggingface_config(TINY, rope_scaling=rule)).rope_scaling.factor == LLAMA3_RULE["factor"]


@pytest.mark.parametrize(
    ("in_config", "in_generation_config", "expected"),
    [
        (2, None, (2,)),
        ([2, 7], None, (2, 7)),
        (ABSENT, None, ()),
        (2, {"eos_token_id": [9, 4]}, (9, 4)),
        (2, {"eos_token_id": 9}, (9,)),
        (2, {"eos_token_id": 0}, (0,)),
        (2, {"eos_token_id": []}, ()),
        (2, {"eos_token_id": None}, (2,)),
        (2, {"temperature": 0.6}, (2,)),
    ],
)
def test_end_tokens_are_those_of_the_generation_config_else_of_the_config(
    folder, in_config, in_generation_config, expected
):
    edit_config(folder, TINY, eos_token_id=in_config)
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


# --- agreement with transformers --------------------------------------------------------------------------------------


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
