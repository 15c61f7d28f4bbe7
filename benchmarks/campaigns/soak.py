"""Soaks sessions: threads feed sequences to their slots, faults happen at random, and every output is checked.

python -m benchmarks.campaigns.soak [--minutes N] [--opens N] [--seed N]      writes benchmarks/records/soak.json

With 0 minutes or 0 opens that part of the record stays as it is. Each part has the version of the code that it ran.

Sequences join (new, forked, imported), decode in one batch with others, are exported, cancelled and released.
Steps fail before, within and after the backend's work, return outputs that are not finite, and are interrupted anywhere
in the session's own code. The outputs of every sequence are compared with the eager definition over all of its tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import queue
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.campaigns.faults import ERRORS, PLACES, FaultyBackend, interrupt
from benchmarks.campaigns.openings import held, open_and_close
from benchmarks.machine.description import machine, stamp
from benchmarks.own.runtime_overhead import TINY, export
from exporter.bundle.bundle import Bundle
from exporter.common.errors import CheckFailed, InputError, NumericalError
from exporter.model.weights import RandomWeights
from exporter.spec.feeds import step_feeds
from exporter.spec.graph_spec import GraphSpec
from exporter.spec.unit import Unit
from exporter.steppers.eager_stepper import EagerStepper
from runtime import DecodeSession
from runtime.session import SlotState

RECORD = Path(__file__).parents[1] / "records" / "soak.json"
MAX_BATCH, CAPACITY, CLIENTS = 6, 64, 8  # more clients than rows, so that some find no free row
TOLERANCE = 1e-4  # absolute error of float32 logits and hidden states of a size near 1
PATIENCE_S = 120  # seconds without a step that count as a deadlock
N_SAMPLES = 20  # samples of memory in a run


@dataclass
class Sequence:
    """One sequence: its tokens or hidden states, and the outputs that the session returned."""

    slot: int
    given: list[np.ndarray] = field(default_factory=list)
    outputs: dict[int, np.ndarray] = field(default_factory=dict)  # length → output of the last token

    @property
    def length(self) -> int:
        return len(self.given)


class Server:
    """A session with slots, a thread that batches the clients' tokens into steps, and clients with a queue of requests.

    Attributes:
        counts: event → number of times that it happened.
        max_error: largest difference from eager so far.
        failures: errors that should not have happened.
    """

    def __init__(self, session: DecodeSession, seed: int) -> None:
        self.session, self.seed = session, seed
        self.is_model = session.manifest.unit.kind == "model"
        unit = Unit.parse("model", TINY, None, "all") if self.is_model else session.manifest.unit
        self._reference = EagerStepper.from_weights(GraphSpec(TINY, unit, "fp32", CAPACITY), RandomWeights(TINY, 0))
        self._checking = threading.Lock()
        self._backend = FaultyBackend(session)
        self._asked: queue.Queue = queue.Queue()  # (slot, inputs, future)
        self._requests: queue.Queue = queue.Queue(maxsize=2 * CLIENTS)
        self._states: list[tuple[SlotState, list[np.ndarray]]] = []
        self.counts: Counter = Counter()
        self.max_error = 0.0
        self.failures: list[BaseException] = []

    # --- the thread that steps ---------------------------------------------------------------------------------

    def _step_for_ever(self) -> None:
        rng = np.random.default_rng((self.seed, 1))
        while (asked := self._asked.get()) is not None:
            batch = [asked]
            while len(batch) < MAX_BATCH and not self._asked.empty():
                batch.append(self._asked.get())
            if None in batch:
                self._asked.put(None)
                batch.remove(None)
            try:
                self._step(batch, rng)
            except BaseException as error:
                for _, _, future in batch:
                    future.set_exception(error)

    def _step(self, batch: list[tuple[int, np.ndarray, Future]], rng: np.random.Generator) -> None:
        """Runs one step for some slots, with a fault at random.

        Each future gets its output, or "again" where the step failed, or "counted" where only the output is lost.
        """
        lengths = self.session.lengths
        outputs = self._attempt({slot: x for slot, x, _ in batch}, rng)
        after = self.session.lengths
        counted = {after[slot] == lengths[slot] + len(x) for slot, x, _ in batch}
        if len(counted) != 1 or (outputs is not None and counted != {True}):
            raise CheckFailed(f"soak: a step of {len(batch)} slots counted for {counted}, expected all of them or none")
        self.counts["steps" if counted == {True} else "steps broken off"] += 1
        for slot, _, future in batch:
            future.set_result(outputs[slot] if outputs else "counted" if counted == {True} else "again")

    def _attempt(self, inputs: dict[int, np.ndarray], rng: np.random.Generator) -> dict[int, np.ndarray] | None:
        kind, error, place = rng.random(), ERRORS[rng.integers(3)], PLACES[rng.integers(3)]
        try:
            if kind < 0.03:
                with self._backend.armed("run", place, error):
                    self.session.step(inputs)
            elif kind < 0.04:
                with self._backend.armed("run", "after", None):
                    self.session.step(inputs)
            elif kind < 0.06:
                with interrupt(int(rng.integers(150))):
                    return self.session.step(inputs)
            else:
                return self.session.step(inputs)
        except NumericalError:
            self.counts["fault: outputs not finite"] += 1
        except ERRORS as error:
            fault = "interrupt in the session" if kind >= 0.04 else f"{type(error).__name__} {place} a run"
            self.counts[f"fault: {fault}"] += 1
        return None

    # --- clients -----------------------------------------------------------------------------------------------

    def _serve_for_ever(self) -> None:
        try:
            while (number := self._requests.get()) is not None:
                self._serve(np.random.default_rng((self.seed, 2, number)))
                self.counts["requests"] += 1
        except BaseException as error:
            self.failures.append(error)

    def _serve(self, rng: np.random.Generator) -> None:
        """Serves one request: a sequence that joins, decodes and leaves, at times with a fork of it."""
        sequences = [self._join(rng)]
        stop = int(rng.integers(2, CAPACITY + 1))
        cancelled = rng.random() < 0.15
        while sequences:
            sequence = sequences[rng.integers(len(sequences))]
            self._advance(sequence, rng)
            self._do_something_else(sequence, sequences, rng)
            if sequence.length >= stop or (cancelled and rng.random() < 0.2):
                self.session.release(sequence.slot)
                sequences.remove(sequence)
                self._check(sequence)
                self.counts["cancelled" if sequence.length < stop else "finished"] += 1

    def _join(self, rng: np.random.Generator) -> Sequence:
        while True:
            states, given = list(self._states), []
            call = self.session.acquire
            if states and rng.random() < 0.2:
                state, given = states[rng.integers(len(states))]
                call = lambda state=state: self.session.import_slot(state)  # noqa: E731
            slot = self._take(call, rng)
            if slot is not None:
                self.counts["imports" if given else "joins"] += 1
                return Sequence(slot, list(given))
            time.sleep(0.001)

    def _take(self, call: Callable[[], int], rng: np.random.Generator) -> int | None:
        """Takes a slot. Returns None where all are taken or where the cache's memory fails; no slot is taken then."""
        name = ("zero", "copy", "write")[rng.integers(3)]
        try:
            if rng.random() < 0.05:
                with self._backend.armed(name, PLACES[rng.integers(3)], MemoryError):
                    return call()
            return call()
        except MemoryError:
            self.counts[f"fault: cache {name} of a slot that joins"] += 1
        except InputError as error:
            if "are taken" not in str(error):
                raise
            self.counts["refused: all taken"] += 1
        return None

    def _draw(self, n_tokens: int, rng: np.random.Generator) -> np.ndarray:
        if self.is_model:
            return rng.integers(0, TINY.vocab_size, n_tokens)
        return rng.standard_normal((n_tokens, TINY.hidden_size)).astype(np.float32)

    def _advance(self, sequence: Sequence, rng: np.random.Generator) -> None:
        """Gives a sequence its next tokens, again until they count; often its own most likely token, as in decoding."""
        room = CAPACITY - sequence.length
        width = 1 if rng.random() < 0.8 and sequence.length else int(rng.integers(1, min(room, 16) + 1))
        x = self._draw(width, rng)
        last = sequence.outputs.get(sequence.length)
        if self.is_model and last is not None and rng.random() < 0.7:
            x[0] = last.argmax()
        while True:
            future: Future = Future()
            self._asked.put((sequence.slot, x, future))
            result = future.result(timeout=PATIENCE_S)
            if isinstance(result, str) and result == "again":
                continue
            sequence.given.extend(x)
            if not isinstance(result, str):
                sequence.outputs[sequence.length] = result if self.is_model else result[-1]
            return

    def _do_something_else(self, sequence: Sequence, sequences: list[Sequence], rng: np.random.Generator) -> None:
        chance = rng.random()
        if chance < 0.05:
            self._send_bad_request(sequence, rng)
        elif chance < 0.08 and len(sequences) == 1 and sequence.length < CAPACITY:
            slot = self._take(lambda: self.session.fork(sequence.slot), rng)
            if slot is not None:
                sequences.append(Sequence(slot, list(sequence.given), dict(sequence.outputs)))
                self.counts["forks"] += 1
        elif chance < 0.10 and sequence.length < CAPACITY:
            self._states[:] = [*self._states[-7:], (self.session.export_slot(sequence.slot), list(sequence.given))]
            self.counts["exports"] += 1

    def _send_bad_request(self, sequence: Sequence, rng: np.random.Generator) -> None:
        """Sends a step that must be refused and change nothing, while other clients' steps run."""
        slot, good = sequence.slot, self._draw(1, rng)
        with_nan = np.full((1, TINY.hidden_size), np.nan, np.float32)
        kinds = {
            "wrong dtype": {slot: self._draw(1, rng).astype(np.float16)},
            "wrong shape": {slot: self._draw(1, rng)[None]},
            "too long": {slot: self._draw(CAPACITY - sequence.length + 1, rng)},
            "unknown slot": {slot: good, 10**9: good},
            "no tokens": {slot: good[:0]},
            **(
                {"token out of range": {slot: np.array([1, TINY.vocab_size])}}
                if self.is_model
                else {"NaN hidden states": {slot: with_nan}}
            ),
        }
        kind = sorted(kinds)[rng.integers(len(kinds))]
        if kind == "NaN hidden states" and sequence.length == CAPACITY:
            return
        try:
            self.session.step(kinds[kind])
        except (InputError, NumericalError):
            self.counts[f"refused: {kind}"] += 1
            return
        raise CheckFailed(f"soak: {kind} was accepted, expected a refusal")

    def _check(self, sequence: Sequence) -> None:
        """Compares every output of a sequence with the eager definition over all of its tokens.

        Raises:
            CheckFailed: a token or an output is wrong.
        """
        x = np.stack(sequence.given)[None]
        feeds = step_feeds(self._reference.contract.step_inputs[0].name, x, np.array([0]), np.array([sequence.length]))
        with self._checking:
            expected = self._reference.run(feeds, self._reference.new_cache(1, CAPACITY))[
                self._reference.contract.step_outputs[0].name
            ][0]
        for length, output in sequence.outputs.items():
            wanted = expected[length - 1]
            error = float(np.abs(output - wanted).max())
            self.max_error = max(self.max_error, error)
            if not error <= TOLERANCE:
                off = f"off by {error:.1e}, expected at most {TOLERANCE:.0e}"
                raise CheckFailed(f"soak: token {length} of slot {sequence.slot} is {off}")
            if self.is_model and output.argmax() != wanted.argmax():
                margin = wanted.max() - wanted[output.argmax()]
                if margin > 2 * error:
                    raise CheckFailed(
                        f"soak: token {length} of slot {sequence.slot} is {output.argmax()}, expected {wanted.argmax()}"
                    )
                self.counts["ties within the error"] += 1
            self.counts["outputs checked"] += 1

    # --- one run -----------------------------------------------------------------------------------------------

    def run(self, go_on: Callable[[int], bool], watch: Callable[[], None] = lambda: None) -> None:
        """Serves requests number 0, 1, 2, … while `go_on(number)`; checks at the end that every slot is free.

        Raises:
            CheckFailed: a wrong token, a lost slot, a deadlock.
        """
        stepping = threading.Thread(target=self._step_for_ever, daemon=True)
        clients = [threading.Thread(target=self._serve_for_ever, daemon=True) for _ in range(CLIENTS)]
        for thread in (stepping, *clients):
            thread.start()
        number = 0
        while go_on(number) and not self.failures:
            with contextlib.suppress(queue.Full):  # all clients may have failed
                self._requests.put(number, timeout=1)
                number += 1
            watch()
        self._end(stepping, clients)
        if self.failures:
            raise CheckFailed(f"soak: {self.failures[0]!r}") from self.failures[0]
        if any(thread.is_alive() for thread in (stepping, *clients)):
            faulthandler.dump_traceback(file=sys.__stderr__)
            raise CheckFailed(f"soak: deadlock: threads still run after {PATIENCE_S} s; their stacks are above")
        if dict(self.session.lengths) != {} or len([self.session.acquire() for _ in range(MAX_BATCH)]) != MAX_BATCH:
            raise CheckFailed(f"soak: slots are lost: {self.session.lengths}")

    def _end(self, stepping: threading.Thread, clients: list[threading.Thread]) -> None:
        """Waits for the clients to finish their requests, then ends the thread that steps."""
        deadline = time.monotonic() + PATIENCE_S
        for client in clients:
            while client.is_alive() and not self.failures and time.monotonic() < deadline:
                with contextlib.suppress(queue.Full):
                    self._requests.put(None, timeout=0.1)
                client.join(0.1)
        self._asked.put(None)
        stepping.join(PATIENCE_S)


