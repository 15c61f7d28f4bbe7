"""Rotary embedding: frequencies, Llama 3.1 scaling, the float32 table, and adjacent pairs against half-split ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from exporter.checkpoint.huggingface import adjacent_pairs
from exporter.model.block import rotate
from exporter.spec.catalogue import CATALOGUE, ModelConfig, RopeScaling, lookup
from exporter.spec.rope import frequencies, rotation_table

SMALL = ModelConfig(
    hidden_size=32,
    n_layers=1,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    vocab_size=11,
    context_length=64,
)


def table_of(config: ModelConfig, max_positions: int) -> Tensor:
    return torch.from_numpy(rotation_table(config, max_positions))


def rotate_half_split(heads: Tensor, R: Tensor) -> Tensor:
    """Hugging Face's pairing (i, i + D/2), which the project must not use."""
    first, second = heads.chunk(2, dim=-1)
    cos, sin = R.unbind(-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


# --- frequencies ------------------------------------------------------------------------------------------------------


def test_frequencies_are_theta_to_the_minus_2i_over_d():
    assert frequencies(8, 10_000.0) == pytest.approx([1.0, 0.1, 0.01, 0.001], rel=1e-12)
    assert frequencies(4, 500_000.0) == pytest.approx([1.0, 500_000**-0.5], rel=1e-12)
    assert frequencies(128, 500_000.0).shape == (64,)


# --- scaling ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scaled_by() -> np.ndarray:
    """What factor 32 does to each pair of Llama 3.2 1B (theta 5e5, head_dim 64)."""
    return frequencies(64, 500_000.0, RopeScaling(32.0)) / frequencies(64, 500_000.0)


def test_scaling_keeps_short_wavelengths(scaled_by):
    assert (scaled_by[:15] == 1).all()


@pytest.mark.parametrize(("pair", "ratio"), [(15, 0.60557), (16, 0.30374), (17, 0.10345)])
def test_scaling_blends_between_the_bands(scaled_by, pair, ratio):
    assert scaled_by[pair] == pytest.approx(ratio, abs=5e-6)


def test_scaling_divides_long_wavelengths(scaled_by):
    assert scaled_by[18:] == pytest.approx(np.full(14, 1 / 32), rel=1e-12)


def test_the_edges_of_the_blend_follow_the_scaling_s_own_numbers():
    """With theta 256 and D = 8 the frequencies are 1, 1/4, 1/16 and 1/64. A context of 402,124 is 2π · 64,000.

    They turn 64,000, 16,000, 4,000 and 1,000 times in it.
    """
    scaling = RopeScaling(2.0, low_freq_factor=4_000, high_freq_factor=28_000, original_context_length=402_124)
    assert frequencies(8, 256.0, scaling) == pytest.approx([1.0, 0.75 / 4, 0.5 / 16, 0.5 / 64], rel=1e-5)


def test_factor_one_changes_nothing():
    assert frequencies(64, 500_000.0, RopeScaling(1.0)) == pytest.approx(frequencies(64, 500_000.0), rel=1e-12)


def test_the_table_obeys_the_config_s_scaling():
    plain, scaled = (lookup(name) for name in ("llama3-8b", "llama3.1-8b"))
    difference = np.abs(rotation_table(plain, 512) - rotation_table(scaled, 512)).max(axis=(0, 2))
    assert difference[0] == 0
    assert difference[-20:].min() > 0


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_table_is_float32_and_covers_twice_the_positions(name):
    config = lookup(name)
    table = rotation_table(config, 40)
    assert table.dtype == np.float32
    assert table.shape == (80, config.head_dim // 2, 2)


def test_position_0_turns_nothing_and_position_3_turns_by_three_steps():
    table = rotation_table(SMALL, 4)
    assert (table[0] == [1, 0]).all()
    steps = np.array([1.0, 0.1, 0.01, 0.001])
    assert table[3] == pytest.approx(np.stack([np.cos(3 * steps), np.sin(3 * steps)], axis=-1), abs=1e-7)


@pytest.mark.parametrize("name", ["llama3-8b", "llama3.1-8b", "smollm2-135m"])
def test_the_table_is_exact_to_float32_at_far_positions(name):
    """Angles taken in float32 would be off by 2e-4 there."""
    config = lookup(name)
    row = rotation_table(config, 4_096)[8_191]
    angles = 8_191 * frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    assert np.abs(row - np.stack([np.cos(angles), np.sin(angles)], axis=-1)).max() <= 2**-24


def test_a_half_precision_table_would_be_off_by_more_than_0_7_at_position_4095():
    """4,095 is no half-precision number: it becomes 4,096, another angle."""
    angle = np.float16(4_095) * np.float16(1)
    assert angle == 4_096
    right = rotation_table(lookup("llama3-8b"), 2_048)[4_095, 0, 0]
    assert abs(np.cos(float(angle)) - right) > 0.7
    assert abs(np.cos(4_095.0) - right) < 1e-7


# --- rotation ---------------------------------------------------------------------------------------------------------


def test_rotation_multiplies_adjacent_features_as_complex_numbers():
    """(1 + 2i) · (0.6 + 0.8i) = −1 + 2i and (3 + 4i) · i = −4 + 3i."""
    heads = torch.tensor([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
    R = torch.tensor([[[0.6, 0.8], [0.0, 1.0]]])
    turned = rotate(heads, R)
    torch.testing.assert_close(turned.flatten(), torch.tensor([-1.0, 2.0, -4.0, 3.0]))
    assert (rotate_half_split(heads, R) - turned).abs().max() > 1


def test_rotation_equals_complex_multiplication_at_every_position():
    R = table_of(SMALL, 8)
    heads = torch.randn(2, 3, 16, 8, generator=torch.Generator().manual_seed(0))
    pairs = torch.complex(heads[..., 0::2], heads[..., 1::2])
    expected = pairs * torch.complex(R[..., 0], R[..., 1])
    turned = rotate(heads, R)
    torch.testing.assert_close(turned[..., 0::2], expected.real)
    torch.testing.assert_close(turned[..., 1::2], expected.imag)


def test_each_row_of_a_batch_is_turned_by_its_own_positions():
    table = table_of(SMALL, 8)
    heads = torch.randn(2, 3, 2, 8, generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([[0, 1], [7, 8]])
    turned = rotate(heads, table[positions])
    for row in range(2):
        assert torch.equal(turned[row], rotate(heads[row : row + 1], table[positions[row]])[0])
    assert torch.equal(turned[0, :, 0], heads[0, :, 0])
    assert not torch.equal(turned[1, :, 0], heads[1, :, 0])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 2e-2), (torch.bfloat16, 1e-1)])
def test_rotation_keeps_norms_and_dtype(dtype, tolerance):
    heads = torch.randn(1, 2, 16, 8, generator=torch.Generator().manual_seed(2)).to(dtype)
    turned = rotate(heads, table_of(SMALL, 8))
    assert turned.dtype == dtype
    assert (turned.float().norm(dim=-1) - heads.float().norm(dim=-1)).abs().max() < tolerance
    assert (turned - heads)[:, :, 1:].abs().amax(-1).min() > 0.01  # it did turn


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rotation_is_computed_in_float32_and_cast_back_once(dtype):
    heads = torch.randn(1, 2, 16, 8, generator=torch.Generator().manual_seed(3)).to(dtype)
    R = table_of(SMALL, 8)
    assert torch.equal(rotate(heads, R), rotate(heads.float(), R).to(dtype))
    assert not torch.equal(rotate(heads, R), rotate(heads, R.to(dtype).float()))


@pytest.mark.parametrize("name", ["llama3-8b", "llama3.1-8b", "smollm2-135m"])
def test_a_score_depends_on_the_distance_of_two_positions_only(name):
    config = lookup(name)
    table = table_of(config, 1_024)
    query, key = torch.randn(2, 1, 1, 1, config.head_dim, generator=torch.Generator().manual_seed(4))

    def score(query_position: int, key_position: int) -> float:
        return (rotate(query, table[[query_position]]) * rotate(key, table[[key_position]])).sum().item()

    assert score(905, 902) == pytest.approx(score(5, 2), abs=1e-4)
    assert score(905, 903) != pytest.approx(score(5, 2), abs=1e-2)


# --- Hugging Face's order ---------------------------------------------------------------------------------------------


def test_hugging_face_rows_are_meta_rows_0_2_4_6_1_3_5_7():
    hugging_face = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    assert adjacent_pairs(hugging_face[:, None], 8).flatten().tolist() == list(range(8))


def test_every_head_is_reordered_within_itself():
    hugging_face = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    three_heads = torch.cat([hugging_face, hugging_face + 8, hugging_face + 16])
    assert adjacent_pairs(three_heads[:, None].expand(-1, 5), 8)[:, 4].tolist() == list(range(24))


def test_reordered_weights_give_the_scores_of_half_split_ones():
    """q·k is the same from both layouts, and another number where a weight is used in the wrong one."""
    generator = torch.Generator().manual_seed(5)
    q_weight, k_weight = torch.randn(2, 8, 6, generator=generator)
    x = torch.randn(1, 1, 16, 6, generator=generator)
    R = table_of(SMALL, 8)

    def scores(turn, q_weight: Tensor, k_weight: Tensor) -> Tensor:
        return turn(x @ q_weight.T, R) @ turn(x @ k_weight.T, R).transpose(-2, -1)

    right = scores(rotate_half_split, q_weight, k_weight)
    torch.testing.assert_close(
        scores(rotate, adjacent_pairs(q_weight, 8), adjacent_pairs(k_weight, 8)), right, atol=1e-4, rtol=1e-4
    )
    assert (scores(rotate, q_weight, k_weight) - right).abs().max() > 0.1
