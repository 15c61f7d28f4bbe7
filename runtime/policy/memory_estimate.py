"""How much memory a session needs. The estimate is compared with the free memory before anything is allocated."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from exporter.bundle.manifest import Manifest
from exporter.common.errors import InputError
from exporter.costs.ledger import Ledger
from exporter.spec.dtypes import DTYPES
from exporter.spec.limits import cache_capacity_step
from exporter.spec.parameters import weight_shapes

# onnxruntime's CPU provider computes fp16 graphs in float32. It keeps a float32 copy of each weight beside the file's.
_WEIGHT_COPIES = {("onnxruntime", "fp16"): 3.0, ("onnxruntime", "fp32"): 2.0}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a session needs.

    Attributes:
        weights_bytes: bytes of the backend's copies of the weights. Files that are mapped into memory count once.
        cache_bytes_per_token: bytes of one token of one sequence.
        activations_bytes: estimate for the widest step: every sequence with one token, or one with `cache_capacity`.
        max_batch: sequences that the cache holds.
        cache_capacity: tokens that each sequence can hold.
        other_sizes: returns the estimate for another batch and capacity; None keeps weights and activations the same.
        capacity_step: capacities are multiples of this number.
    """

    weights_bytes: int
    cache_bytes_per_token: int
    activations_bytes: int
    max_batch: int
    cache_capacity: int
    other_sizes: Callable[[int, int], MemoryEstimate] | None = field(default=None, compare=False, repr=False)
    capacity_step: int = field(default=1, compare=False)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the whole cache."""
        return self.cache_bytes_per_token * self.max_batch * self.cache_capacity

    @property
    def total_bytes(self) -> int:
        """Bytes of weights, cache and activations."""
        return self.weights_bytes + self.cache_bytes + self.activations_bytes

    def at(self, max_batch: int, cache_capacity: int) -> MemoryEstimate:
        """Returns the estimate for the same session with other sizes."""
        if self.other_sizes is not None:
            return self.other_sizes(max_batch, cache_capacity)
        return replace(self, max_batch=max_batch, cache_capacity=cache_capacity)

    def check(self, available_bytes: int) -> None:
        """Checks that the session fits in the free memory.

        Raises:
            InputError: it does not fit. The message gives the needed and the free bytes, and the largest capacity and
                batch that would fit.
        """
        if self.total_bytes <= available_bytes:
            return
        step, batch, capacity = self.capacity_step, self.max_batch, self.cache_capacity
        steps = _largest(capacity // step, lambda n: self.at(batch, n * step).total_bytes <= available_bytes)
        sequences = _largest(batch, lambda n: self.at(n, capacity).total_bytes <= available_bytes)
        proposal = (
            f"{batch} sequences would fit with cache_capacity {steps * step}, or {sequences} sequences with {capacity}"
        )
        if steps == sequences == 0:
            proposal = "no batch and no capacity would fit; free memory, or take a smaller model or dtype"
        raise InputError(
            f"memory: the session needs {_gib(self.total_bytes)} (weights {_gib(self.weights_bytes)}, "
            f"cache {_gib(self.cache_bytes)}, activations about {_gib(self.activations_bytes)}) and "
            f"{_gib(available_bytes)} is free; nothing was allocated; {proposal}"
        )


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """Returns the largest number from 1 to `limit` that fits, or 0. All numbers below one that fits must fit too."""
    return bisect.bisect_left(range(1, limit + 1), True, key=lambda n: not fits(n))


def estimate_memory(manifest: Manifest, backend: str, max_batch: int, cache_capacity: int) -> MemoryEstimate:
    """Returns the memory that a session needs for a bundle on a backend."""
    config, width = manifest.config, DTYPES[manifest.dtype].n_bytes
    compute_width = max(width, 4) if backend != "tensorrt" else width
    widest = 2 * config.hidden_size + 3 * config.intermediate_size
    logits = config.vocab_size * 4 * max_batch if manifest.unit.kind == "model" else 0
    layer_bytes_per_token = Ledger.of(config).cache_bytes_per_token(manifest.dtype) // config.n_layers
    return MemoryEstimate(
        weights_bytes=_weights_bytes(manifest, backend),
        cache_bytes_per_token=layer_bytes_per_token * manifest.unit.n_layers,
        activations_bytes=max(max_batch, min(cache_capacity, 512)) * widest * compute_width + logits,
        max_batch=max_batch,
        cache_capacity=cache_capacity,
        other_sizes=lambda batch, capacity: estimate_memory(manifest, backend, batch, capacity),
        capacity_step=cache_capacity_step(config, manifest.dtype),
    )


def _weights_bytes(manifest: Manifest, backend: str) -> int:
    """Returns the bytes of a backend's copies of the weights.

    The eager backend turns weights that are stored as integers into the bundle's dtype.
    """
    if backend == "eager" and manifest.weight_format is not None:
        config = manifest.config
        parameters = sum(map(math.prod, weight_shapes(config, manifest.unit).values()))
        # the head has memory of its own, also where it is tied
        head = config.vocab_size * config.hidden_size if manifest.unit.kind == "model" else 0
        return (parameters + head) * DTYPES[manifest.dtype].n_bytes
    return int(manifest.weights_bytes * _WEIGHT_COPIES.get((backend, manifest.dtype), 1.0))


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB"
