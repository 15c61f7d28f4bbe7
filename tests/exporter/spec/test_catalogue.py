"""The catalogue's numbers, what a geometry refuses, and the units and limits that are derived from it."""

from __future__ import annotations

import dataclasses
import json

import pytest

from exporter.common.errors import InputError
from exporter.spec.catalogue import CATALOGUE, WIDTH_RULES, ModelConfig, RopeScaling, WidthRule, lookup
from exporter.spec.limits import check_cache_capacity, check_max_positions
from exporter.spec.unit import COMPONENTS, Unit

SMALL = {
    "hidden_size": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "vocab_size": 101, "context_length": 128,
}  # fmt: skip
SIZES = tuple(SMALL)


def small(**changes) -> ModelConfig:
    return ModelConfig(**{**SMALL, **changes})


# --- the catalogue's table --------------------------------------------------------------------------------------------

# model: dim, layers, heads, kv heads, ffn multiplier, multiple of, theta, RoPE factor, context, vocabulary, tied,
# head_dim, width
TABLE = {
    "llama3-8b": (4096, 32, 32, 8, 1.3, 1024, 500_000, None, 8_192, 128_256, False, 128, 14_336),
    "llama3-70b": (8192, 80, 64, 8, 1.3, 4096, 500_000, None, 8_192, 128_256, False, 128, 28_672),
    "llama3.1-8b": (4096, 32, 32, 8, 1.3, 1024, 500_000, 8, 131_072, 128_256, False, 128, 14_336),
    "llama3.1-70b": (8192, 80, 64, 8, 1.3, 4096, 500_000, 8, 131_072, 128_256, False, 128, 28_672),
    "llama3.1-405b": (16384, 126, 128, 8, 1.2, 4096, 500_000, 8, 131_072, 128_256, False, 128, 53_248),
    "llama3.2-1b": (2048, 16, 32, 8, 1.5, 256, 500_000, 32, 131_072, 128_256, True, 64, 8_192),
    "llama3.2-3b": (3072, 28, 24, 8, 1.0, 256, 500_000, 32, 131_072, 128_256, True, 128, 8_192),
    "smollm2-135m": (576, 30, 9, 3, None, 256, 100_000, None, 8_192, 49_152, True, 64, 1_536),
}


def test_the_catalogue_holds_these_models_and_no_other():
    assert list(CATALOGUE) == list(WIDTH_RULES) == list(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_every_column_of_the_catalogue(name):
    dim, layers, heads, kv_heads, multiplier, multiple_of, theta, factor, context, vocabulary, tied, head_dim, width = (
        TABLE[name]
    )
    assert lookup(name) == ModelConfig(
        hidden_size=dim,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=width,
        vocab_size=vocabulary,
        context_length=context,
        rope_theta=theta,
        rope_scaling=factor
        and RopeScaling(factor, low_freq_factor=1, high_freq_factor=4, original_context_length=8_192),
        norm_eps=1e-5,
        tie_word_embeddings=tied,
    )
    assert WIDTH_RULES[name] == WidthRule(multiplier, multiple_of)


@pytest.mark.parametrize(
    ("name", "n_rep"),
    [("llama3-8b", 4), ("llama3-70b", 8), ("llama3.1-405b", 16), ("llama3.2-3b", 3), ("smollm2-135m", 3)],
)
def test_query_heads_per_kv_head(name, n_rep):
    assert lookup(name).n_rep == n_rep


def test_an_unknown_model_lists_the_valid_ones():
    with pytest.raises(InputError, match="llama4") as error:
        lookup("llama4")
    assert all(name in str(error.value) for name in TABLE)


# --- the MLP width ----------------------------------------------------------------------------------------------------


def test_the_8b_width_follows_in_four_steps():
    assert WIDTH_RULES["llama3-8b"].steps(4096) == [
        ("4 × 4,096", 16_384),
        ("⌊2/3 × 16,384⌋", 10_922),
        ("⌊1.3 × 10,922⌋", 14_198),
        ("1,024 × ⌈14,198 / 1,024⌉", 14_336),
    ]


def test_a_rule_without_multiplier_skips_that_step():
    assert [result for _, result in WIDTH_RULES["smollm2-135m"].steps(576)] == [2_304, 1_536, 1_536]


def test_a_width_that_is_already_a_multiple_is_not_rounded_up():
    assert WidthRule(None, 256).width(384) == 1_024
    assert WidthRule(None, 256).width(385) == 1_280


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_heads_that_do_not_divide_are_refused_with_both_numbers():
    with pytest.raises(InputError, match=r"n_heads 7 and n_kv_heads 2"):
        small(n_heads=7, n_kv_heads=2)


def test_more_kv_heads_than_heads_are_refused():
    with pytest.raises(InputError, match=r"n_heads 2 and n_kv_heads 4"):
        small(n_heads=2, n_kv_heads=4)


def test_an_odd_head_dim_is_refused():
    with pytest.raises(InputError, match="head_dim: got 15"):
        small(head_dim=15)


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "2"])
@pytest.mark.parametrize("field", SIZES)
def test_a_size_that_is_no_positive_whole_number_is_refused(field, value):
    with pytest.raises(InputError, match=f"{field}: got {value!r}"):
        small(**{field: value})


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "1"])
@pytest.mark.parametrize("field", ["rope_theta", "norm_eps"])
def test_a_theta_or_eps_that_is_no_positive_number_is_refused(field, value):
    with pytest.raises(InputError, match=f"{field}: got {value!r}"):
        small(**{field: value})


