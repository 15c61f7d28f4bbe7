"""Reads properties of TensorRT layers, and refuses layers that the interpreter does not know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from exporter.common.errors import BackendError


class Unsupported(BackendError):
    """The network has a layer, or a form of a layer, that the interpreter does not know."""


def refuse(layer: Any, got: str, expected: str) -> NoReturn:
    """Raises `Unsupported` for a layer."""
    raise Unsupported(f"interpreter: {layer.name} has {got}, expected {expected}; it cannot run this network")


def optional_dims(value: Sequence[int] | None) -> list[int] | None:
    """A layer's dimensions as numbers; None where an input has them. TensorRT then gives None or a rank of −1."""
    if value is None:
        return None
    try:
        return list(value)
    except ValueError:
        return None
