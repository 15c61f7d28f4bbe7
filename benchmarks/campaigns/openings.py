"""Opens and closes thousands of sessions in one process, also with bad bundles; checks files, threads and memory."""

from __future__ import annotations

import itertools
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.own.runtime_overhead import TINY
from exporter.bundle.bundle import Bundle
from exporter.bundle.manifest import DATA_FILE, GRAPH_FILE
from exporter.common.errors import CheckFailed, InputError
from exporter.model.weights import RandomWeights
from exporter.spec.feeds import step_feeds
from exporter.spec.graph_spec import GraphSpec
from exporter.spec.unit import Unit
from exporter.steppers.eager_stepper import EagerStepper
from runtime import DecodeSession

BACKENDS = ("onnxruntime", "eager")
CAPACITY, N_PROMPT = 32, 3
TOLERANCE = 1e-4  # absolute error of float32 logits and hidden states of a size near 1
BYTES_PER_OPENING = 4096  # more in the second half is a leak: the cache of one session has 24 KiB


class Broken(Exception):
    """An error of the caller while a session is open."""


def held() -> dict[str, int]:
    """Returns open files, threads and resident bytes of this process."""
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "resident_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    }


class Opening:
    """A bundle with its expected outputs, from the eager definition over the same weights."""

    def __init__(self, bundle: Bundle) -> None:
        self.folder, self._is_model = bundle.folder, bundle.manifest.unit.kind == "model"
        unit = Unit.parse("model", TINY, None, "all") if self._is_model else bundle.manifest.unit
        rng = np.random.default_rng(0)
        shape = (N_PROMPT + 1, TINY.hidden_size)
        self._x = (
            rng.integers(0, TINY.vocab_size, N_PROMPT + 1)
            if self._is_model
            else rng.standard_normal(shape).astype(np.float32)
        )
        reference = EagerStepper.from_weights(GraphSpec(TINY, unit, "fp32", CAPACITY), RandomWeights(TINY, 0))
        feeds = step_feeds(
            reference.contract.step_inputs[0].name, self._x[None], np.array([0]), np.array([N_PROMPT + 1])
        )
        self._expected = reference.run(feeds, reference.new_cache(1, CAPACITY))[
            reference.contract.step_outputs[0].name
        ][0]

    def open(self, backend: str, closed_by_an_error: bool) -> None:
        """Opens a session, prefills, decodes one token and closes it.

        Raises:
            CheckFailed: an output is wrong.
        """
        try:
            with DecodeSession.open(self.folder, backend, max_batch=2, cache_capacity=CAPACITY) as session:
                slot = session.acquire()
                for x, row in ((self._x[:N_PROMPT], N_PROMPT - 1), (self._x[N_PROMPT:], N_PROMPT)):
                    output = session.step({slot: x})[slot]
                    error = float(np.abs((output if self._is_model else output[-1]) - self._expected[row]).max())
                    if not error <= TOLERANCE:
                        off = f"off by {error:.1e}, expected at most {TOLERANCE:.0e}"
                        raise CheckFailed(f"openings: {backend}, token {row + 1}: {off}")
                if closed_by_an_error:
                    raise Broken
        except Broken:
            pass


def damaged(bundle: Bundle, name: str, folder: Path) -> Path:
    """Returns a copy of a bundle with one changed byte in the named file."""
    shutil.copytree(bundle.folder, folder)
    with (folder / name).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    return folder


def refused(*arguments: object, **named: object) -> Callable[[], None]:
    """Returns a call that opens a session and expects a refusal.

    Raises:
        CheckFailed: the call opened the session.
    """

    def call() -> None:
        try:
            DecodeSession.open(*arguments, **named).close()
        except InputError:
            return
        raise CheckFailed(f"openings: {arguments} was opened, expected to be refused")

    return call


def kinds_of_openings(bundles: list[Bundle], scratch: Path) -> dict[str, Callable[[], None]]:
    """Returns every kind of opening: name → call."""
    kinds: dict[str, Callable[[], None]] = {}
    for bundle in bundles:
        opening = Opening(bundle)
        for backend, by_error in itertools.product(BACKENDS, (False, True)):
            name = f"{bundle.manifest.unit} on {backend}{', closed by an error' if by_error else ''}"
            kinds[name] = lambda opening=opening, backend=backend, by_error=by_error: opening.open(backend, by_error)
    whole, size = bundles[0], {"max_batch": 2, "cache_capacity": CAPACITY}
    kinds |= {
        "refused: graph damaged": refused(damaged(whole, GRAPH_FILE, scratch / "graph"), "onnxruntime", **size),
        "refused: weights damaged": refused(
            damaged(whole, DATA_FILE, scratch / "data"), "onnxruntime", verify="full", **size
        ),
        "refused: no engine": refused(whole.folder, "tensorrt", **size),
        "refused: cache too long": refused(whole.folder, "onnxruntime", max_batch=2, cache_capacity=10**9),
        "refused: no such bundle": refused(scratch / "missing", "onnxruntime", **size),
    }
    return kinds


def open_and_close(bundles: list[Bundle], times: int, scratch: Path) -> dict:
    """Opens `times` times, all kinds in turn.

    Returns:
        The number of openings of each kind, and files, threads and memory before them and after each tenth of them.

    Raises:
        CheckFailed: an output is wrong, a bad bundle was opened, or files, threads or memory grew.
    """
    kinds, counts = kinds_of_openings(bundles, scratch), Counter()
    before, tenths = held(), []
    for number, name in zip(range(1, times + 1), itertools.cycle(kinds), strict=False):
        kinds[name]()
        counts[name] += 1
        if number % (times // 10) == 0:
            tenths.append(held())
    check_nothing_left(tenths, times)
    return {"times": times, "kinds": dict(counts), "held_before": before, "held_each_tenth": tenths}


def check_nothing_left(tenths: list[dict[str, int]], times: int) -> None:
    """Checks that files, threads and memory do not grow.

    Files and threads at the end are compared with those after the first tenth, when everything is loaded. Memory is
    compared with the middle.

    Raises:
        CheckFailed: something grew; the message says what and by how much.
    """
    for name in ("descriptors", "threads"):
        if tenths[-1][name] > tenths[0][name]:
            grown = f"{name} grew from {tenths[0][name]} to {tenths[-1][name]}"
            raise CheckFailed(f"openings: {grown}, expected no more than at the start")
    grown = (tenths[-1]["resident_bytes"] - tenths[4]["resident_bytes"]) / (times / 2)
    if times >= 1000 and grown > BYTES_PER_OPENING:  # in shorter runs allocators still warm up
        raise CheckFailed(
            f"openings: memory grew by {grown:,.0f} bytes an opening, expected at most {BYTES_PER_OPENING:,}"
        )