@pytest.mark.parametrize("factor", [0.5, 0, -8.0])
def test_a_scaling_factor_below_one_is_refused(factor):
    with pytest.raises(InputError, match=f"factor: got {factor}"):
        RopeScaling(factor)


@pytest.mark.parametrize(("low", "high"), [(4.0, 1.0), (2.0, 2.0)])
def test_scaling_bands_out_of_order_are_refused_with_both_numbers(low, high):
    with pytest.raises(InputError, match=f"low_freq_factor {low} and high_freq_factor {high}"):
        RopeScaling(8.0, low_freq_factor=low, high_freq_factor=high)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), True, "8"])
@pytest.mark.parametrize("field", ["factor", "low_freq_factor", "high_freq_factor"])
def test_a_scaling_value_that_is_no_positive_number_is_refused(field, value):
    with pytest.raises(InputError, match=f"{field}: got"):
        RopeScaling(**{"factor": 8.0, field: value})


def test_a_scaling_without_original_context_is_refused():
    with pytest.raises(InputError, match="original_context_length: got 0"):
        RopeScaling(8.0, original_context_length=0)


# --- as data ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLE)
def test_a_config_survives_json(name):
    config = lookup(name)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_to_dict_holds_every_field():
    assert set(small().to_dict()) == {field.name for field in dataclasses.fields(ModelConfig)}


def test_from_dict_leaves_its_argument_alone():
    data = lookup("llama3.1-8b").to_dict()
    ModelConfig.from_dict(data)
    assert data == lookup("llama3.1-8b").to_dict()


def test_an_unknown_key_is_refused():
    with pytest.raises(InputError, match=r"unknown keys \['n_experts'\]"):
        ModelConfig.from_dict({**small().to_dict(), "n_experts": 8})


@pytest.mark.parametrize("key", SIZES)
def test_a_missing_size_is_refused(key):
    data = small().to_dict()
    del data[key]
    with pytest.raises(InputError, match=rf"missing keys \['{key}'\]"):
        ModelConfig.from_dict(data)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"factor": 8.0, "beta": 1}, r"rope_scaling: unknown keys \['beta'\]"),
        ({"low_freq_factor": 1.0}, r"rope_scaling: .*missing keys \['factor'\]"),
        ([8.0], "rope_scaling: got list"),
    ],
)
def test_a_bad_scaling_object_is_refused(scaling, message):
    with pytest.raises(InputError, match=message):
        ModelConfig.from_dict({**small().to_dict(), "rope_scaling": scaling})


def test_a_config_that_is_no_object_is_refused():
    with pytest.raises(InputError, match="config: got list"):
        ModelConfig.from_dict([])


# --- units ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "layers", "logits", "unit"),
    [
        ("block", None, "last", Unit("block")),
        ("block", "2:3", "last", Unit("block", first_layer=2)),
        ("block", "1", "last", Unit("block")),
        ("stack", None, "last", Unit("stack", n_layers=4)),
        ("stack", "2", "last", Unit("stack", n_layers=2)),
        ("stack", "1:4", "last", Unit("stack", first_layer=1, n_layers=3)),
        ("model", None, "last", Unit("model", n_layers=4)),
        ("model", "0:2", "all", Unit("model", n_layers=2, logits="all")),
        ("component:swiglu_mlp", "3:4", "last", Unit("component", "swiglu_mlp", first_layer=3)),
        *((f"component:{name}", None, "last", Unit("component", name)) for name in COMPONENTS),
    ],
)
def test_a_unit_is_read_as_the_user_writes_it(text, layers, logits, unit):
    assert Unit.parse(text, small(), layers, logits) == unit


