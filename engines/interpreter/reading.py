"""Reading a TensorRT layer's properties, and refusing what the interpreter does not know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from exporter.common.errors import BackendError


class Unsupported(BackendError):
    """The network has a layer, or a form of one, that the interpreter does not know; it never guesses."""


def refuse(layer: Any, got: str, expected: str) -> NoReturn:
    raise Unsupported(f"interpreter: {layer.name} has {got}, expected {expected}; it cannot vouch for this network")


def optional_dims(value: Sequence[int] | None) -> list[int] | None:
    """A layer's dimensions as numbers; None where they come from an input instead (TensorRT then gives None or a rank of −1)."""
    if value is None:
        return None
    try:
        return list(value)
    except ValueError:
        return None
