"""Launches: which cache rows run together. And the refusal of a step that the cache has no room for."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from exporter.common.errors import InputError
from runtime.policy.full_cache import check_room
from runtime.policy.launches import Launch, in_pieces, padded_launches, unpadded_launches


def test_launches_join_neighbours_and_split_only_where_padding_would_overflow():
    assert padded_launches([0, 0, 0], [5, 1, 3], 64) == [Launch(0, 3, 5)]
    assert padded_launches([60, 0], [1, 5], 64) == [Launch(0, 1, 1), Launch(1, 2, 5)]
    assert padded_launches([0, 60, 61, 0], [5, 1, 2, 1], 64) == [Launch(0, 1, 5), Launch(1, 4, 2)]
    assert padded_launches([63], [1], 64) == [Launch(0, 1, 1)]


def test_padded_launches_cover_all_rows_once_and_stay_inside_the_cache():
    rng = np.random.default_rng(0)
    for _ in range(500):
        capacity = int(rng.integers(1, 20))
        past = rng.integers(0, capacity, rng.integers(1, 6))
        new = np.array([rng.integers(1, capacity - p + 1) for p in past])
        check_room({str(i): pair for i, pair in enumerate(zip(past.tolist(), new.tolist(), strict=True))}, capacity)
        launches = padded_launches(past.tolist(), new.tolist(), capacity)
        assert [row for launch in launches for row in range(launch.first, launch.stop)] == list(range(len(past)))
        for launch in launches:
            rows = slice(launch.first, launch.stop)
            assert launch.width == new[rows].max() and (past[rows] + launch.width <= capacity).all()


def test_unpadded_runs_join_neighbours_with_equally_many_tokens_only():
    assert unpadded_launches({0: 1, 1: 1, 2: 1}) == [Launch(0, 3, 1)]
    assert unpadded_launches({0: 1, 1: 5, 2: 1}) == [Launch(0, 1, 1), Launch(1, 2, 5), Launch(2, 3, 1)]
    assert unpadded_launches({0: 1, 2: 1}) == [Launch(0, 1, 1), Launch(2, 3, 1)]
    assert unpadded_launches({3: 2, 1: 2, 2: 2, 0: 4}) == [Launch(0, 1, 4), Launch(1, 4, 2)]


def test_unpadded_launches_run_each_row_once_at_its_own_width_in_the_fewest_runs():
    rng = np.random.default_rng(0)
    for _ in range(500):
        rows = rng.choice(8, rng.integers(1, 9), replace=False).tolist()
        widths = {row: int(rng.integers(1, 4)) for row in rows}
        launches = unpadded_launches(widths)
        assert [row for launch in launches for row in launch.rows] == sorted(rows)
        assert all(widths[row] == launch.width for launch in launches for row in launch.rows)
        assert not any(a.stop == b.first and a.width == b.width for a, b in itertools.pairwise(launches))


def fewest_padded_runs(past_lens: list[int], seq_lens: list[int], capacity: int) -> int:
    """The fewest runs, found by trying every way to cut the rows into neighbours."""
    n_rows = len(past_lens)
    for n_cuts in range(n_rows):
        for cuts in itertools.combinations(range(1, n_rows), n_cuts):
            parts = [slice(*pair) for pair in itertools.pairwise((0, *cuts, n_rows))]
            if all(max(past_lens[part]) + max(seq_lens[part]) <= capacity for part in parts):
                return n_cuts + 1
    raise AssertionError("a row alone always fits")


def test_padded_launches_are_as_few_as_any_way_of_cutting_gives():
    rng = np.random.default_rng(1)
    for _ in range(300):
        past_lens = rng.integers(0, 10, rng.integers(1, 6)).tolist()
        seq_lens = [int(rng.integers(1, 11 - past_len)) for past_len in past_lens]
        assert len(padded_launches(past_lens, seq_lens, 10)) == fewest_padded_runs(past_lens, seq_lens, 10)


def test_the_first_sequence_without_room_is_named_and_a_full_cache_is_room_enough():
    check_room({"a": (0, 8), "b": (7, 1)}, 8)
    with pytest.raises(
        InputError, match=r"b holds 7 of 8 tokens and was asked for 2 more.* cache_capacity of at least 9"
    ):
        check_room({"a": (0, 8), "b": (7, 2), "c": (8, 1)}, 8)


def test_pieces_are_no_wider_than_the_largest_step_and_rows_that_have_ended_take_no_part():
    whole = [Launch(0, 3, 7), Launch(3, 4, 2)]
    lengths = {0: 7, 1: 2, 2: 5, 3: 2}
    assert in_pieces(whole, lengths, None) == in_pieces(whole, lengths, 7) == whole
    assert in_pieces(whole, lengths, 3) == [
        *(Launch(0, 3, 3, 0), Launch(0, 1, 3, 3), Launch(2, 3, 2, 3), Launch(0, 1, 1, 6)),
        Launch(3, 4, 2),
    ]


def test_pieces_cover_every_token_once_and_write_no_more_than_their_launch():
    rng = np.random.default_rng(0)
    for _ in range(500):
        capacity = int(rng.integers(1, 20))
        past = rng.integers(0, capacity, rng.integers(1, 6))
        new = [int(rng.integers(1, capacity - p + 1)) for p in past]
        launches, largest = padded_launches(past.tolist(), new, capacity), int(rng.integers(1, 6))
        covered = {row: [] for row in range(len(new))}
        for piece in in_pieces(launches, dict(enumerate(new)), largest):
            assert piece.width <= largest
            for row in piece.rows:
                assert past[row] + piece.start + piece.width <= capacity
                covered[row] += range(piece.start, min(piece.start + piece.width, new[row]))
        assert covered == {row: list(range(length)) for row, length in enumerate(new)}
