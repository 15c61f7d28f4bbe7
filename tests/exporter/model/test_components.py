"""The eager components on values that can be checked by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from exporter.model.block import (
    RMSNorm,
    SwiGLU,
    attention,
    cache_rows,
    last_token,
    real_tokens,
    repeat_kv,
    rotate,
    update_cache,
    visibility,
)
from exporter.model.components import MergeProject, PrepareQKV, component
from exporter.spec.catalogue import ModelConfig, lookup
from exporter.spec.rope import rotation_table


def geometry(
    n_heads: int = 8, n_kv_heads: int = 2, head_dim: int = 4, hidden_size: int = 32, intermediate_size: int = 48
) -> ModelConfig:
    return ModelConfig(
        hidden_size=hidden_size, n_layers=1, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim,
        intermediate_size=intermediate_size, vocab_size=11, context_length=64,
    )  # fmt: skip


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- prepare_qkv and merge_project ------------------------------------------------------------------------------------


def test_the_8b_decode_shapes():
    config = lookup("llama3-8b")
    with torch.device("meta"):
        x, R = torch.empty(2, 1, 4096), torch.empty(1, 64, 2)
        queries, keys, values = PrepareQKV(config)(x, R)
        cached = torch.empty(2, 8, 1_001, 128)
        heads = attention(queries, cached, cached, torch.empty(2, 1, 1, 1_001, dtype=torch.bool))
        delta = MergeProject(config)(heads)
    assert queries.shape == (2, 32, 1, 128)
    assert keys.shape == values.shape == (2, 8, 1, 128)
    assert heads.shape == (2, 32, 1, 128)
    assert delta.shape == (2, 1, 4096)


def test_queries_and_keys_are_rotated_and_values_are_not():
    config = geometry()
    module, x = PrepareQKV(config), noise(1, 3, 32)
    R = torch.from_numpy(rotation_table(config, 8))[5:8]
    queries, keys, values = module(x, R)
    for out, proj in ((queries, module.q_proj), (keys, module.k_proj)):
        plain = (x @ proj.weight.T).view(1, 3, -1, 4).transpose(1, 2)
        torch.testing.assert_close(out, rotate(plain, R))
        assert (out - plain).abs().max() > 0.1
    torch.testing.assert_close(values, (x @ module.v_proj.weight.T).view(1, 3, 2, 4).transpose(1, 2))


def test_merging_puts_the_heads_side_by_side():
    config = geometry(n_heads=2, n_kv_heads=1, head_dim=2, hidden_size=4)
    module = MergeProject(config)
    module.o_proj.weight = torch.nn.Parameter(torch.eye(4))
    heads = torch.tensor([[[[1.0, 2.0], [5.0, 6.0]], [[3.0, 4.0], [7.0, 8.0]]]])  # [B 1, H 2, T 2, D 2]
    assert module(heads).tolist() == [[[1, 2, 3, 4], [5, 6, 7, 8]]]


def test_projections_have_no_bias():
    config = geometry()
    for module in (PrepareQKV(config), MergeProject(config), SwiGLU(config)):
        assert all(name.endswith("_proj.weight") for name, _ in module.named_parameters())


# --- repeat_kv --------------------------------------------------------------------------------------------------------


def test_repeat_interleaves_heads_and_does_not_tile_them():
    x = torch.tensor([0.0, 1.0]).reshape(1, 1, 2, 1).expand(1, 3, 2, 4)
    repeated = repeat_kv(x, 4)
    assert repeated.shape == (1, 3, 8, 4)
    assert repeated[0, 2, :, 3].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(("n_kv_heads", "n_rep"), [(1, 8), (2, 4), (3, 3), (8, 2)])
def test_repeat_fills_slots_g_n_rep_to_g_plus_1_n_rep(n_kv_heads, n_rep):
    x = noise(2, 5, n_kv_heads, 4)
    repeated = repeat_kv(x, n_rep)
    assert torch.equal(repeated, x.repeat_interleave(n_rep, dim=2))
    for head in range(n_kv_heads * n_rep):
        assert torch.equal(repeated[:, :, head], x[:, :, head // n_rep])


def test_repeating_once_returns_the_same_object():
    x = noise(1, 2, 4, 4)
    assert repeat_kv(x, 1) is x
    assert component(geometry(n_heads=4, n_kv_heads=4), "repeat_kv")(x) is x


def test_writing_into_the_repeated_heads_leaves_the_cache_alone():
    x = torch.zeros(1, 2, 2, 4)
    repeated = repeat_kv(x, 4)
    repeated[:, :, 0] = 9
    assert x.abs().max() == 0
    assert repeated[:, :, 1].abs().max() == 0


def test_the_component_repeats_by_the_config_s_ratio():
    x = noise(1, 3, 2, 4)
    assert torch.equal(component(geometry(), "repeat_kv")(x), repeat_kv(x, 4))


# --- swiglu_mlp and rms_norm ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gate", "up", "expected"), [(1.0, 2.0, 1.46212), (2.0, 1.0, 1.76159)])
def test_swiglu_gates_with_the_gate_projection(gate, up, expected):
    module = SwiGLU(geometry(hidden_size=1, intermediate_size=1))
    for proj, value in ((module.gate_proj, gate), (module.up_proj, up), (module.down_proj, 1.0)):
        torch.nn.init.constant_(proj.weight, value)
    assert module(torch.ones(1, 1, 1)).item() == pytest.approx(expected, abs=5e-6)


def test_swiglu_multiplies_by_output_by_input_weights():
    module, x = SwiGLU(geometry(hidden_size=3, intermediate_size=5)), noise(2, 4, 3)
    assert module.gate_proj.weight.shape == module.up_proj.weight.shape == (5, 3)
    assert module.down_proj.weight.shape == (3, 5)
    gate = x @ module.gate_proj.weight.T
    expected = (gate / (1 + torch.exp(-gate)) * (x @ module.up_proj.weight.T)) @ module.down_proj.weight.T
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize("value", [300.0, -300.0, 60_000.0])
def test_rms_norm_statistics_do_not_overflow_in_half_precision(value):
    x = torch.full((1, 2, 64), value, dtype=torch.float16)
    assert x.pow(2).isinf().all()  # what a half-precision mean would be made of
    assert (RMSNorm(64, 1e-5).half()(x) == math.copysign(1.0, value)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rms_norm_of_a_zero_row_is_zero(dtype):
    out = RMSNorm(64, 1e-5).to(dtype)(torch.zeros(1, 2, 64, dtype=dtype))
    assert out.dtype == dtype
    assert torch.equal(out, torch.zeros_like(out))


def test_rms_norm_divides_by_the_root_mean_square_and_then_weighs():
    """mean(3², 4²) = 12.5; 3 / √12.5 = 0.848528, 4 / √12.5 = 1.131371; no mean is subtracted."""
    module = RMSNorm(2, 1e-5)
    module.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(
        module(torch.tensor([[3.0, 4.0]])), torch.tensor([[0.848528, 2.262742]]), atol=2e-6, rtol=0
    )


def test_rms_norm_adds_eps_inside_the_root():
    """x² = eps: 1 / √2 of what it would be without eps."""
    assert RMSNorm(4, 0.25)(torch.full((1, 4), 0.5))[0].tolist() == pytest.approx([math.sqrt(0.5)] * 4, rel=1e-6)


def test_rms_norm_casts_back_before_it_weighs():
    module = RMSNorm(64, 1e-5).half()
    module.weight = torch.nn.Parameter(noise(64, seed=1).half())
    x = noise(8, 64).half()
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    assert torch.equal(module(x), normed.half() * module.weight)
    assert not torch.equal(module(x), (normed * module.weight.float()).half())


# --- attention --------------------------------------------------------------------------------------------------------


def test_zero_queries_average_the_visible_values():
    """I8: P = 3, T = 2, V_j = j: query 0 sees rows 0–3 and query 1 rows 0–4."""
    queries, keys = torch.zeros(1, 8, 2, 4), noise(1, 2, 5, 4)
    values = torch.arange(5.0).reshape(1, 1, 5, 1).expand(1, 2, 5, 4)
    attention_mask, rows = torch.ones(1, 5, dtype=torch.int64), cache_rows(torch.tensor([3]), 2)
    mask = visibility(attention_mask, rows, real_tokens(attention_mask, rows))
    out = attention(queries, keys, values, mask)
    torch.testing.assert_close(out, torch.tensor([1.5, 2.0]).reshape(1, 1, 2, 1).expand(1, 8, 2, 4))


def test_an_upper_left_mask_would_give_other_means():
    """The same step with the mask of a step without past: the values 1.5 and 2.0 above are not a coincidence."""
    values = torch.arange(5.0).reshape(1, 1, 5, 1).expand(1, 2, 5, 4)
    out = attention(torch.zeros(1, 8, 2, 4), noise(1, 2, 5, 4), values, torch.ones(1, 1, 2, 5, dtype=torch.bool).tril())
    torch.testing.assert_close(out[0, 0, :, 0], torch.tensor([0.0, 0.5]))


def test_query_heads_read_their_own_kv_head():
    values = torch.tensor([0.0, 1.0]).reshape(1, 2, 1, 1).expand(1, 2, 5, 4)
    out = attention(noise(1, 8, 3, 4), noise(1, 2, 5, 4), values, torch.ones(1, 1, 3, 5, dtype=torch.bool))
    torch.testing.assert_close(out[0, :, 2, 3], torch.tensor([0.0, 0, 0, 0, 1, 1, 1, 1]))


@pytest.mark.parametrize("n_kv_heads", [8, 4, 2, 1])
def test_attention_equals_torch_s_for_every_head_geometry(n_kv_heads):
    queries, keys, values = noise(2, 8, 3, 4), noise(2, n_kv_heads, 7, 4, seed=1), noise(2, n_kv_heads, 7, 4, seed=2)
    mask = torch.rand(2, 1, 3, 7, generator=torch.Generator().manual_seed(3)) < 0.5
    mask[..., 0] = True
    expected = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(attention(queries, keys, values, mask), expected)


@pytest.mark.parametrize("n_kv_heads", [6, 3, 2, 1])
def test_attention_equals_an_explicit_loop(n_kv_heads):
    queries, keys, values = noise(1, 6, 3, 4), noise(1, n_kv_heads, 5, 4, seed=1), noise(1, n_kv_heads, 5, 4, seed=2)
    mask = torch.ones(1, 1, 3, 5, dtype=torch.bool).tril(2)
    out = attention(queries, keys, values, mask)
    for head in range(6):
        group = head // (6 // n_kv_heads)
        for query in range(3):
            seen = query + 3
            scores = torch.stack([queries[0, head, query] @ keys[0, group, key] / 2 for key in range(seen)])  # √4 = 2
            expected = (scores.exp() / scores.exp().sum()) @ values[0, group, :seen]
            torch.testing.assert_close(out[0, head, query], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_query_that_sees_nothing_returns_zero_and_its_neighbour_is_unharmed(dtype):
    queries, keys, values = (
        noise(1, heads, length, 4, seed=heads).to(dtype) for heads, length in ((8, 2), (2, 5), (2, 5))
    )
    mask = torch.ones(1, 1, 2, 5, dtype=torch.bool)
    seeing = attention(queries, keys, values, mask)
    mask[:, :, 0] = False
    out = attention(queries, keys, values, mask)
    assert torch.equal(out[:, :, 0], torch.zeros_like(out[:, :, 0]))
    assert torch.equal(out[:, :, 1], seeing[:, :, 1])
    assert out.dtype == dtype


def test_hidden_keys_and_values_change_nothing():
    queries, keys, values = noise(1, 8, 2, 4), noise(1, 2, 5, 4, seed=1), noise(1, 2, 5, 4, seed=2)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], dtype=torch.bool)[None, None]
    out = attention(queries, keys, values, mask)
    keys[:, :, 4], values[:, :, 4] = 1e4, -1e4
    assert torch.equal(attention(queries, keys, values, mask), out)


def test_scores_beyond_half_precision_do_not_overflow():
    """Scores of ±80,000 in fp16: the softmax runs in float32 and picks the one large key."""
    queries = torch.full((1, 1, 1, 4), 200.0, dtype=torch.float16)
    keys = torch.stack([torch.full((4,), 200.0), torch.full((4,), -200.0)]).half().reshape(1, 1, 2, 4)
    values = torch.tensor([3.0, 7.0], dtype=torch.float16).reshape(1, 1, 2, 1).expand(1, 1, 2, 4)
    mask = torch.ones(1, 1, 1, 2, dtype=torch.bool)
    assert (queries @ keys.transpose(-2, -1)).isinf().all()  # what a half-precision product would be
    out = attention(queries, keys, values, mask)
    assert out.dtype == torch.float16
    assert (out == 3).all()


def test_the_softmax_tells_apart_scores_that_are_equal_in_half_precision():
    """4,096 and 4,097 are one number in fp16; in float32 their weights are 0.2689 and 0.7311."""
    queries = torch.tensor([64.0, 1.0, 0.0, 0.0], dtype=torch.float16).reshape(1, 1, 1, 4)
    keys = torch.tensor([[128.0, 0.0, 0.0, 0.0], [128.0, 2.0, 0.0, 0.0]], dtype=torch.float16).reshape(1, 1, 2, 4)
    values = torch.tensor([0.0, 1.0], dtype=torch.float16).reshape(1, 1, 2, 1).expand(1, 1, 2, 4)
    assert torch.tensor(4_097.0).half() == 4_096
    out = attention(queries, keys, values, torch.ones(1, 1, 1, 2, dtype=torch.bool))
    assert out[0, 0, 0, 0].item() == pytest.approx(0.7311, abs=5e-4)


# --- the cache --------------------------------------------------------------------------------------------------------


def test_update_cache_writes_each_row_s_own_rows_in_place_and_no_other():
    cache, new = torch.full((3, 2, 6, 4), -1.0), noise(3, 2, 2, 4)
    pointer = cache.data_ptr()
    assert update_cache(cache, new, torch.tensor([0, 2, 4])) is None
    assert cache.data_ptr() == pointer
    for row, start in enumerate((0, 2, 4)):
        assert torch.equal(cache[row, :, start : start + 2], new[row])
        untouched = [index for index in range(6) if index not in (start, start + 1)]
        assert (cache[row, :, untouched] == -1).all()


def test_update_cache_never_writes_past_the_end():
    cache = torch.zeros(1, 2, 6, 4)
    with pytest.raises(AssertionError, match="capacity"):
        update_cache(cache, torch.ones(1, 2, 2, 4), torch.tensor([5]))
    assert cache.abs().max() == 0


# --- masks ------------------------------------------------------------------------------------------------------------


def masks(attention_mask: list[list[int]], write_indices: list[int], sequence_length: int) -> tuple[list, list, list]:
    """real [B, T], visible [B, T, L] and last [B] of one step, as plain lists."""
    mask, starts = torch.tensor(attention_mask), torch.tensor(write_indices)
    rows = cache_rows(starts, sequence_length)
    real = real_tokens(mask, rows)
    visible = visibility(mask, rows, real)
    assert visible.shape == (len(mask), 1, sequence_length, mask.shape[1])
    return real.int().tolist(), visible[:, 0].int().tolist(), last_token(real).tolist()


def test_a_ragged_step_with_right_padding():
    """Row 0 holds 3 tokens and brings 2; row 1 is empty and brings 1 and a pad, which sees what is causal."""
    real, visible, last = masks([[1, 1, 1, 1, 1], [1, 0, 0, 0, 0]], [3, 0], 2)
    assert real == [[1, 1], [1, 0]]
    assert visible == [
        [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]],
    ]
    assert last == [1, 0]


def test_a_pad_whose_row_lies_beyond_what_is_read():
    """At capacity: row 0 fills its last cache row with the first of two tokens; the second is a pad without a row."""
    real, visible, last = masks([[1, 1, 1, 1], [1, 1, 0, 0]], [3, 0], 2)
    assert real == [[1, 0], [1, 1]]
    assert visible == [
        [[1, 1, 1, 1], [1, 1, 1, 1]],
        [[1, 0, 0, 0], [1, 1, 0, 0]],
    ]
    assert last == [0, 1]


def test_a_left_padded_prefill():
    """Real tokens never see the pads before them; each pad sees at least itself."""
    real, visible, last = masks([[0, 0, 1, 1], [1, 1, 1, 1]], [0, 0], 4)
    assert real == [[0, 0, 1, 1], [1, 1, 1, 1]]
    assert visible == [
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]],
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]],
    ]
    assert last == [3, 3]


def test_a_decode_step_after_a_left_padded_prefill():
    real, visible, last = masks([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], [4, 4], 1)
    assert real == [[1], [1]]
    assert visible == [[[0, 0, 1, 1, 1]], [[1, 1, 1, 1, 1]]]
    assert last == [0, 0]


def test_the_first_step_on_an_empty_cache():
    assert masks([[1, 1, 1]], [0], 3) == ([[1, 1, 1]], [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]], [2])


def test_rows_allocated_but_not_written_are_not_seen():
    """L may exceed the length: rows 3 and 4 are read and hidden."""
    real, visible, last = masks([[1, 1, 1, 0, 0]], [2], 1)
    assert (real, visible, last) == ([[1]], [[[1, 1, 1, 0, 0]]], [0])
