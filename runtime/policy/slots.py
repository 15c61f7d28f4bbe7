"""Cache slots: which sequence lives in which cache row. Pure policy, no buffer and no backend in sight.

Active slots keep the rows 0 … n − 1, so that a step over neighbours is one view of the cache. After a release the last row is
copied into the gap; that is the only copy that joining and leaving ever cost. Until it is copied the gap stays, and is harmless.

Every change is one assignment of a new dict. So a table is never seen half-changed, neither by another thread nor after an
interrupt, and a caller can prepare cache rows first and commit to them last.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from exporter.common.errors import InputError


@dataclass(frozen=True)
class Move:
    """Cache row `source` should be copied to row `destination`, which is free."""

    source: int
    destination: int


@dataclass(frozen=True)
class Held:
    """What an active slot holds: its cache row, and tokens in it."""

    row: int
    length: int


class SlotTable:
    """Slots by number, their rows and lengths. Numbers are never used twice, so a stale one is noticed.

    Attributes:
        n_rows: sequences that the cache holds.
    """

    def __init__(self, n_rows: int, numbers: Iterator[int] | None = None) -> None:
        """`numbers` gives the slots' numbers; a session hands the same iterator to each of its tables."""
        self.n_rows = n_rows
        self._numbers = itertools.count() if numbers is None else numbers
        self._slots: dict[int, Held] = {}  # in the order of acquisition

    @property
    def lengths(self) -> dict[int, int]:
        """Tokens that each active slot holds, by slot, in the order of acquisition."""
        return {slot: held.length for slot, held in self._slots.items()}

    def free_row(self) -> int:
        """The lowest free cache row.

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
        """Gives a free row to a new slot, which holds `length` tokens already; returns the slot."""
        slot = next(self._numbers)
        self._slots = {**self._slots, slot: Held(row, length)}
        return slot

    def release(self, slot: int) -> None:
        """Gives a slot back, and with it its row.

        Raises:
            InputError: it is not active.
        """
        self.held(slot)
        self._slots = {other: held for other, held in self._slots.items() if other != slot}

    def next_move(self) -> Move | None:
        """The move that brings the last active row into the first gap before it; None where there is no gap."""
        taken = self._row_lengths()
        gap = next((row for row in range(self.n_rows) if row not in taken), self.n_rows)
        last = max(taken, default=-1)
        return Move(last, gap) if gap < last else None

    def moved(self, move: Move) -> None:
        """Notes that a move has been made in the cache."""
        self._slots = {
            slot: Held(move.destination, held.length) if held.row == move.source else held
            for slot, held in self._slots.items()
        }

    def held(self, slot: int) -> Held:
        """The row and length of an active slot.

        Raises:
            InputError: it is not active.
        """
        if not isinstance(slot, int) or isinstance(slot, bool) or slot not in self._slots:
            raise InputError(f"slot: got {slot!r}, expected one of the active slots {sorted(self._slots)}")
        return self._slots[slot]

    def length_of_row(self, row: int) -> int:
        """Tokens in a cache row; 0 where it is free."""
        return self._row_lengths().get(row, 0)

    def _row_lengths(self) -> dict[int, int]:
        return {held.row: held.length for held in self._slots.values()}

    def advance(self, slots: Mapping[int, int]) -> None:
        """Adds new tokens to slots, to all of them at once, after their step has succeeded."""
        self._slots = {slot: Held(held.row, held.length + slots.get(slot, 0)) for slot, held in self._slots.items()}
