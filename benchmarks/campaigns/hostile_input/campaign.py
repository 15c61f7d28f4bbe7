"""Gives cases to workers and watches them. Too much time, too much memory or a dead process is a fault."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CASE_SECONDS = 10.0  # processor time, which does not grow on a busy machine; more is a fault
CASE_BYTES = 2 * 2**30  # more is a fault
KILL_CPU_SECONDS, KILL_BYTES = 30.0, 6 * 2**30  # limits at which the worker is killed
KILL_SECONDS = 300.0  # wall time after which the worker waits for something that never comes, and is killed
LISTED = 40  # faults listed in the record


@dataclass
class Tally:
    """Figures of one kind of input."""

    cases: int = 0
    outcomes: Counter = field(default_factory=Counter)
    doors: Counter = field(default_factory=Counter)
    gates: Counter = field(default_factory=Counter)
    faults: Counter = field(default_factory=Counter)
    slowest: tuple[float, int] = (0.0, -1)
    largest: tuple[int, int] = (0, -1)

    def add(self, result: dict) -> None:
        self.cases += 1
        for door, outcome in result["outcomes"]:
            self.outcomes[outcome] += 1
            self.doors[door] += 1
        self.gates.update(result["gates"])
        self.slowest = max(self.slowest, (round(result["cpu_seconds"], 3), result["number"]))
        self.largest = max(self.largest, (result["memory_bytes"], result["number"]))

    def to_dict(self) -> dict:
        return {
            "cases": self.cases,
            "outcomes": dict(sorted(self.outcomes.items())),
            "doors": dict(self.doors.most_common()),
            "cases_past_each_gate": dict(self.gates.most_common()),
            "slowest_cpu_s": self.slowest[0],
            "slowest_case": self.slowest[1],
            "most_memory_bytes": self.largest[0],
            "most_memory_case": self.largest[1],
            "faults": sum(self.faults.values()),
        }


class Worker:
    """One worker process and the lines that it prints."""

    def __init__(self, folder: Path, originals: Path, seed: int) -> None:
        module = "benchmarks.campaigns.hostile_input.case_worker"
        command = [sys.executable, "-m", module, str(folder), str(originals), str(seed)]
        settings = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONFAULTHANDLER": "0"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, **pipes, text=True, env=os.environ | settings)
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._answer(KILL_SECONDS)

    def _read(self) -> None:
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def run(self, kind: str, number: int) -> dict:
        """Runs a case and returns its result; the result is a fault where the worker died or was killed."""
        door = "input"
        try:
            self.process.stdin.write(json.dumps([kind, number]) + "\n")
            self.process.stdin.flush()
            answer = self._answer(KILL_SECONDS)
            while "door" in answer:
                door = answer["door"]
                answer = self._answer(KILL_SECONDS)
            return answer
        except (BrokenPipeError, EOFError):
            what = f"crash: the process ended with {self.process.wait()}"
        except TimeoutError:
            what = "hang: the process was killed"
        except MemoryError:
            what = "memory: the process was killed"
        self.close()
        figures = {"gates": [], "cpu_seconds": 0.0, "memory_bytes": 0}
        outcome = {"outcomes": [(door, "killed")], "faults": [f"{door}: {what}"]}
        return {"kind": kind, "number": number, **outcome, **figures}

    def _answer(self, seconds: float) -> dict:
        end, started = time.monotonic() + seconds, self._cpu_seconds()
        while time.monotonic() < end and self._cpu_seconds() - started < KILL_CPU_SECONDS:
            with contextlib.suppress(queue.Empty):
                line = self._lines.get(timeout=0.1)
                if not line:
                    raise EOFError
                return json.loads(line)
            if self._resident_bytes() > KILL_BYTES:
                raise MemoryError
        raise TimeoutError

    def _resident_bytes(self) -> int:
        with contextlib.suppress(OSError):
            return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return 0

    def _cpu_seconds(self) -> float:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return 0.0

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def run_campaign(
    cases: dict[str, int], seed: int, jobs: int, originals: Path, report: Callable[[dict], None] = lambda result: None
) -> dict:
    """Runs cases of each kind; returns figures by kind and the faults.

    Args:
        cases: kind → number of cases.
        seed: seed for all inputs; a case depends only on the seed, its kind and its number.
        jobs: number of workers at the same time.
        originals: folder of good bundles and checkpoints.
        report: called with the result of each case.
    """
    tallies: dict[str, Tally] = defaultdict(Tally)
    examples: dict[str, dict] = {}
    lock, numbers = threading.Lock(), _interleaved(cases)

    broken: list[BaseException] = []

    def work(index: int) -> None:
        try:
            run(index)
        except BaseException as error:
            broken.append(error)

    def run(index: int) -> None:
        folder = Path(scratch) / f"worker{index}" / "case"
        worker = Worker(folder, originals, seed)
        while True:
            with lock:
                case = next(numbers, None)
            if case is None:
                break
            result = worker.run(*case)
            _judge(result)
            with lock:
                _count(tallies[result["kind"]], result, examples, report)
            if worker.process.poll() is not None:
                worker = Worker(folder, originals, seed)
        worker.close()

    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hostile-input-") as scratch:
        threads = [threading.Thread(target=work, args=(index,)) for index in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if broken:
        raise broken[0]
    return {
        "cases": sum(tally.cases for tally in tallies.values()),
        "doors_taken": sum(sum(tally.doors.values()) for tally in tallies.values()),
        "seconds": round(time.monotonic() - started, 1),
        "faults": sum(sum(tally.faults.values()) for tally in tallies.values()),
        "kinds": {kind: tallies[kind].to_dict() for kind in cases},
        "fault_examples": list(examples.values())[:LISTED],
    }


def _interleaved(cases: dict[str, int]) -> Iterator[tuple[str, int]]:
    for number in range(max(cases.values())):
        for kind, count in cases.items():
            if number < count:
                yield kind, number


def _judge(result: dict) -> None:
    """Adds the faults that the figures show: too much time or memory."""
    if result["cpu_seconds"] > CASE_SECONDS:
        result["faults"].append(f"{result['outcomes'][-1][0]}: slow: {result['cpu_seconds']:.1f} s")
    if result["memory_bytes"] > CASE_BYTES:
        result["faults"].append(f"{result['outcomes'][-1][0]}: memory: {result['memory_bytes'] / 2**30:.1f} GiB")


def _count(tally: Tally, result: dict, examples: dict[str, dict], report: Callable[[dict], Any]) -> None:
    tally.add(result)
    kind, number = result["kind"], result["number"]
    for fault in result["faults"]:
        tally.faults[fault] += 1
        example = {"kind": kind, "number": number, "fault": fault}
        examples.setdefault(f"{kind}: {fault.split(': ', 1)[1][:90]}", example)
    report(result)
