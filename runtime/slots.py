"""Cache slots: which sequence lives in which cache row. Pure policy, no buffer and no backend in sight.

Active slots keep the rows 0 … n − 1, so that a step over neighbours is one view of the cache. A release moves the last row
into the gap; that is the only copy that joining and leaving ever cost.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from exporter.errors import InputError


@dataclass(frozen=True)
class Move:
    """Cache row `source` must be copied to row `destination`, which is free."""

    source: int
    destination: int


class SlotTable:
    """Slots by number, their rows and lengths. Numbers are never used twice, so a stale one is noticed.

    Attributes:
        n_rows: sequences that the cache holds.
    """

    def __init__(self, n_rows: int, numbers: Iterator[int] | None = None) -> None:
        """`numbers` gives the slots' numbers; a session hands the same iterator to each of its tables."""
        self.n_rows = n_rows
        self._numbers = itertools.count() if numbers is None else numbers
        self._rows: list[int] = []  # slot number of each active row
        self._lengths: dict[int, int] = {}

    @property
    def lengths(self) -> dict[int, int]:
        """Tokens that each active slot holds, by slot, in the order of acquisition."""
        return dict(sorted(self._lengths.items()))

    def acquire(self) -> tuple[int, int]:
        """Takes the next free row; returns (slot, row).

        Raises:
            InputError: all rows are taken.
        """
        if len(self._rows) == self.n_rows:
            raise InputError(f"slots: all {self.n_rows} are taken; release one or open the session with a larger max_batch")
        slot = next(self._numbers)
        self._rows.append(slot)
        self._lengths[slot] = 0
        return slot, len(self._rows) - 1

    def release(self, slot: int) -> Move | None:
        """Gives a slot back; returns the move that keeps active rows together, if one is needed."""
        row = self.row(slot)
        del self._lengths[slot]
        last = self._rows.pop()
        if last == slot:
            return None
        self._rows[row] = last
        return Move(len(self._rows), row)

    def row(self, slot: int) -> int:
        """The cache row of an active slot.

        Raises:
            InputError: it is not active.
        """
        if not isinstance(slot, int) or slot not in self._lengths:
            raise InputError(f"slot: got {slot!r}, expected one of the active slots {sorted(self._lengths)}")
        return self._rows.index(slot)

    def length(self, slot: int) -> int:
        """Tokens that a slot holds."""
        self.row(slot)
        return self._lengths[slot]

    def length_of_row(self, row: int) -> int:
        """Tokens in an active cache row."""
        return self._lengths[self._rows[row]]

    def advance(self, slots: Mapping[int, int]) -> None:
        """Adds new tokens to slots, after their step has succeeded."""
        for slot, seq_len in slots.items():
            self._lengths[slot] += seq_len
