"""Optimization profiles: the two that a build makes by itself, and those that a user gives."""

from __future__ import annotations

import pytest

from engines.network.profiles import (
    Profile,
    Range,
    check_capacity,
    default_profiles,
    explicit_profiles,
    largest_size,
    parse_shapes,
)
from exporter.common.errors import BundleError, InputError
from exporter.spec.tensors import TensorSpec, graph_contract
from exporter.spec.unit import Unit
from tests.conftest import TINY

CAPACITY = 64
BLOCK = {
    "hidden_states": ("batch_size", "sequence_length", 64),
    "write_indices": ("batch_size",),
    "attention_mask": ("batch_size", "total_sequence_length"),
    "past_key_values.0.key": ("batch_size", 2, CAPACITY, 16),
}

# --- profiles that a build makes by itself ------------------------------------------------------------------


def default(axes=BLOCK, max_batch=4, max_seq_len=32, cache_capacity=CAPACITY) -> dict[str, Profile]:
    return {profile.name: profile for profile in default_profiles(axes, max_batch, max_seq_len, cache_capacity)}


def test_a_graph_with_a_sequence_gets_decode_and_prefill():
    assert list(default()) == ["decode", "prefill"]


@pytest.mark.parametrize("name", BLOCK)
def test_each_profile_has_a_range_of_every_input(name):
    assert all(name in profile.ranges for profile in default().values())


def test_decode_takes_exactly_one_new_token():
    assert default()["decode"].ranges["hidden_states"] == Range((1, 1, 64), (4, 1, 64), (4, 1, 64))


def test_prefill_takes_one_to_the_most_new_tokens():
    assert default()["prefill"].ranges["hidden_states"] == Range((1, 1, 64), (4, 32, 64), (4, 32, 64))


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_batch_and_total_length_are_dynamic_up_to_the_capacity(name):
    ranges = default()[name].ranges
    assert ranges["write_indices"] == Range((1,), (4,), (4,))
    assert (ranges["attention_mask"].min, ranges["attention_mask"].max) == ((1, 1), (4, CAPACITY))


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_every_axis_of_the_cache_but_the_batch_is_static(name):
    assert default()[name].ranges["past_key_values.0.key"] == Range(
        (1, 2, CAPACITY, 16), (4, 2, CAPACITY, 16), (4, 2, CAPACITY, 16)
    )


def test_every_range_is_in_order_also_for_a_capacity_of_one():
    for profile in default(max_batch=1, max_seq_len=1, cache_capacity=1).values():
        for r in profile.ranges.values():
            assert all(1 <= low <= middle <= high for low, middle, high in zip(r.min, r.opt, r.max, strict=True))


@pytest.mark.parametrize("max_seq_len", [1, 32, 33, CAPACITY])
def test_every_default_profile_reads_at_least_its_own_tokens(max_seq_len):
    for profile in default(max_seq_len=max_seq_len).values():
        new, read = profile.ranges["hidden_states"], profile.ranges["attention_mask"]
        assert all(
            a[1] <= b[1] for a, b in zip((new.min, new.opt, new.max), (read.min, read.opt, read.max), strict=True)
        )


def test_a_new_token_for_every_row_of_the_cache_is_allowed():
    assert default(max_seq_len=CAPACITY)["prefill"].ranges["hidden_states"].max == (4, CAPACITY, 64)


def test_a_component_without_a_sequence_gets_one_profile():
    contract = graph_contract(TINY, Unit("component", "repeat_kv"), "fp16")
    profiles = default_profiles({spec.name: spec.axes for spec in contract.inputs}, 4, 32, CAPACITY)
    assert [(profile.name, profile.ranges["x"].max) for profile in profiles] == [("all", (4, CAPACITY, 2, 16))]


def test_a_component_with_a_sequence_gets_two_profiles():
    contract = graph_contract(TINY, Unit("component", "attention"), "fp16")
    assert list(default({spec.name: spec.axes for spec in contract.inputs})) == ["decode", "prefill"]


