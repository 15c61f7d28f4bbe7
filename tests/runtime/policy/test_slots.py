"""The slot table: which cache row each slot has."""

from __future__ import annotations

import re

import numpy as np
import pytest

from exporter.common.errors import InputError
from runtime.policy.slots import Held, Move, SlotTable

# --- the slot table --------------------------------------------------------------------------------------------------


def table_of(*lengths: int, n_rows: int = 4) -> SlotTable:
    table = SlotTable(n_rows)
    for length in lengths:
        table.take(table.free_row(), length)
    return table


def moves_before(table: SlotTable, *slots: int) -> list[Move]:
    """Makes every move that a step of these slots needs."""
    moves = []
    while (move := table.next_move(slots)) is not None:
        table.moved(move)
        moves.append(move)
    return moves


def test_a_new_slot_takes_the_next_row_and_holds_what_it_was_given():
    table = table_of(5)
    assert table.free_row() == 1 and table.take(1) == 1 and table.take(2, 7) == 2
    assert table.lengths == {0: 5, 1: 0, 2: 7}


def test_a_free_row_stays_free_until_it_is_taken():
    table = table_of(5)
    assert table.free_row() == table.free_row() == 1
    assert table.lengths == {0: 5}


def test_a_step_moves_its_last_row_into_the_gap_between_its_rows():
    table = table_of(5, 6, 7)
    table.release(1)
    assert moves_before(table, 0, 2) == [Move(2, 1)]
    assert (table.held(0), table.held(2)) == (Held(0, 5), Held(1, 7))
    assert [table.length_of_row(row) for row in range(4)] == [5, 7, 0, 0]


def test_a_gap_that_no_move_has_closed_is_taken_next_or_closed_later():
    table = table_of(5, 6, 7, 8)
    table.release(1)
    assert (table.free_row(), table.held(3)) == (1, Held(3, 8))
    table.release(2)
    assert moves_before(table, 0, 3) == [Move(3, 1)]
    assert table.lengths == {0: 5, 3: 8} and table.free_row() == 2


@pytest.mark.parametrize(
    ("released", "step"),
    [
        ([], (0, 2)),  # another sequence is between them, which takes no part
        ([0], (1, 2)),  # the gap is before all rows of the step
        ([3], (0, 1, 2)),
        ([1], (2, 3)),
        ([1], (0,)),
        ([2], (0, 3)),  # the gap is behind a row that takes no part: a move would not make fewer runs
    ],
)
def test_a_gap_that_does_not_divide_the_rows_of_a_step_moves_nothing(released, step):
    table = table_of(5, 6, 7, 8)
    for slot in released:
        table.release(slot)
    assert moves_before(table, *step) == []


def test_numbers_are_never_used_twice():
    table, given = table_of(n_rows=2), []
    for _ in range(10):
        given.append(table.take(table.free_row()))
        table.release(given[-1])
    assert given == list(range(10))


@pytest.mark.parametrize("use", ["held", "release"])
@pytest.mark.parametrize("slot", [1, 3, -1, "0", None, False, []])
def test_a_slot_that_is_not_active_is_refused_with_those_that_are(use, slot):
    table = table_of(5, 6, 7)
    table.release(1)
    with pytest.raises(InputError, match=re.escape(f"got {slot!r}, expected one of the active slots [0, 2]")):
        getattr(table, use)(slot)
    assert table.lengths == {0: 5, 2: 7}


def test_a_full_table_refuses_and_takes_one_again_after_a_release():
    table = table_of(1, 2, n_rows=2)
    with pytest.raises(InputError, match="all 2 are taken; release one"):
        table.free_row()
    assert table.lengths == {0: 1, 1: 2}
    table.release(0)
    assert (table.free_row(), table.take(0)) == (0, 2)


def test_lengths_are_a_copy_in_the_order_of_acquisition():
    table = table_of(5, 6, 7)
    table.release(0)
    table.advance({2: 10, 1: 1})
    lengths = table.lengths
    assert list(lengths.items()) == [(1, 7), (2, 17)]
    lengths[1] = 99
    assert table.held(1).length == 7


def test_the_rows_of_a_step_of_all_are_neighbours_and_follow_every_move():
    rng, table = np.random.default_rng(0), SlotTable(5)
    written: dict[int, int] = {}  # row → slot whose data it holds, as a cache would that obeys the moves
    for _ in range(2000):
        if table.lengths and (len(table.lengths) == 5 or rng.random() < 0.5):
            table.release(int(rng.choice(list(table.lengths))))
        else:
            row = table.free_row()
            written[row] = table.take(row)
        active = list(table.lengths)
        if rng.random() < 0.3:
            for move in moves_before(table, *active):
                written[move.destination] = written[move.source]
            rows = sorted(table.held(slot).row for slot in active)
            assert rows == list(range(rows[0], rows[0] + len(active))) if rows else not active
        assert all(written[table.held(slot).row] == slot for slot in active)
