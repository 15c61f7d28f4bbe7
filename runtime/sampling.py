"""Choosing the next token from logits: greedy, or temperature with top-k and top-p, under a seed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from exporter.errors import InputError


@dataclass
class Sampler:
    """Draws one token from float32 logits [V].

    Attributes:
        temperature: 0 is greedy; None means greedy, or 1.0 where top_k or top_p is given.
        top_k: keep only the k likeliest tokens.
        top_p: then keep the likeliest tokens whose probabilities first reach p (Holtzman et al., 2020).
        seed: the same seed and logits give the same tokens.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    _rng: np.random.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.temperature is None:
            self.temperature = 0.0 if self.top_k is None and self.top_p is None else 1.0
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"temperature: got {self.temperature}, expected a finite number of at least 0")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k: got {self.top_k}, expected at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top_p: got {self.top_p}, expected above 0 and at most 1")
        if self.seed < 0:
            raise InputError(f"seed: got {self.seed}, expected 0 or more")
        self._rng = np.random.default_rng(self.seed)

    def __call__(self, logits: np.ndarray) -> int:
        """The next token's id."""
        assert self.temperature is not None, "settled in __post_init__"
        if self.temperature == 0:
            return int(logits.argmax())
        order = np.argsort(-logits, kind="stable")[: self.top_k]
        below_best = logits[order].astype(np.float64) - float(logits[order[0]])
        with np.errstate(over="ignore"):  # a tiny temperature takes everything but the best to -inf
            probabilities = np.exp(below_best / self.temperature)
        probabilities /= probabilities.sum()
        if self.top_p is not None:
            kept = int(np.searchsorted(np.cumsum(probabilities), self.top_p)) + 1
            order, probabilities = order[:kept], probabilities[:kept] / probabilities[:kept].sum()
        return int(self._rng.choice(order, p=probabilities))