@pytest.mark.parametrize("symbol", ["cache_capacity", "height", ""])
def test_an_axis_of_unknown_name_is_refused_by_name_with_the_way_out(symbol):
    with pytest.raises(InputError) as caught:
        default({"x": ("batch_size", symbol)})
    assert repr(symbol) in str(caught.value)
    assert "min_shapes" in str(caught.value)


@pytest.mark.parametrize("name", ["max_batch", "max_seq_len", "cache_capacity"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_limit_below_one_is_refused_by_name(name, value):
    with pytest.raises(InputError, match=f"{name}: got {value}"):
        default(**{name: value})


def test_more_new_tokens_than_the_cache_holds_are_refused_with_both_numbers():
    with pytest.raises(InputError, match=r"max_seq_len: got 65, .* 64"):
        default(max_seq_len=65)


def test_a_profile_is_recorded_as_plain_lists():
    assert Profile("p", {"x": Range((1,), (2,), (3,))}).to_dict() == {
        "name": "p",
        "ranges": {"x": {"min": [1], "opt": [2], "max": [3]}},
    }


# --- the spellings of shapes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("x:1x16", {"x": (1, 16)}),
        ("x:1", {"x": (1,)}),
        ("x:[1,16]", {"x": (1, 16)}),
        ("x:[1]", {"x": (1,)}),
        (" x:[ 1 , 16 ] ", {"x": (1, 16)}),
        ("x:1x16,mask:1x32", {"x": (1, 16), "mask": (1, 32)}),
        ("x:1x16, mask:1x32", {"x": (1, 16), "mask": (1, 32)}),
        ("x:[1,16],mask:[1,32]", {"x": (1, 16), "mask": (1, 32)}),
        ("x:[1,16],mask:1x32", {"x": (1, 16), "mask": (1, 32)}),
        ("past_key_values.0.key:1x2x64x16", {"past_key_values.0.key": (1, 2, 64, 16)}),
        ("past_key_values.0.key:[1,2,64,16]", {"past_key_values.0.key": (1, 2, 64, 16)}),
        ("/model/layers.0/x-1:2x3", {"/model/layers.0/x-1": (2, 3)}),
    ],
)
def test_shapes_are_read_in_both_spellings(text, shapes):
    assert parse_shapes(text) == shapes


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", ",", "x", "x:", ":1x2", "x:[]", "x:1x", "x:x1", "x:1X2", "x:-1x2", "x:1.5", "x:ax2", "x=1x2"),
        *("x:1x2;y:1", "x:1x2 y:1", "x:[1,2", "x:1,2]", "x:[1,2]y:1", "x:[1 2]", "x:[1,,2]", "x:[1x2]"),
        *("[x:1x2", "x:1x2,[", "x:1x2,", ",x:1x2", "x:1x2,,y:1"),
    ],
)
def test_anything_else_is_refused(text):
    with pytest.raises(InputError, match="shapes: got"):
        parse_shapes(text)


@pytest.mark.parametrize("text", ["x:1x2,x:1x2", "x:[1,2],x:1x4"])
def test_one_name_twice_is_refused(text):
    with pytest.raises(InputError, match="x is given twice"):
        parse_shapes(text)


# --- profiles that a user spells out ------------------------------------------------------------------------

AXES = {"x": ("batch_size", "sequence_length", 64), "mask": ("batch_size", "total_sequence_length"), "table": (8, 2)}
MINIMA, OPTIMA, MAXIMA = "x:1x1x64,mask:1x1", "x:2x8x64,mask:2x16", "x:4x32x64,mask:4x64"


def explicit(minima=MINIMA, optima=OPTIMA, maxima=MAXIMA) -> list[Profile]:
    return explicit_profiles(AXES, [minima], [optima], [maxima])


def test_spelt_out_shapes_become_the_profile():
    (profile,) = explicit()
    assert profile.ranges["x"] == Range((1, 1, 64), (2, 8, 64), (4, 32, 64))
    assert profile.ranges["mask"] == Range((1, 1), (2, 16), (4, 64))


def test_an_input_without_dynamic_axes_may_be_left_out_or_said():
    assert explicit()[0].ranges["table"] == Range((8, 2), (8, 2), (8, 2))
    assert explicit(MINIMA + ",table:8x2")[0].ranges["table"] == Range((8, 2), (8, 2), (8, 2))