@pytest.mark.parametrize(
    ("text", "layers", "logits", "message"),
    [
        ("layer", None, "last", "unit: got 'layer', expected block, stack, model"),
        ("", None, "last", "unit: got ''"),
        ("block:attention", None, "last", "unit: got 'block:attention'"),
        (
            "component",
            None,
            "last",
            "expected one of prepare_qkv, repeat_kv, attention, merge_project, swiglu_mlp, rms_norm",
        ),
        ("component:mlp", None, "last", "component: got 'mlp', expected one of prepare_qkv"),
        ("block", "2", "last", "expected one layer such as 0:1"),
        ("component:attention", "1:3", "last", "expected one layer such as 1:2"),
        ("model", "1:4", "last", "starts at layer 0"),
        ("stack", "5", "last", "got '5', expected 0 <= A < B <= 4"),
        ("stack", "2:5", "last", "expected 0 <= A < B <= 4"),
        ("stack", "2:2", "last", "expected 0 <= A < B <= 4"),
        ("stack", "3:1", "last", "expected 0 <= A < B <= 4"),
        ("stack", "0", "last", "expected 0 <= A < B <= 4"),
        ("stack", "-1:2", "last", "expected a count N or a range A:B"),
        ("stack", "a:b", "last", "expected a count N or a range A:B"),
        ("stack", "1:", "last", "expected a count N or a range A:B"),
        ("stack", "", "last", "expected a count N or a range A:B"),
        ("model", None, "first", "logits: got 'first', expected one of last, all"),
        ("stack", None, "all", "expected a model"),
    ],
)
def test_a_bad_unit_is_refused(text, layers, logits, message):
    with pytest.raises(InputError, match=message):
        Unit.parse(text, small(), layers, logits)


@pytest.mark.parametrize(
    ("unit", "has_cache", "text"),
    [
        (Unit("block", first_layer=3), True, "block of layers 3:4"),
        (Unit("model", n_layers=4), True, "model of layers 0:4"),
        (Unit("component", "attention"), False, "component:attention"),
    ],
)
def test_a_unit_says_what_it_is(unit, has_cache, text):
    assert unit.has_cache is has_cache
    assert str(unit) == text


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "context", "positions"),
    [(None, 131_072, 8_192), (None, 128, 128), (1, 128, 1), (128, 128, 128), (131_072, 131_072, 131_072)],
)
def test_positions_default_to_8192_or_a_shorter_context(asked, context, positions):
    assert check_max_positions(asked, small(context_length=context)) == positions


@pytest.mark.parametrize("asked", [0, -1, 129])
def test_positions_outside_the_context_are_refused(asked):
    with pytest.raises(InputError, match=f"got {asked}, expected 1 to 128"):
        check_max_positions(asked, small())


@pytest.mark.parametrize(("max_positions", "capacity"), [(8_192, 2_048), (131_072, 2_048), (512, 512)])
def test_capacity_defaults_to_2048_or_fewer_positions(max_positions, capacity):
    assert check_cache_capacity(None, lookup("llama3.1-8b"), "fp16", max_positions) == capacity


@pytest.mark.parametrize(
    ("n_kv_heads", "head_dim", "dtype", "asked", "capacity"),
    [
        (8, 128, "fp16", 7, 7),  # a row of 2,048 bytes is aligned by itself
        (2, 16, "fp16", 7, 8),  # rows of 64 bytes: multiples of 4
        (2, 16, "fp16", 8, 8),
        (2, 16, "fp32", 7, 8),  # rows of 128 bytes: multiples of 2
        (2, 16, "fp32", 9, 10),
        (1, 2, "bf16", 1, 64),  # rows of 4 bytes: multiples of 64
        (3, 64, "fp16", 5, 6),  # rows of 384 bytes: multiples of 2
    ],
)
def test_capacity_is_rounded_up_to_a_stride_of_256_bytes(n_kv_heads, head_dim, dtype, asked, capacity):
    config = small(n_heads=n_kv_heads, n_kv_heads=n_kv_heads, head_dim=head_dim)
    assert check_cache_capacity(asked, config, dtype, 128) == capacity
    assert capacity * n_kv_heads * head_dim * (4 if dtype == "fp32" else 2) % 256 == 0


@pytest.mark.parametrize("asked", [0, -4, 1.5, "8"])
def test_a_capacity_that_is_no_positive_whole_number_is_refused(asked):
    with pytest.raises(InputError, match=f"cache_capacity: got {asked!r}"):
        check_cache_capacity(asked, small(), "fp16", 64)


def test_a_capacity_beyond_the_positions_is_refused_with_both_numbers():
    with pytest.raises(InputError, match="got 68, expected at most 64"):
        check_cache_capacity(68, small(), "fp16", 64)


def test_a_capacity_that_rounds_past_the_positions_names_the_largest_that_fits():
    with pytest.raises(
        InputError, match=r"got 61, 64 once rounded up to a multiple of 4, expected at most 62.* ask for at most 60 "
    ):
        check_cache_capacity(61, small(), "fp16", 62)
    assert check_cache_capacity(60, small(), "fp16", 62) == 60
