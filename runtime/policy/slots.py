"""Which cache row each slot has, and how many tokens it holds.

A step over neighbouring rows is one view of the cache, and so one run of the graph. A release leaves a gap, which the
next sequence takes. Where a step meets a gap between its rows first, its last row is copied into the gap. No other copy
is needed when sequences join and leave. A gap does no harm.

Every change is one assignment of a new dict. So no thread and no interrupt sees a table that is changed in part, and a
caller can prepare cache rows first and change the table last.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from exporter.common.errors import InputError
from exporter.common.plain_numbers import is_whole, plain


@dataclass(frozen=True)
class Move:
    """A copy to make: cache row `source` to row `destination`, which is free."""

    source: int
    destination: int


@dataclass(frozen=True)
class Held:
    """The cache row of an active slot, and the number of tokens in it."""

    row: int
    length: int


class SlotTable:
    """The rows and lengths of slots. A slot is a number that is used once, so an old number is noticed.

    Attributes:
        n_rows: sequences that the cache holds.
    """

    def __init__(self, n_rows: int, numbers: Iterator[int] | None = None) -> None:
        """Makes an empty table.

        Args:
            n_rows: sequences that the cache holds.
            numbers: the numbers of new slots. A session gives the same iterator to each of its tables.
        """
        self.n_rows = n_rows
        self._numbers = itertools.count() if numbers is None else numbers
        self._slots: dict[int, Held] = {}  # in the order in which they were taken

    @property
    def lengths(self) -> dict[int, int]:
        """Tokens that each active slot holds, by slot, in the order in which they were taken."""
        return {slot: held.length for slot, held in self._slots.items()}

    def free_row(self) -> int:
        """Returns the lowest free cache row.

        Raises:
            InputError: all rows are taken.
        """
        taken = self._row_lengths()
        if len(taken) == self.n_rows:
            raise InputError(
                f"slots: all {self.n_rows} are taken; release one or open the session with a larger max_batch"
            )
        return next(row for row in range(self.n_rows) if row not in taken)

    def take(self, row: int, length: int = 0) -> int:
        """Gives a free row, which holds `length` tokens already, to a new slot. Returns the slot."""
        slot = next(self._numbers)
        self._slots = {**self._slots, slot: Held(row, length)}
        return slot

    def release(self, slot: int) -> None:
        """Ends a slot and frees its row.

        Raises:
            InputError: the slot is not active.
        """
        self.held(slot)
        number = plain(slot)
        self._slots = {other: held for other, held in self._slots.items() if other != number}

    def next_move(self, slots: Collection[int]) -> Move | None:
        """Returns the move that brings the last row of a step into the first gap behind one of its rows, or None.

        Args:
            slots: the active slots of the step.
        """
        taken, rows = self._row_lengths(), {self._slots[slot].row for slot in slots}
        last = max(rows, default=0)
        gap = next((row + 1 for row in sorted(rows) if row + 1 < last and row + 1 not in taken), None)
        return None if gap is None else Move(last, gap)

    def moved(self, move: Move) -> None:
        """Records that a move has been made in the cache."""
        self._slots = {
            slot: Held(move.destination, held.length) if held.row == move.source else held
            for slot, held in self._slots.items()
        }

    def held(self, slot: int) -> Held:
        """Returns the row and length of an active slot.

        Raises:
            InputError: the slot is not active.
        """
        slot = plain(slot)
        if not is_whole(slot) or slot not in self._slots:
            raise InputError(f"slot: got {slot!r}, expected one of the active slots {sorted(self._slots)}")
        return self._slots[slot]

    def length_of_row(self, row: int) -> int:
        """Returns the number of tokens in a cache row, 0 for a free row."""
        return self._row_lengths().get(row, 0)

    def _row_lengths(self) -> dict[int, int]:
        return {held.row: held.length for held in self._slots.values()}

    def advance(self, slots: Mapping[int, int]) -> None:
        """Adds new tokens to the lengths of slots, all at once, after their step has succeeded.

        Args:
            slots: slot → its new tokens.
        """
        self._slots = {slot: Held(held.row, held.length + slots.get(slot, 0)) for slot, held in self._slots.items()}
