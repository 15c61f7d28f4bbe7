"""Logs the stages of a run and how long each took. The commands print this log with --verbose."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator


@contextlib.contextmanager
def timed(log: logging.Logger, message: str, *arguments: object) -> Iterator[None]:
    """Logs a stage with its seconds when it has ended without an exception."""
    started = time.perf_counter()
    yield
    log.info(f"{message}: %.2f s", *arguments, time.perf_counter() - started)
