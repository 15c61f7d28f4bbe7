"""Measures the limits of this machine, and compares our steps with them, whole and by component."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from exporter.costs.roofline import Step, roofline
from exporter.spec.catalogue import ModelConfig
from exporter.spec.parameters import MERGED_WEIGHTS
from exporter.spec.unit import Unit

PRODUCT_SIZE = 2048
REPEATS = 5


@dataclass(frozen=True)
class Limits:
    """Limits measured on all cores.

    Attributes:
        bandwidth: bytes read from memory per second.
        flop_rate: floating-point operations per second in a float32 matrix product.
    """

    bandwidth: float
    flop_rate: float

    def best(self, other: Limits) -> Limits:
        """Returns the larger of both rates: a disturbed measurement is too low, never too high."""
        return Limits(max(self.bandwidth, other.bandwidth), max(self.flop_rate, other.flop_rate))

    def to_dict(self) -> dict:
        return asdict(self)


def measure_limits(threads: int, array_bytes: int) -> Limits:
    """Returns the best of several reads of an array of `array_bytes`, and of several square matrix products.

    `array_bytes` must be far larger than the processor's caches.
    """
    import torch

    torch.set_num_threads(threads)
    array = torch.ones(array_bytes // 4)
    read = _best_seconds(array.sum)
    del array
    matrix = torch.ones(PRODUCT_SIZE, PRODUCT_SIZE)
    product = _best_seconds(lambda: matrix @ matrix)
    return Limits(array_bytes / read, 2 * PRODUCT_SIZE**3 / product)


def _best_seconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def compare_with_limits(
    config: ModelConfig,
    unit: Unit,
    batch: int,
    seq_len: int,
    past_len: int,
    limits: Limits,
    measured_ms: Mapping[str, float],
) -> dict:
    """Returns a float32 step's time at the machine's limits beside the measured time, whole and for each component.

    Args:
        config: geometry of the model.
        unit: the unit that was measured.
        batch: number of sequences.
        seq_len: tokens in the step.
        past_len: cached tokens.
        limits: limits of the machine.
        measured_ms: component → milliseconds in onnxruntime's profile. The names are those of
            `exporter.costs.roofline.Cost`; merged projections are one component. Other names count as "other".
    """
    table = roofline(config, unit, Step(batch, seq_len, past_len, "fp32"), limits.bandwidth, limits.flop_rate)
    merged = {part: whole for whole, parts in MERGED_WEIGHTS.items() for part in parts}
    limits_ms: dict[str, float] = {}
    bounds: dict[str, str] = {}
    for row in table["components"]:
        name = merged.get(row["name"], row["name"])
        limits_ms[name] = limits_ms.get(name, 0.0) + max(row["transfer_ms"], row["arithmetic_ms"])
        bounds[name] = row["bound"]
    rows = []
    for name, limit in limits_ms.items():
        ms = measured_ms.get(name)
        row = {"name": name, "limit_ms": limit, "bound": bounds[name], "measured_ms": ms}
        rows.append(row | {"share": limit / ms if ms else None})
    other = sum(ms for name, ms in measured_ms.items() if name not in limits_ms)
    rows.append({"name": "other", "limit_ms": 0.0, "bound": "", "measured_ms": other, "share": None})
    return {"limit_ms": table["limit_ms"], "components": rows}
