"""Observers of named values: a module calls them at every operation, with the name that the graph gives the value."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

See = Callable[[str, Tensor], Tensor]


def unseen(name: str, x: Tensor) -> Tensor:
    """The default observer: returns the value unchanged. Another observer may record or replace it.

    Args:
        name: name of the value in the graph, such as `blocks.3.mlp.gate_proj`.
        x: the value. The returned tensor is used from there on.
    """
    return x


def prefixed(prefix: str, see: See) -> See:
    """An observer that calls `see` with a prefix before every name."""
    return lambda name, x: see(prefix + name, x)
