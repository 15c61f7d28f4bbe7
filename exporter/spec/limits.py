"""Limits that every backend shares: positions of a graph, rows of a cache."""

from __future__ import annotations

import math

from exporter.common.errors import InputError
from exporter.common.plain_numbers import is_whole, plain
from exporter.spec.catalogue import ModelConfig
from exporter.spec.dtypes import DTYPES

DEFAULT_MAX_POSITIONS = 8192
DEFAULT_CACHE_CAPACITY = 2048
CACHE_ALIGNMENT_BYTES = 256


def check_max_positions(max_positions: int | None, config: ModelConfig) -> int:
    """Returns the positions a graph is exported for; None means the default, or the context where that is shorter.

    Raises:
        InputError: the number is below 1 or beyond the model's context.
    """
    if max_positions is None:
        return min(DEFAULT_MAX_POSITIONS, config.context_length)
    max_positions = plain(max_positions)
    if not is_count(max_positions) or max_positions > config.context_length:
        raise InputError(
            f"max_positions: got {max_positions!r}, expected 1 to {config.context_length}, the model's context"
        )
    return max_positions


def check_cache_capacity(cache_capacity: int | None, config: ModelConfig, dtype: str, max_positions: int) -> int:
    """Returns the cache rows per sequence, rounded up so that the stride of a sequence is a multiple of 256 bytes.

    None means the smaller of 2,048 and `max_positions`, rounded down, so that nobody allocates a whole context by
    accident.

    Raises:
        InputError: the number is below 1 or beyond the positions the graph was exported for, or no capacity fits those.
    """
    step = cache_capacity_step(config, dtype)
    largest = max_positions // step * step
    if largest == 0:
        raise InputError(
            f"cache_capacity: this graph was exported for {max_positions} positions "
            f"and a cache holds a multiple of {step}; "
            f"export again with max_positions of at least {step}"
        )
    if cache_capacity is None:
        return min(DEFAULT_CACHE_CAPACITY, largest)
    cache_capacity = plain(cache_capacity)
    if not is_count(cache_capacity):
        raise InputError(f"cache_capacity: got {cache_capacity!r}, expected a whole number of at least 1")
    capacity = -(-cache_capacity // step) * step
    if capacity > max_positions:
        rounded = "" if capacity == cache_capacity else f", {capacity} once rounded up to a multiple of {step}"
        raise InputError(
            f"cache_capacity: got {cache_capacity}{rounded}, expected at most {max_positions}, "
            f"the positions this graph was exported for; ask for at most {largest} "
            "or export again with a larger max_positions"
        )
    return capacity


def cache_capacity_step(config: ModelConfig, dtype: str) -> int:
    """The number that cache capacities are a multiple of: the cache of each sequence then begins 256-byte aligned."""
    row_bytes = config.n_kv_heads * config.head_dim * DTYPES[dtype].n_bytes
    return CACHE_ALIGNMENT_BYTES // math.gcd(row_bytes, CACHE_ALIGNMENT_BYTES)


def is_count(value: object) -> bool:
    """Whether a plain value is a whole number of at least 1."""
    return isinstance(value, int) and is_whole(value) and value >= 1
