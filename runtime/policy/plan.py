"""Which rows run together: pure policy over lengths, with no buffer and no backend in sight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from exporter.common.errors import InputError


@dataclass(frozen=True)
class Launch:
    """One run of the graph over the contiguous cache rows first … stop − 1, right-padded to `width` tokens."""

    first: int
    stop: int
    width: int

    @property
    def rows(self) -> range:
        return range(self.first, self.stop)


def check_fits(sequences: Mapping[str, tuple[int, int]], capacity: int) -> None:
    """Refuses a step that some sequence has no room for.

    Args:
        sequences: what to call it → (tokens it holds, tokens it was asked for).
        capacity: tokens that each can hold.

    Raises:
        InputError: names the first such sequence, what it holds and what it was asked for.
    """
    for name, (past_len, seq_len) in sequences.items():
        if past_len + seq_len > capacity:
            raise InputError(
                f"kv_cache: {name} holds {past_len} of {capacity} tokens and was asked for {seq_len} more; nothing was written; "
                f"reset or release it, or open the session with a cache_capacity of at least {past_len + seq_len}"
            )


def plan_padded(past_lens: Sequence[int], seq_lens: Sequence[int], capacity: int) -> list[Launch]:
    """Splits a step of rows 0 … B − 1 into as few runs of neighbours as keep padding inside every row's cache.

    A padded row writes `width` rows from its past length on, real or not; rows for which that would pass the end of the
    cache run apart from longer ones. Every row must fit by its real length (`check_fits`), so a row alone always runs.
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


def plan_unpadded(seq_lens: Mapping[int, int]) -> list[Launch]:
    """Splits a step of any rows into runs of neighbours with equally many new tokens.

    Nothing is padded, so nothing is written beyond a sequence's end, and rows that take no part lie between two runs.

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
