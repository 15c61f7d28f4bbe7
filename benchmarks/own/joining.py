"""Measures what joining and leaving cost at several cache capacities, on onnxruntime.

python -m benchmarks.own.joining BUNDLE       prints JSON; figures are milliseconds
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.machine.description import machine, stamp
from exporter.bundle.bundle import Bundle
from runtime import DecodeSession

ROUNDS = 15
SEQUENCES, LENGTH = 4, 16


def joining_times(folder: str, capacity: int, rounds: int) -> dict[str, list[float]]:
    """Returns call → milliseconds, with four sequences of 16 tokens beside each other."""
    prompt = np.random.default_rng(0).integers(0, 1_000, LENGTH)
    times: dict[str, list[float]] = {"acquire": [], "release": [], "step": []}

    def timed(name: str, call: Callable) -> Any:
        started = time.perf_counter()
        result = call()
        times[name].append((time.perf_counter() - started) * 1e3)
        return result

    with DecodeSession.open(folder, "onnxruntime", max_batch=SEQUENCES, cache_capacity=capacity) as session:
        slots = [session.acquire() for _ in range(SEQUENCES)]
        session.step(dict.fromkeys(slots, prompt))
        for _ in range(rounds):
            timed("release", lambda: session.release(slots.pop(1)))
            slots.append(timed("acquire", session.acquire))
            session.step({slots[-1]: prompt[:-1]})
            timed("step", lambda: session.step({slots[-1]: [7]}))
    return times


def main() -> None:
    """Measures one bundle of a whole model and prints the figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.own.joining", description=__doc__.splitlines()[0])
    parser.add_argument("bundle", metavar="BUNDLE", help="bundle of a whole model")
    parser.add_argument("--capacities", default="1024,8192", help="cache capacities (default 1024,8192)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"runs of each (default {ROUNDS})")
    arguments = parser.parse_args()
    manifest = Bundle.open(arguments.bundle).manifest
    result = {**stamp(), "machine": machine(), "load_average": os.getloadavg()[0], "dtype": manifest.dtype}
    for capacity in map(int, arguments.capacities.split(",")):
        times = joining_times(arguments.bundle, capacity, arguments.rounds)
        result[f"capacity {capacity}"] = {
            name: {"min": round(min(values), 3), "median": round(float(np.median(values)), 3)}
            for name, values in times.items()
        }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
