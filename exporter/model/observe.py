"""Observers of named values: called at every operation of a module with the graph's name of the value."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

See = Callable[[str, Tensor], Tensor]


def unseen(name: str, x: Tensor) -> Tensor:
    """The default observer of named values. Another one may record them, or put others in their place: what it returns is
    used from there on. The names are those of the graph's values, e.g. `blocks.3.mlp.gate_proj`."""
    return x


def prefixed(prefix: str, see: See) -> See:
    return lambda name, x: see(prefix + name, x)