def test_the_nth_of_each_list_makes_the_nth_profile():
    first, second = explicit_profiles(AXES, [MINIMA, OPTIMA], [OPTIMA, OPTIMA], [MAXIMA, MAXIMA])
    assert (first.ranges["x"].min, second.ranges["x"].min) == ((1, 1, 64), (2, 8, 64))
    assert first.name != second.name


@pytest.mark.parametrize("which", ["min", "opt", "max"])
@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("x:1x1x64", r"missing inputs \['mask'\]"),
        ("x:1x1x64,mask:1x1,y:1", r"unknown inputs \['y'\]"),
        ("x:1x1x64,masks:1x1", r"unknown inputs \['masks'\], missing inputs \['mask'\]"),
    ],
)
def test_missing_and_misspelt_inputs_are_refused_by_name(which, text, complaint):
    texts = {"min": MINIMA, "opt": OPTIMA, "max": MAXIMA} | {which: text}
    with pytest.raises(InputError, match=f"{which}: .*{complaint}"):
        explicit(*texts.values())


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("x:1x64,mask:1x1", r"\[1, 64\]"),
        ("x:1x1x1x64,mask:1x1", r"\[1, 1, 1, 64\]"),
        ("x:1x1x32,mask:1x1", r"\[1, 1, 32\]"),
        ("x:1x1x64,mask:1x1,table:4x2", r"\[4, 2\]"),
    ],
    ids=["rank too low", "rank too high", "static axis of a dynamic input", "static input"],
)
def test_a_shape_that_the_graph_does_not_have_is_refused(text, got):
    with pytest.raises(InputError, match=f"got shape {got}, expected"):
        explicit(minima=text)


@pytest.mark.parametrize(
    "texts",
    [
        {"minima": "x:3x1x64,mask:1x1"},
        {"optima": "x:2x33x64,mask:2x16"},
        {"maxima": "x:4x32x64,mask:4x15"},
        {"minima": "x:0x1x64,mask:1x1"},
        {"minima": "x:1x1x64,mask:1x0"},
    ],
    ids=["min > opt", "opt > max", "max < opt", "no sequence", "no tokens"],
)
def test_sizes_out_of_order_are_refused(texts):
    with pytest.raises(InputError, match="expected 1 ≤ min ≤ opt ≤ max"):
        explicit(**texts)


@pytest.mark.parametrize(
    ("maxima", "complaint"),
    [
        ("x:4x32x64,mask:3x64", "max batch_size: got 4 in x and 3 in mask"),
        ("x:4x32x64,mask:4x31", "max: got 32 new tokens in x and 31 tokens to read in mask"),
    ],
)
def test_a_largest_step_that_cannot_run_is_refused_with_both_sizes(maxima, complaint):
    with pytest.raises(InputError, match=f"profile 0 {complaint}"):
        explicit(maxima=maxima)


STEP_AXES = {  # every input of a block
    "hidden_states": ("batch_size", "sequence_length", 64),
    "position_ids": ("batch_size", "sequence_length"),
    "write_indices": ("batch_size",),
    "attention_mask": ("batch_size", "total_sequence_length"),
    "past_key_values.0.key": ("batch_size", 2, CAPACITY, 16),
}
STEP = "hidden_states:2x8x64,position_ids:2x8,write_indices:2,attention_mask:2x64,past_key_values.0.key:2x2x64x16"


