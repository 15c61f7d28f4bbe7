"""Measures the time that the runtime adds to a decode step on onnxruntime.

python -m benchmarks.own.runtime_overhead         writes benchmarks/records/serving.json
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.machine.description import machine, stamp
from exporter.bundle.bundle import Bundle
from exporter.common.errors import CheckFailed
from exporter.export import ExportRequest, export_bundle
from exporter.model.weights import RandomWeights
from exporter.spec.catalogue import ModelConfig
from exporter.spec.unit import Unit
from runtime import DecodeSession

TINY = ModelConfig(
    hidden_size=64,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    vocab_size=101,
    context_length=512,
)
RECORD = Path(__file__).parents[1] / "records" / "serving.json"
OVERHEAD_CAPACITY = 512
OVERHEAD_STEPS = 4_000


def export(unit: str, folder: Path) -> Bundle:
    """Exports a unit of the tiny model in float32 and opens it."""
    request = ExportRequest(TINY, Unit.parse(unit, TINY), RandomWeights(TINY, 0), "fp32")
    export_bundle(request, folder / unit, validated=False)
    return Bundle.open(folder / unit)


def overhead(bundle: Bundle, batch: int, n_steps: int = OVERHEAD_STEPS) -> dict:
    """Returns µs of one-token steps of `batch` slots: the whole `step`, the stepper's run, and their difference."""
    x = np.random.default_rng(0).standard_normal((batch, 1, TINY.hidden_size)).astype(np.float32)
    runs_ns: list[int] = []
    steps_ns: list[int] = []
    with DecodeSession.open(bundle.folder, "onnxruntime", max_batch=batch, cache_capacity=OVERHEAD_CAPACITY) as session:
        session._stepper.run = timed(session._stepper.run, runs_ns)
        step = timed(session.step, steps_ns)
        while len(steps_ns) < n_steps:
            session.reset()
            inputs = {session.acquire(): x[row] for row in range(batch)}
            for _ in range(OVERHEAD_CAPACITY):
                step(inputs)
    if len(runs_ns) != len(steps_ns):
        raise CheckFailed(f"overhead: got {len(runs_ns)} runs in {len(steps_ns)} steps, expected one run in each step")
    warm = slice(OVERHEAD_CAPACITY, None)
    steps_us, runs_us = np.array(steps_ns[warm]) / 1e3, np.array(runs_ns[warm]) / 1e3
    return {
        "steps": len(steps_us),
        "overhead_us": spread(steps_us - runs_us),
        "run_us": spread(runs_us),
        "step_us": spread(steps_us),
    }


def timed(call: Callable, durations_ns: list[int]) -> Callable:
    """Returns the same call; it appends its time to `durations_ns`."""

    def wrapper(*args):
        started = time.perf_counter_ns()
        result = call(*args)
        durations_ns.append(time.perf_counter_ns() - started)
        return result

    return wrapper


def spread(values: np.ndarray) -> dict[str, float]:
    return {name: round(float(np.percentile(values, q)), 1) for name, q in (("p10", 10), ("median", 50), ("p90", 90))}


def main() -> None:
    """Measures one sequence and eight sequences, prints a table and writes the record."""
    prog = "python -m benchmarks.own.runtime_overhead"
    argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        block = export("block", Path(scratch))
        load_average = os.getloadavg()[0]
        costs = {f"batch {batch}": overhead(block, batch) for batch in (1, 8)}
    for name, figures in costs.items():
        for part in ("overhead", "run", "step"):
            values = figures[f"{part}_us"]
            print(f"{name:8} {part:9} {values['median']:7.1f} µs  (p10 {values['p10']}, p90 {values['p90']})")
    record = {**stamp(), "machine": machine(), "load_average_before": load_average, "decode_step": costs}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
