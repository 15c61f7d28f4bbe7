"""Runs a whole plan: measures the machine, runs every workload, measures exports by depth, and returns the record."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.machine.description import machine, stamp
from benchmarks.machine.machine_limits import Limits, measure_limits
from benchmarks.own.exporters import EXPORTERS, by_depth
from benchmarks.race.lineup import Entry
from benchmarks.race.models import random_checkpoint
from benchmarks.race.run import Run
from benchmarks.race.targets import measured_targets
from benchmarks.race.workloads import Plan
from exporter.common import terminal
from exporter.common.errors import InputError

FOLDER = Path("build/bench")


def run_plan(
    plan: Plan, lineup: Sequence[Entry], threads: int, checkpoint: Path, only: Sequence[str] | None = None
) -> dict:
    """Runs a plan and returns its record.

    Args:
        plan: the workloads and the depths of the exports.
        lineup: the contenders.
        threads: number of processor cores.
        checkpoint: folder of the real model; it may be missing where no workload needs it.
        only: names of the workloads to run; exports by depth are left out then. None runs everything.

    Raises:
        InputError: a name in `only` is unknown, or the real model is missing.
    """
    started = time.perf_counter()
    names = [workload.name for workload in plan.workloads]
    if set(only or ()) - set(names):
        raise InputError(f"workloads: got {', '.join(only or ())}, expected some of {', '.join(names)}")
    real = checkpoint if (checkpoint / "config.json").is_file() else None
    if real is None and any(workload.config is None for workload in plan.workloads):
        raise InputError(f"checkpoint {checkpoint}: no config.json there; fetch the real model with `make checkpoint`")
    load_average = os.getloadavg()[0]
    limits = measure_limits(threads, plan.bandwidth_bytes)
    rates = f"reads {limits.bandwidth / 1e9:.1f} GB/s, float32 products {limits.flop_rate / 1e9:.0f} GFLOP/s"
    terminal.say(f"{rates}; load average {load_average:.1f}")

    def measure() -> Limits:
        return measure_limits(threads, plan.bandwidth_bytes // 2)  # the contenders hold memory by then

    run = Run(lineup, threads, real, FOLDER, measure, terminal.say)
    wanted = [workload for workload in plan.workloads if only is None or workload.name in only]
    record = {
        **stamp(),
        "machine": machine() | {"load_average_before": load_average},
        "threads": threads,
        "limits": limits.to_dict(),
        "workloads": {workload.name: run.workload(workload) for workload in wanted},
        "exports by depth": [] if only else _exports(plan, lineup, real),
        "targets": [],
    }
    record["seconds"] = round(time.perf_counter() - started, 1)
    return record | {"targets": measured_targets(record)}


def _exports(plan: Plan, lineup: Sequence[Entry], tokenizer: Path | None) -> list[dict]:
    terminal.say(f"exports of {', '.join(map(str, plan.depths))} layers")
    checkpoints = {}
    for depth in plan.depths:
        config = dataclasses.replace(plan.depth_config, n_layers=depth)
        checkpoints[depth] = random_checkpoint(FOLDER / "checkpoints" / f"depth-{depth}", config, tokenizer)
    names = {entry.name for entry in lineup}
    return by_depth(checkpoints, [name for name in EXPORTERS if name in names], FOLDER)
