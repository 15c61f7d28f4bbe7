"""The interface of every contender. It needs only numpy, because contenders run in environments of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import numpy as np

State = TypeVar("State")


class CannotRun(RuntimeError):
    """This contender does not support the request; the message says why."""


class Base(ABC, Generic[State]):
    """One runtime that decodes a model. A state is a batch of sequences with their cache; several can exist at once.

    Attributes:
        version: names and versions of the software that runs it.
        can_fill: whether cached keys and values can be put in from outside; otherwise a past must be computed.
        largest_batch: largest number of sequences in one step; None where there is no limit.
    """

    version: str
    can_fill = True
    largest_batch: int | None = None

    @abstractmethod
    def start(self, batch: int, capacity: int) -> State:
        """Returns a state of `batch` empty sequences with room for `capacity` tokens each."""

    @abstractmethod
    def step(self, state: State, tokens: np.ndarray) -> np.ndarray:
        """Appends tokens, int64 [B, T], to the sequences; returns the logits of each last token, float32 [B, V]."""

    def fill(self, state: State, past: list[np.ndarray]) -> None:
        """Gives every sequence the same past.

        Args:
            state: the sequences, still empty.
            past: key and value of each layer in turn, float32 [K, P, D]; keys are rotated and in Meta's order.
        """
        raise CannotRun("its cache cannot be filled from outside")

    def drop(self, state: State) -> None:
        """Frees the memory of a state that Python does not free by itself."""

    def step_bare(self, state: State) -> None:
        """Runs only the matrix products of one decode step of this state."""
        raise CannotRun("its matrix products cannot be run alone")

    def past_of(self, tokens: np.ndarray) -> list[np.ndarray]:
        """Returns the argument of `fill` for the tokens of one sequence, int64 [P]."""
        raise CannotRun("its cache cannot be read")


def halves(keys: np.ndarray) -> np.ndarray:
    """Converts keys [..., D] from Meta's order of features (adjacent pairs) to Hugging Face's (two halves)."""
    return np.concatenate([keys[..., 0::2], keys[..., 1::2]], axis=-1)
