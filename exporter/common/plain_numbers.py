"""Numbers of other libraries as Python's own, so that a value is taken by what it means and not by its type."""

from __future__ import annotations

import numbers
import operator
from typing import Any


def plain(value: Any) -> Any:
    """Returns a single number or truth value as int, float or bool: 3 for np.int64(3), True for np.True_.

    Tensors and arrays without axes count as single numbers. Anything else is returned as it is, also a text of digits.
    Values are never rounded: 2.0 stays a float.
    """
    if isinstance(value, bool) or getattr(value, "shape", ()) != ():
        return value
    if str(getattr(value, "dtype", "")) in ("bool", "torch.bool"):
        return bool(value)
    try:
        return operator.index(value)
    except TypeError:
        return float(value) if isinstance(value, numbers.Real) else value


def is_whole(value: object) -> bool:
    """Whether a plain value is a whole number. True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def make_plain(record: Any, *names: str) -> None:
    """Replaces fields of a frozen dataclass by their plain values. `__post_init__` does it before its checks."""
    for name in names:
        object.__setattr__(record, name, plain(getattr(record, name)))
