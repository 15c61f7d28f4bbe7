"""One call at a time for an object that threads share.

Calls of several threads wait for one another. A call from inside another call of the same thread is refused, because
waiting there would never end.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from exporter.common.errors import InputError


class TakesTurns:
    """Base class of an object whose methods are marked with `in_turn`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._in_call = False


def in_turn(method: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a method that waits until no other thread is inside a marked method of the same object.

    Raises:
        InputError: the same thread is already inside a marked method. A signal handler can cause this.
    """

    @functools.wraps(method)
    def waiting(self: TakesTurns, *arguments: Any, **options: Any) -> Any:
        with self._lock:  # re-entrant, so that the same thread reaches the check below
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
