"""Which rows run together: pure policy over lengths, with no buffer and no backend in sight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from exporter.errors import InputError


@dataclass(frozen=True)
class Launch:
    """One run of the graph over the contiguous cache rows first … stop − 1, right-padded to `width` tokens."""

    first: int
    stop: int
    width: int


def check_fits(past_lens: Sequence[int], seq_lens: Sequence[int], capacity: int) -> None:
    """Refuses a step that some sequence has no room for.

    Raises:
        InputError: names the first such sequence, what it holds and what it was asked for.
    """
    for row, (past_len, seq_len) in enumerate(zip(past_lens, seq_lens, strict=True)):
        if past_len + seq_len > capacity:
            raise InputError(
                f"kv_cache: sequence {row} holds {past_len} of {capacity} tokens and was asked for {seq_len} more; nothing was written; "
                f"reset it or open the session with a cache_capacity of at least {past_len + seq_len}"
            )


def plan_launches(past_lens: Sequence[int], seq_lens: Sequence[int], capacity: int) -> list[Launch]:
    """Splits a step into as few runs of neighbouring rows as keep padding inside every row's cache.

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
