"""Runs contenders in processes of their own, judges their outputs and times them in turn, a few steps each.

All processes stay alive and take requests over a pipe. Only one works at a time, and a slow phase of the machine
affects all of them alike.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.peers.environments import ROOT, prepare
from benchmarks.race.lineup import FLOORS, Entry
from benchmarks.race.models import last_line
from exporter.measuring.agreement import measure_agreement

SLOW_TURN_MS = 2_000  # a lane whose turn takes longer gets one timed step a turn
SLOW_LANE_MS = 20_000  # a lane that took longer in total is done as soon as it has ENOUGH_SAMPLES
ENOUGH_SAMPLES = 5
WARM_STEPS = 1  # steps before the timed ones of a turn: the processor's caches hold another contender's weights


class ContenderFailed(RuntimeError):
    """A contender refused a request or its process ended; the message has the last line of its error."""


class Process:
    """The process of one contender.

    Attributes:
        entry: the contender.
        opened: its first answer: version, seconds to import and open, whether its cache can be filled, largest batch.
    """

    def __init__(self, entry: Entry, model: Path, threads: int, log: Path) -> None:
        self.entry, self._log = entry, log
        python = prepare(entry.environment) if entry.environment else Path(sys.executable)
        options = json.dumps({"model": str(model.absolute()), "threads": threads, **entry.options})
        command = [str(python), "-m", "benchmarks.contenders.worker", entry.module, options]
        with open(log, "w", encoding="utf-8") as stderr:
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": stderr}
            self._process = subprocess.Popen(command, **pipes, text=True, cwd=ROOT, env=environment)
        try:
            self.opened = self._answer()
        except ContenderFailed:
            self.close()
            raise

    def ask(self, do: str, **arguments: object) -> dict:
        """Sends one request and waits for its answer.

        Raises:
            ContenderFailed: the contender refused the request or its process ended.
        """
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}, default=str) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer is the error that ended it
        return self._answer()

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            last = last_line(self._log.read_text(encoding="utf-8"))
            raise ContenderFailed(f"its process ended with {self._process.wait()}: {last}")
        answer = json.loads(line)
        if "error" in answer:
            raise ContenderFailed(last_line(answer["error"]))
        return answer

    def close(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(frozen=True)
class Verdict:
    """The result of comparing a contender's outputs with the reference's.

    Attributes:
        top1: share of positions with the same most likely token.
        kl: mean KL divergence in nats.
        error: largest error of a logit, in root mean squares of the reference's.
        complaint: the figures that its floor does not allow; empty where all are allowed.
    """

    top1: float
    kl: float
    error: float
    complaint: str


def judge(entry: Entry, reference: np.ndarray, candidate: np.ndarray) -> Verdict:
    """Compares a contender's logits with the reference's and with the floor for the entry's weights.

    Args:
        entry: the contender.
        reference: float32 [positions, V].
        candidate: float32 [positions, V].
    """
    if reference.shape != candidate.shape or not np.isfinite(candidate).all():
        complaint = f"outputs: got {candidate.shape} with inf or NaN, expected {reference.shape} and finite"
        return Verdict(0.0, float("inf"), float("inf"), complaint)
    floor = FLOORS[entry.weights]
    agreement = measure_agreement(reference[None], candidate[None])
    error = float(np.abs(candidate - reference).max() / np.sqrt(np.mean(reference.astype(np.float64) ** 2)))
    complaints = [
        f"{name}: got {got:.3g}, expected {'at least' if least else 'at most'} {wanted:g}"
        for name, got, wanted, least in (
            ("same token", agreement.top1, floor.top1, True),
            ("KL divergence", agreement.kl, floor.kl, False),
            ("largest error of rms", error, floor.error, False),
        )
        if wanted is not None and (got < wanted if least else got > wanted)
    ]
    return Verdict(agreement.top1, agreement.kl, error, "; ".join(complaints))


@dataclass(frozen=True)
class Lane:
    """One series of samples in a race: a label, a process, and the request that a turn sends to it."""

    label: str
    process: Process
    do: str
    arguments: Mapping[str, object]


def race(lanes: Sequence[Lane], rounds: int, steps: int | None, say: Callable[[str], None]) -> dict[str, dict]:
    """Times every lane once in each round; each round begins with another lane. Slow lanes get fewer samples.

    Args:
        lanes: the lanes; one that fails is left out of the later rounds.
        rounds: number of turns of each lane.
        steps: timed steps in a turn, after WARM_STEPS that are reported separately; None where a turn is one sample.
        say: called with a line for each lane that fails.

    Returns:
        label → `spread` of its samples, or {"not_timed": reason}.
    """
    samples: dict[str, list[float]] = {lane.label: [] for lane in lanes}
    warm: dict[str, list[float]] = {lane.label: [] for lane in lanes}
    failed: dict[str, dict] = {}
    for number in range(rounds):
        for lane in [*lanes[number % len(lanes) :], *lanes[: number % len(lanes)]]:
            spent, timed = warm[lane.label] + samples[lane.label], samples[lane.label]
            if lane.label in failed or (sum(spent) > SLOW_LANE_MS and len(timed) >= ENOUGH_SAMPLES):
                continue
            slow = steps is not None and timed and np.median(timed) * steps > SLOW_TURN_MS
            extra = {} if steps is None else {"count": (1 if slow else steps) + WARM_STEPS}
            try:
                times = lane.process.ask(lane.do, **lane.arguments, **extra)["ms"]
            except ContenderFailed as reason:
                failed[lane.label] = {"not_timed": str(reason)}
                say(f"{lane.label}: {reason}")
                continue
            n_warm = WARM_STEPS if steps is not None else int(number == 0)  # a lane's first prefill is its warm-up
            warm[lane.label] += times[:n_warm]
            samples[lane.label] += times[n_warm:]
    return {
        label: failed.get(label) or spread(times) | {"warm_up_ms": round(float(np.median(warm[label])), 3)}
        for label, times in samples.items()
    }


def spread(milliseconds: Sequence[float]) -> dict[str, float]:
    """Returns the median, p10 and p90 of samples, and their number."""
    p10, median, p90 = (round(float(value), 4) for value in np.percentile(milliseconds, (10, 50, 90)))
    return {"p10_ms": p10, "median_ms": median, "p90_ms": p90, "n": len(milliseconds)}