# --- memory of a process ---------------------------------------------------------------------------------------


def slope_per_hour(samples: list[tuple[float, int]]) -> float:
    """Returns bytes per hour from samples (seconds, bytes), by least squares over the second half.

    In the first half caches and arenas still warm up.
    """
    seconds, values = np.array(samples[len(samples) // 2 :], float).T
    return float(np.polyfit(seconds, values, 1)[0] * 3600)


def serve_for(bundle: Bundle, seconds: float, seed: int) -> dict:
    """Soaks one session for `seconds`; returns counts, errors, memory, and files and threads before and after."""
    samples: list[tuple[float, int]] = []
    with DecodeSession.open(bundle.folder, "onnxruntime", max_batch=MAX_BATCH, cache_capacity=CAPACITY) as session:
        server, before, started = Server(session, seed), held(), time.perf_counter()

        def watch() -> None:
            elapsed = time.perf_counter() - started
            if elapsed >= seconds * len(samples) / N_SAMPLES:
                samples.append((elapsed, held()["resident_bytes"]))

        server.run(lambda _: time.perf_counter() - started < seconds, watch)
        elapsed = time.perf_counter() - started
    return {
        "unit": str(bundle.manifest.unit),
        "seconds": round(elapsed, 1),
        "events": dict(sorted(server.counts.items())),
        "faults_injected": sum(n for name, n in server.counts.items() if name.startswith("fault")),
        "max_error": server.max_error,
        "held_before": before,
        "held_after": held(),
        "resident_bytes_samples": [n_bytes for _, n_bytes in samples],
        "resident_slope_bytes_per_hour": round(slope_per_hour(samples)),
    }


def main() -> None:
    """Soaks a model and a stack, opens and closes sessions, prints and writes the record."""
    prog, description = "python -m benchmarks.campaigns.soak", __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog=prog, description=description)
    minutes = "minutes of serving, shared by a model and a stack (default %(default)s)"
    parser.add_argument("--minutes", type=float, default=10, metavar="N", help=minutes)
    opens = "number of sessions to open and close (default %(default)s)"
    parser.add_argument("--opens", type=int, default=3000, metavar="N", help=opens)
    seed = "seed for the traffic (default %(default)s)"
    parser.add_argument("--seed", type=int, default=0, metavar="N", help=seed)
    arguments = parser.parse_args()
    faulthandler.enable()
    # The stamp is taken before the run, because the working tree may change during it.
    origin = {**stamp(), "machine": machine(), "load_average_before": os.getloadavg()[0]}
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        model, stack = export("model", Path(scratch)), export("stack", Path(scratch))
        if arguments.minutes:
            shares = ((model, 0.7), (stack, 0.3))
            served = [serve_for(each, arguments.minutes * 60 * share, arguments.seed) for each, share in shares]
            sizes = {"clients": CLIENTS, "max_batch": MAX_BATCH, "cache_capacity": CAPACITY, "tolerance": TOLERANCE}
            record["serving"] = {**origin, "seed": arguments.seed, **sizes, "sessions": served}
        if arguments.opens:
            record["opening"] = {**origin, **open_and_close([model, stack], arguments.opens, Path(scratch))}
    print(json.dumps(record, indent=1))
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
