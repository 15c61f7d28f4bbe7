"""Plants faults in a session: interrupts anywhere in its code, and backends that fail before, within or after work."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import engines.running.tensorrt_stepper
import exporter.steppers.protocol
import runtime.session
from runtime import DecodeSession

WATCHED = (  # code that must survive an interrupt
    str(Path(runtime.session.__file__).parent),
    str(Path(exporter.steppers.protocol.__file__).parent),
    str(Path(engines.running.tensorrt_stepper.__file__).parent),
    contextlib.__file__,
)
ERRORS = (RuntimeError, MemoryError, KeyboardInterrupt)
PLACES = ("before", "within", "after")


@contextlib.contextmanager
def interrupt(place: int) -> Iterator[None]:
    """Raises KeyboardInterrupt in this thread at the given place in the session's own code, counted from 0.

    A place is an entry of a function or a return from C code. Python checks for signals there, and in loops.
    """
    left = place

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal left
        if frame.f_code.co_name == "<genexpr>":  # Python only prints an error raised while one is closed
            return
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(WATCHED):
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


class FaultyBackend:
    """Wraps a session's backend; makes those calls fail that a thread has armed."""

    def __init__(self, session: DecodeSession) -> None:
        self._armed = threading.local()
        cache, stepper = session._cache, session._stepper
        for name in ("zero", "copy", "write"):
            setattr(cache, name, self._failing(name, getattr(cache, name)))
        stepper.run = self._failing_run(stepper.run)

    @contextlib.contextmanager
    def armed(self, name: str, place: str, error: type[BaseException] | None) -> Iterator[None]:
        """Makes the next call of `name` in this thread fail; "run" without an error returns outputs that are NaN."""
        self._armed.fault = (name, place, error)
        try:
            yield
        finally:
            self._armed.fault = None

    def _take(self, name: str) -> tuple[str, type[BaseException] | None] | None:
        fault = getattr(self._armed, "fault", None)
        if fault is None or fault[0] != name:
            return None
        self._armed.fault = None
        return fault[1:]

    def _failing(self, name: str, call: Callable) -> Callable:
        def wrapper(*arguments: Any) -> None:
            fault = self._take(name)
            if fault is None:
                return call(*arguments)
            place, error = fault
            if place != "before":
                call(*arguments)
            raise error(f"planted: {name} failed {place} its work")

        return wrapper

    def _failing_run(self, run: Callable) -> Callable:
        def wrapper(feeds: dict, cache: Any, first_row: int = 0) -> dict:
            fault = self._take("run")
            if fault is None:
                return run(feeds, cache, first_row)
            place, error = fault
            if place == "before":
                raise error("planted: run failed before its work")
            outputs = run(feeds, cache, first_row)
            if place == "within":
                spoil(feeds, cache, first_row)
            if error is None:
                return {name: np.full_like(output, np.nan) for name, output in outputs.items()}
            raise error(f"planted: run failed {place} its work")

        return wrapper


def spoil(feeds: dict, cache: Any, first_row: int) -> None:
    """Writes NaN into half of the cache tensors where the step writes, as a backend can that dies within a step."""
    for row, start in enumerate(feeds["write_indices"].tolist(), first_row):
        stop = start + feeds["position_ids"].shape[1]
        tensors = cache.read(row, stop)
        for tensor in tensors[::2]:
            tensor[:, start:] = np.nan
        type(cache).write(cache, row, tensors)
