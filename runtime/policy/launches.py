"""Which cache rows run together in a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """One run of the graph over the neighbouring cache rows first … stop − 1, right-padded to `width` tokens.

    It takes tokens `start` … `start` + `width` − 1 of each row's new tokens.
    """

    first: int
    stop: int
    width: int
    start: int = 0

    @property
    def rows(self) -> range:
        """The cache rows that take part."""
        return range(self.first, self.stop)


def padded_launches(past_lens: Sequence[int], seq_lens: Sequence[int], capacity: int) -> list[Launch]:
    """Returns the fewest launches over rows 0 … B − 1 that keep padding inside each row's cache.

    A launch writes `width` tokens to each of its rows, padding included. Where that would pass the end of a row's
    cache, the row runs in a launch of its own length. Each row must have room for its real tokens
    (`check_room`), so a row alone always runs.

    Args:
        past_lens: tokens that each row holds.
        seq_lens: new tokens of each row.
        capacity: tokens that each row can hold.
    """
    launches: list[Launch] = []
    first, width, latest = 0, 0, 0
    for row, (past_len, seq_len) in enumerate(zip(past_lens, seq_lens, strict=True)):
        wider, later = max(width, seq_len), max(latest, past_len)
        if row > first and later + wider > capacity:
            launches.append(Launch(first, row, width))
            first, wider, later = row, seq_len, past_len
        width, latest = wider, later
    launches.append(Launch(first, len(past_lens), width))
    return launches


def unpadded_launches(seq_lens: Mapping[int, int]) -> list[Launch]:
    """Returns launches over any rows; each joins neighbours with the same number of new tokens.

    Nothing is padded. So nothing is written beyond a sequence's end, and rows that take no part are not touched.

    Args:
        seq_lens: cache row → its new tokens.
    """
    launches: list[Launch] = []
    for row in sorted(seq_lens):
        previous = launches[-1] if launches else None
        if previous is not None and previous.stop == row and previous.width == seq_lens[row]:
            launches[-1] = Launch(previous.first, row + 1, previous.width)
        else:
            launches.append(Launch(row, row + 1, seq_lens[row]))
    return launches


def in_pieces(launches: Sequence[Launch], seq_lens: Mapping[int, int], largest: int | None) -> list[Launch]:
    """Returns launches of at most `largest` tokens, which write what the given launches write or less.

    The pieces of a row come in the order of its tokens. A row whose tokens have ended takes no part in later pieces.

    Args:
        launches: the launches of a step.
        seq_lens: cache row → its new tokens.
        largest: the most tokens of a row that one run of the graph takes; None means any number.
    """
    pieces: list[Launch] = []
    for launch in launches:
        if largest is None or launch.width <= largest:
            pieces.append(launch)
            continue
        for start in range(0, launch.width, largest):
            left = {row: min(seq_lens[row] - start, largest) for row in launch.rows if seq_lens[row] > start}
            for first, stop in _neighbours(left):
                pieces.append(Launch(first, stop, max(left[row] for row in range(first, stop)), start))
    return pieces


def _neighbours(rows: Iterable[int]) -> list[tuple[int, int]]:
    """Returns the runs first … stop − 1 of neighbours among rows in ascending order."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and runs[-1][1] == row:
            runs[-1] = (runs[-1][0], row + 1)
        else:
            runs.append((row, row + 1))
    return runs
