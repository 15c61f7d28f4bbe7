"""The memory plan: what a session will need, said and held against what is free before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from exporter.bundle import DATA_FILE, Manifest
from exporter.contract import DTYPES
from exporter.errors import InputError
from exporter.ledger import Ledger

# onnxruntime's CPU provider computes half graphs in float32 and keeps a float32 copy of each weight beside the file's.
_WEIGHT_COPIES = {("onnxruntime", "fp16"): 3.0, ("onnxruntime", "fp32"): 2.0}


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a session needs.

    Attributes:
        weights_bytes: of the backend's copies of the weights; mapped files count once.
        cache_bytes_per_token: of one sequence.
        activations_bytes: an estimate for the widest step: every sequence with one token, or one of `cache_capacity`.
        max_batch, cache_capacity: of the cache.
    """

    weights_bytes: int
    cache_bytes_per_token: int
    activations_bytes: int
    max_batch: int
    cache_capacity: int

    @property
    def cache_bytes(self) -> int:
        return self.cache_bytes_per_token * self.max_batch * self.cache_capacity

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.cache_bytes + self.activations_bytes

    def check(self, available_bytes: int) -> None:
        """Refuses a plan that does not fit.

        Raises:
            InputError: says what is needed and free, and the largest capacity and batch that would fit.
        """
        if self.total_bytes <= available_bytes:
            return
        room = max(0, available_bytes - self.weights_bytes - self.activations_bytes) // self.cache_bytes_per_token
        raise InputError(
            f"memory: the session needs {_gib(self.total_bytes)} (weights {_gib(self.weights_bytes)}, cache {_gib(self.cache_bytes)}, "
            f"activations about {_gib(self.activations_bytes)}) and {_gib(available_bytes)} is free; nothing was allocated; "
            f"{self.max_batch} sequences would fit with cache_capacity {room // self.max_batch}, "
            f"or {room // self.cache_capacity} sequences with {self.cache_capacity}"
        )


def plan_memory(manifest: Manifest, backend: str, max_batch: int, cache_capacity: int) -> MemoryPlan:
    """What a session of this bundle needs on a backend."""
    config, width = manifest.config, DTYPES[manifest.dtype].n_bytes
    weights = int(manifest.files[DATA_FILE]["size_bytes"] * _WEIGHT_COPIES.get((backend, manifest.dtype), 1.0))
    per_token = Ledger.of(config).cache_bytes_per_token(manifest.dtype) // config.n_layers * manifest.unit.n_layers
    compute_width = max(width, 4) if backend != "tensorrt" else width
    widest = 2 * config.hidden_size + 3 * config.intermediate_size
    logits = config.vocab_size * 4 * max_batch if manifest.unit.kind == "model" else 0
    activations = max(max_batch, min(cache_capacity, 512)) * widest * compute_width + logits
    return MemoryPlan(weights, per_token, activations, max_batch, cache_capacity)


def available_host_bytes() -> int:
    """Memory that this process can still take: what the kernel says is available, within its control group's limit."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return available


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB"
