"""Serving on onnxruntime: a soak of sequences coming and going, and what a decode step costs beside the graph's own run.

python -m benchmarks.serving [--steps N]         writes benchmarks/records/serving.json
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

from benchmarks.machine import machine, stamp
from exporter.bundle import Bundle
from exporter.catalogue import ModelConfig
from exporter.contract import Unit
from exporter.errors import CheckFailed
from exporter.export import ExportRequest, export_bundle
from exporter.feeds import step_feeds
from exporter.steppers.eager import EagerStepper
from exporter.weights import RandomWeights
from runtime import DecodeSession

TINY = ModelConfig(hidden_size=64, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=16, intermediate_size=96, vocab_size=101, context_length=512)
RECORD = Path(__file__).parent / "records" / "serving.json"
MAX_BATCH = 8
SOAK_CAPACITY = 64
CHECK_EVERY = 100
TOLERANCE = 1e-4  # absolute, of float32 logits near 1 in size
OVERHEAD_CAPACITY = 512
OVERHEAD_STEPS = 4_000


def export(unit: str, folder: Path) -> Bundle:
    """Exports a unit of the tiny model in float32 and opens it."""
    request = ExportRequest(TINY, Unit.parse(unit, TINY), RandomWeights(TINY, 0), "fp32")
    export_bundle(request, folder / unit, validated=False)
    return Bundle.open(folder / unit)


def resident_bytes() -> int:
    """Memory of this process that is resident now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def last_logits(eager: EagerStepper, tokens: list[int]) -> np.ndarray:
    """Logits float32 [V] of the last of these tokens, all of them computed again over an empty cache."""
    feeds = step_feeds("input_ids", np.array([tokens]), np.array([0]), np.array([len(tokens)]))
    return eager.run(feeds, eager.new_cache(1, SOAK_CAPACITY))["logits"][0]


class Traffic:
    """Sequences that join, fork and leave at random, and the tokens that each has been given.

    Attributes:
        tokens: slot → all its tokens so far.
        joined, forked, left: events so far.
    """

    def __init__(self, session: DecodeSession, seed: int) -> None:
        self.session = session
        self.rng = np.random.default_rng(seed)
        self.tokens: dict[int, list[int]] = {}
        self.joined = self.forked = self.left = 0

    def come_and_go(self) -> dict[int, np.ndarray]:
        """Lets sequences leave, fork and join; returns the next step: a token for those there, a prompt for a newcomer."""
        for slot, tokens in list(self.tokens.items()):
            if len(tokens) == SOAK_CAPACITY or self.rng.random() < 0.02:
                self.session.release(slot)
                del self.tokens[slot]
                self.left += 1
        if self.tokens and len(self.tokens) < MAX_BATCH and self.rng.random() < 0.05:
            source = int(self.rng.choice(list(self.tokens)))
            self.tokens[self.session.fork(source)] = list(self.tokens[source])
            self.forked += 1
        step = {slot: self.draw(1) for slot in self.tokens}
        if not self.tokens or (len(self.tokens) < MAX_BATCH and self.rng.random() < 0.2):
            step[self.session.acquire()] = self.draw(int(self.rng.integers(1, 17)))
            self.joined += 1
        return step

    def draw(self, n_tokens: int) -> np.ndarray:
        return self.rng.integers(0, TINY.vocab_size, n_tokens)

    def advance(self) -> dict[int, np.ndarray]:
        """One step of everyone; returns slot → logits."""
        step = self.come_and_go()
        logits = self.session.step(step)
        for slot, new in step.items():
            self.tokens.setdefault(slot, []).extend(new.tolist())
        return logits


def soak(bundle: Bundle, n_steps: int) -> dict:
    """Runs `n_steps` steps of random traffic; returns memory at each tenth, events and the largest error seen.

    Raises:
        CheckFailed: a sequence's logits are not those of its tokens.
    """
    eager = EagerStepper.from_bundle(bundle)
    resident, max_error, n_checks, n_tokens = [], 0.0, 0, 0
    with DecodeSession.open(bundle.folder, "onnxruntime", max_batch=MAX_BATCH, cache_capacity=SOAK_CAPACITY) as session:
        traffic = Traffic(session, seed=0)
        started = time.perf_counter()
        for step in range(1, n_steps + 1):
            logits = traffic.advance()
            n_tokens += len(logits)
            if step % CHECK_EVERY == 0:
                slot = int(traffic.rng.choice(list(logits)))
                error = float(np.abs(logits[slot] - last_logits(eager, traffic.tokens[slot])).max())
                if not error <= TOLERANCE:
                    raise CheckFailed(f"soak: step {step}, slot {slot}: logits are off by {error:.1e}, expected at most {TOLERANCE:.0e}")
                max_error, n_checks = max(max_error, error), n_checks + 1
            if step % (n_steps // 10) == 0:
                resident.append(resident_bytes())
        seconds = time.perf_counter() - started
    return {
        "steps": n_steps,
        "seconds": round(seconds, 1),
        "sequences_a_step": round(n_tokens / n_steps, 2),
        "joined": traffic.joined,
        "forked": traffic.forked,
        "left": traffic.left,
        "logits_checked": n_checks,
        "max_error": max_error,
        "resident_bytes_each_tenth": resident,
        "resident_growth_bytes": resident[-1] - resident[0],
    }


def overhead(bundle: Bundle, batch: int, n_steps: int = OVERHEAD_STEPS) -> dict:
    """µs of a one-token step of `batch` slots: all of `step`, the stepper's own run, and the difference, one by one."""
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
        raise CheckFailed(f"overhead: {len(steps_ns)} steps took {len(runs_ns)} runs, expected one each; neighbours were not run together")
    warm = slice(OVERHEAD_CAPACITY, None)
    steps_us, runs_us = np.array(steps_ns[warm]) / 1e3, np.array(runs_ns[warm]) / 1e3
    return {"steps": len(steps_us), "overhead_us": spread(steps_us - runs_us), "run_us": spread(runs_us), "step_us": spread(steps_us)}


def timed(call: Callable, durations_ns: list[int]) -> Callable:
    """The same call, which appends how long it took."""

    def wrapper(*args):
        started = time.perf_counter_ns()
        result = call(*args)
        durations_ns.append(time.perf_counter_ns() - started)
        return result

    return wrapper


def spread(values: np.ndarray) -> dict[str, float]:
    return {name: round(float(np.percentile(values, q)), 1) for name, q in (("p10", 10), ("median", 50), ("p90", 90))}


def main() -> None:
    """Measures both, prints tables and writes the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving")
    parser.add_argument("--steps", type=int, default=20_000, help="decode steps of the soak (default: %(default)s)")
    n_steps = parser.parse_args().steps
    if n_steps < 10:
        parser.error(f"--steps: got {n_steps}, expected at least 10; memory is read at each tenth")
    with tempfile.TemporaryDirectory() as scratch:
        block, model = export("block", Path(scratch)), export("model", Path(scratch))
        load_average = os.getloadavg()[0]
        costs = {f"batch {batch}": overhead(block, batch) for batch in (1, 8)}
        soaked = soak(model, n_steps)
    for name, figures in costs.items():
        for part, values in (("overhead", figures["overhead_us"]), ("run", figures["run_us"]), ("step", figures["step_us"])):
            print(f"{name:8} {part:9} {values['median']:7.1f} µs  (p10 {values['p10']}, p90 {values['p90']})")
    for name, value in soaked.items():
        print(f"soak     {name:26} {value}")
    record = {**stamp(), "machine": machine(), "load_average_before": load_average, "decode_step": costs, "soak": soaked}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
