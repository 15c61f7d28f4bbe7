"""One call at a time: threads that share an object take turns, and a call from inside another one is refused, not deadlocked."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from exporter.common.errors import InputError


class TakesTurns:
    """What an object needs whose methods are marked `in_turn`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._in_call = False


def in_turn(method: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a method that waits until no other thread is inside a marked method of the same object.

    Raises:
        InputError: the same thread is inside of one already, as a signal handler may be; to wait would be to wait for ever.
    """

    @functools.wraps(method)
    def waiting(self: TakesTurns, *arguments: Any, **options: Any) -> Any:
        with self._lock:  # re-entrant, so that the check below is reached
            if self._in_call:
                raise InputError(
                    f"session: got {method.__name__} from inside another of its calls, such as a signal handler's; "
                    "nothing was done; call it when that one has returned"
                )
            self._in_call = True
            try:
                return method(self, *arguments, **options)
            finally:
                self._in_call = False

    return waiting
