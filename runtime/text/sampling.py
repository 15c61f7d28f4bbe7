"""Chooses the next token from logits: the likeliest one, or a random one by temperature, top-k and top-p."""

from __future__ import annotations

import numbers
from dataclasses import dataclass, field

import numpy as np

from exporter.common.errors import InputError
from exporter.common.plain_numbers import is_whole, plain


@dataclass
class Sampler:
    """Chooses one token from float32 logits [V].

    Attributes:
        temperature: 0 always takes the likeliest token, and excludes top_k and top_p. None means 1.0 where one of these
            is given, else 0.
        top_k: draws from the k likeliest tokens only.
        top_p: of these, draws from the likeliest tokens whose probabilities first reach p (Holtzman et al., 2020).
        seed: seed for the random draws. The same seed and logits give the same tokens.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    _rng: np.random.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.temperature, self.top_k = plain(self.temperature), plain(self.top_k)
        self.top_p, self.seed = plain(self.top_p), plain(self.seed)
        given = {name: value for name, value in (("top_k", self.top_k), ("top_p", self.top_p)) if value is not None}
        if self.temperature is None:
            self.temperature = 1.0 if given else 0.0
        if not _is_number(self.temperature) or not 0 <= self.temperature < float("inf"):
            raise InputError(f"temperature: got {self.temperature!r}, expected a finite number of at least 0")
        if self.top_k is not None and (not is_whole(self.top_k) or self.top_k < 1):
            raise InputError(f"top_k: got {self.top_k!r}, expected a whole number of at least 1")
        if self.top_p is not None and (not _is_number(self.top_p) or not 0 < self.top_p <= 1):
            raise InputError(f"top_p: got {self.top_p!r}, expected a number above 0 and at most 1")
        if not is_whole(self.seed) or self.seed < 0:
            raise InputError(f"seed: got {self.seed!r}, expected a whole number of at least 0")
        if given and self.temperature == 0:
            raise InputError(
                f"temperature: got 0, which always takes the likeliest token, with {' and '.join(given)}, which change "
                "nothing then; leave them out for greedy text, or give a temperature above 0"
            )
        self._rng = np.random.default_rng(self.seed)

    def __call__(self, logits: np.ndarray) -> int:
        """Returns the id of the next token."""
        assert self.temperature is not None, "__post_init__ replaces None"
        if self.temperature == 0:
            return int(logits.argmax())
        order = np.argsort(-logits, kind="stable")[: self.top_k]
        below_best = logits[order].astype(np.float64) - float(logits[order[0]])
        with np.errstate(over="ignore"):  # a tiny temperature divides all but the best to -inf
            probabilities = np.exp(below_best / self.temperature)
        probabilities /= probabilities.sum()
        if self.top_p is not None:
            kept = int(np.searchsorted(np.cumsum(probabilities), self.top_p)) + 1
            order, probabilities = order[:kept], probabilities[:kept] / probabilities[:kept].sum()
        return int(self._rng.choice(order, p=probabilities))


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
