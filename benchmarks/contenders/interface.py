"""What every contender offers. Nothing here needs more than numpy: contenders live in environments of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import numpy as np

State = TypeVar("State")


class CannotRun(RuntimeError):
    """This contender has no way to do what was asked; the message says why."""


class Base(ABC, Generic[State]):
    """One way of decoding a model. A state is a batch of sequences and what they have cached; there may be several at once.

    Attributes:
        version: of the software that runs it, in words.
        can_fill: whether cached keys and values can be put in from outside; where not, a past has to be computed.
        largest_batch: the most sequences it decodes side by side; None where there is no limit.
    """

    version: str
    can_fill = True
    largest_batch: int | None = None

    @abstractmethod
    def start(self, batch: int, capacity: int) -> State:
        """Empty sequences with room for `capacity` tokens each."""

    @abstractmethod
    def step(self, state: State, tokens: np.ndarray) -> np.ndarray:
        """Appends int64 [B, T] to the sequences; returns float32 [B, V], the logits of each one's last token."""

    def fill(self, state: State, past: list[np.ndarray]) -> None:
        """Gives every sequence the same past: key and value of each layer, float32 [K, P, D], keys rotated in Meta's order."""
        raise CannotRun("its cache cannot be filled from outside")

    def drop(self, state: State) -> None:
        """Frees a state. What only Python holds goes by itself."""

    def step_bare(self, state: State) -> None:
        """Runs only the matrix products of one decode step of this state."""
        raise CannotRun("its matrix products cannot be run alone")

    def past_of(self, tokens: np.ndarray) -> list[np.ndarray]:
        """What `fill` takes, for int64 [P] tokens of one sequence."""
        raise CannotRun("its cache cannot be read")


def halves(keys: np.ndarray) -> np.ndarray:
    """Keys [..., D] from Meta's order of features (adjacent pairs) into Hugging Face's (first and second half)."""
    return np.concatenate([keys[..., 0::2], keys[..., 1::2]], axis=-1)
