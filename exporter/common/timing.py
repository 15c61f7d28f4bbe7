"""Stages of the story that the commands tell with --verbose: what was done, and how long it took."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator


@contextlib.contextmanager
def timed(log: logging.Logger, message: str, *arguments: object) -> Iterator[None]:
    """Logs a stage with its seconds once it has ended well; a stage that fails is told by its error."""
    started = time.perf_counter()
    yield
    log.info(f"{message}: %.2f s", *arguments, time.perf_counter() - started)
