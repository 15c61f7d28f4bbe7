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
        number: number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def on_signal(handler: Callable[[int], None]) -> Iterator[None]:
    """Calls the handler with the number of each signal that asks this process to end.

    Signals that are ignored, as under nohup, stay ignored. The previous handlers return at the end.
    """
    previous = {}
    if threading.current_thread() is threading.main_thread():  # Python handles signals only there
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                previous[number] = signal.signal(number, lambda number, _: handler(number))
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
