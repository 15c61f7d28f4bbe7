"""The process of a contender: reads JSON requests from stdin, one a line, and answers each with a JSON line on stdout.

python -m benchmarks.contenders.worker MODULE OPTIONS      benchmarks/race/harness.py starts it
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contenders.interface import Base


@dataclass
class Running:
    """A state, the tokens of its sequences, int64 [B, N], and how many of them are in the cache."""

    state: Any
    tokens: np.ndarray
    length: int = 0

    def next(self, count: int) -> np.ndarray:
        """Returns the next tokens, int64 [B, count], and counts them as cached."""
        taken = self.tokens[:, self.length : self.length + count]
        self.length += count
        return taken


@dataclass
class Worker:
    """Runs requests. Each public method is a request and returns JSON data."""

    contender: Base
    running: dict[str, Running] = field(default_factory=dict)

    def start(self, key: str, capacity: int, tokens: str, past_len: int, to: str, past: str | None = None) -> dict:
        """Starts sequences with the first `past_len` tokens, and saves the logits of the token after them."""
        all_tokens = np.load(tokens)
        running = Running(self.contender.start(len(all_tokens), capacity), all_tokens)
        if past is not None and self.contender.can_fill:
            with np.load(past) as arrays:
                self.contender.fill(
                    running.state, [np.ascontiguousarray(arrays[name][:, :past_len]) for name in arrays.files]
                )
            running.length = past_len
        elif past_len:
            self.contender.step(running.state, running.next(past_len))
        np.save(to, self.contender.step(running.state, running.next(1)))
        self.running[key] = running
        return {}

    def steps(self, key: str, count: int) -> dict:
        """Times decode steps one by one."""
        running = self.running[key]
        return {"ms": [_timed(lambda: self.contender.step(running.state, running.next(1))) for _ in range(count)]}

    def bare_steps(self, key: str, count: int) -> dict:
        """Times only the matrix products of decode steps."""
        return {"ms": [_timed(lambda: self.contender.step_bare(self.running[key].state)) for _ in range(count)]}

    def prefill(self, capacity: int, tokens: str) -> dict:
        """Times the prefill of these tokens into empty sequences."""
        all_tokens = np.load(tokens)
        state = self.contender.start(len(all_tokens), capacity)
        milliseconds = _timed(lambda: self.contender.step(state, all_tokens))
        self.contender.drop(state)
        return {"ms": [milliseconds]}

    def drop(self, key: str) -> dict:
        self.contender.drop(self.running.pop(key).state)
        return {}

    def decode(self, prompts: list[list[int]], count: int, to: str, forced: list[list[int]] | None = None) -> dict:
        """Decodes after each prompt: greedily, or with the tokens in `forced`.

        Saves tokens, int64 [prompts, count], and the logits before each token, float32 [prompts, count, V].
        """
        all_tokens, all_logits = [], []
        for row, prompt in enumerate(prompts):
            state, tokens, logits = self.contender.start(1, len(prompt) + count), [], []
            x = np.array([prompt])
            for position in range(count):
                logits.append(self.contender.step(state, x)[0])
                tokens.append(int(logits[-1].argmax()) if forced is None else forced[row][position])
                x = np.array([[tokens[-1]]])
            self.contender.drop(state)
            all_tokens.append(tokens)
            all_logits.append(np.stack(logits))
        np.savez(to, tokens=np.array(all_tokens), logits=np.stack(all_logits))
        return {}

    def save_past(self, tokens: str, to: str) -> dict:
        """Saves the keys and values of one sequence of tokens, int64 [P]; other contenders are filled with them."""
        np.savez(to, *self.contender.past_of(np.load(tokens)))
        return {}

    def memory(self, forget_peak: bool = False) -> dict:
        """Returns the resident bytes now and their peak; `forget_peak` first starts a new peak."""
        if forget_peak:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
        return {
            name: int(re.search(rf"{key}:\s+(\d+) kB", status)[1]) * 1024
            for name, key in (("resident", "VmRSS"), ("peak", "VmHWM"))
        }


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - started) / 1e6


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    module, options = sys.argv[1], json.loads(sys.argv[2])
    started = time.perf_counter()
    kind = importlib.import_module(f"benchmarks.contenders.{module}").Contender
    imported = time.perf_counter()
    worker = Worker(kind(**options))
    opened = {
        "import_seconds": imported - started,
        "open_seconds": time.perf_counter() - imported,
        "version": worker.contender.version,
    }
    limits = {"can_fill": kind.can_fill, "largest_batch": kind.largest_batch}
    print(json.dumps(opened | limits), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(worker, request.pop("do"))(**request)
        except Exception as error:  # the parent reports it with the contender's name
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