@pytest.mark.parametrize(
    ("good", "changed", "complaint"),
    [
        ("position_ids:2x8", "position_ids:2x4", "sequence_length: got 8 in hidden_states and 4 in position_ids"),
        ("attention_mask:2x64", "attention_mask:4x64", "batch_size: got 2 in hidden_states and 4 in attention_mask"),
        ("write_indices:2", "write_indices:3", "batch_size: got 2 in hidden_states and 3 in write_indices"),
        ("key:2x2x64", "key:4x2x64", r"batch_size: got 2 in hidden_states and 4 in past_key_values\.0\.key"),
        ("attention_mask:2x64", "attention_mask:2x7", ": got 8 new tokens in hidden_states and 7 tokens to read"),
    ],
    ids=["sequence", "batch of the mask", "batch of the write indices", "batch of the cache", "fewer read than new"],
)
def test_inputs_that_contradict_each_other_are_refused_with_both(good, changed, complaint):
    assert len(explicit_profiles(STEP_AXES, [STEP], [STEP], [STEP])) == 1
    wrong = STEP.replace(good, changed)
    assert wrong != STEP
    with pytest.raises(InputError, match=f"profile 0 min *{complaint}"):
        explicit_profiles(STEP_AXES, [wrong], [wrong], [wrong])


def test_the_second_profile_is_checked_too_and_named():
    with pytest.raises(InputError, match="profile 1 opt"):
        explicit_profiles(AXES, [MINIMA] * 2, [OPTIMA, "x:2x8x64,mask:2x7"], [MAXIMA] * 2)


def test_axes_without_a_name_may_differ():
    axes = {"x": ("", 64), "y": ("",)}
    (profile,) = explicit_profiles(axes, ["x:1x64,y:2"], ["x:3x64,y:4"], ["x:5x64,y:6"])
    assert (profile.ranges["x"].max, profile.ranges["y"].max) == ((5, 64), (6,))


@pytest.mark.parametrize("counts", [(1, 1, 0), (0, 1, 1), (2, 1, 1), (1, 1, 2)], ids=str)
def test_unequal_counts_of_min_opt_and_max_are_refused_with_all_three(counts):
    lists = [[text] * count for text, count in zip((MINIMA, OPTIMA, MAXIMA), counts, strict=True)]
    with pytest.raises(InputError, match="got {} min_shapes, {} opt_shapes and {} max_shapes".format(*counts)):
        explicit_profiles(AXES, *lists)


# --- profiles against the cache -----------------------------------------------------------------------------

MASK = {"mask": ("batch_size", "total_sequence_length")}  # the axis counts, not the input's name


def reading(total: int) -> Profile:
    return Profile("long", {"mask": Range((1, 1), (1, 1), (2, total))})


def test_a_profile_that_reads_the_whole_cache_is_allowed():
    check_capacity([reading(CAPACITY)], MASK, CAPACITY)


def test_a_profile_that_reads_beyond_the_cache_is_refused_with_both_numbers():
    with pytest.raises(InputError, match=r"long: it reads up to 65 .* capacity is 64; lower mask"):
        check_capacity([reading(1), reading(CAPACITY + 1)], MASK, CAPACITY)


def test_a_profile_that_writes_beyond_the_cache_is_refused_with_both_numbers():
    long = Profile("long", {"x": Range((1, 1, 8), (1, 1, 8), (1, CAPACITY + 1, 8))})
    with pytest.raises(InputError, match=r"long: it writes up to 65 .* capacity is 64"):
        check_capacity([long], {"x": ("batch_size", "sequence_length", 8)}, CAPACITY)


def test_an_axis_that_is_no_length_has_nothing_to_check():
    check_capacity([Profile("all", {"x": Range((1,), (1,), (1000,))})], {"x": ("batch_size",)}, CAPACITY)


# --- the limits of an engine --------------------------------------------------------------------------------

INPUTS = (TensorSpec("x", "fp16", ("batch_size", "sequence_length", 64)), TensorSpec("write", "int64", ("batch_size",)))


def test_an_engine_takes_what_all_inputs_of_one_profile_take():
    maxima = [{"x": (8, 1, 64), "write": (3,)}, {"x": (2, 32, 64), "write": (4,)}]
    assert largest_size("batch_size", INPUTS, maxima) == 3
    assert largest_size("sequence_length", INPUTS, maxima) == 32


@pytest.mark.parametrize("shapes", [{"x": (8, 1, 64)}, {"x": (8, 1, 64), "write": ()}])
def test_a_profile_without_the_shape_of_an_input_is_refused_by_name(shapes):
    with pytest.raises(BundleError, match=r"profile 0 write: got \[\], expected \['batch_size'\]"):
        largest_size("batch_size", INPUTS, [shapes])
