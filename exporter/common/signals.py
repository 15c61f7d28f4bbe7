"""Signals that ask this process to end."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """A signal asked this process to end.

    Attributes:
        number: the signal's.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def on_signal(handler: Callable[[int], None]) -> Iterator[None]:
    """While entered, signals that ask this process to end call the handler with their number; ignored ones (nohup) stay so."""
    previous = {}
    if threading.current_thread() is threading.main_thread():  # only there can signals be handled
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                previous[number] = signal.signal(number, lambda number, _: handler(number))
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
