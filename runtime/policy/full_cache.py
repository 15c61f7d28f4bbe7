"""What happens when a cache is full: the step is refused before it writes anything."""

from __future__ import annotations

from collections.abc import Mapping

from exporter.common.errors import InputError


def check_room(sequences: Mapping[str, tuple[int, int]], capacity: int) -> None:
    """Checks that the cache has room for the new tokens of each sequence.

    A session calls this before each step and before it imports a slot. It never drops old tokens to make room.

    Args:
        sequences: name of each sequence → (tokens that it holds, new tokens).
        capacity: tokens that each sequence can hold.

    Raises:
        InputError: a sequence has no room. The message names the first one.
    """
    for name, (past_len, seq_len) in sequences.items():
        if past_len + seq_len > capacity:
            raise InputError(
                f"kv_cache: {name} holds {past_len} of {capacity} tokens and was asked for {seq_len} more; "
                f"nothing was written; reset or release it, or "
                f"open the session with a cache_capacity of at least {past_len + seq_len}"
            )
