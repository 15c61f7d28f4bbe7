"""Chooses the next token from logits: the likeliest one, or a random one. It knows numbers only, no model, no text."""

from __future__ import annotations

import numbers
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from exporter.common.errors import InputError
from exporter.common.plain_numbers import is_whole, plain

LARGEST_DRAWN_SEED = 2**32
_NEEDS_RANDOMNESS = ("top_k", "top_p", "min_p")
_NUMBERS = (*_NEEDS_RANDOMNESS, "temperature", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass
class TokenHistory:
    """The tokens of one sequence so far, as penalties need them.

    Attributes:
        seen: ids of the prompt and of the new tokens.
        counts: how often each new token came.
    """

    seen: set[int]
    counts: dict[int, int]

    @classmethod
    def after(cls, prompt: Iterable[int]) -> TokenHistory:
        """Returns the history of a sequence that has its prompt only."""
        return cls({int(token) for token in prompt}, {})

    def add(self, token: int) -> None:
        """Adds a new token."""
        self.seen.add(token)
        self.counts[token] = self.counts.get(token, 0) + 1


@dataclass
class Sampler:
    """Chooses one token from float32 logits [V]. The names are those of vLLM's SamplingParams.

    The logits are changed in this order: bias, penalties, temperature, top_k, top_p, min_p.

    Attributes:
        temperature: 0 always takes the likeliest token, and excludes top_k, top_p and min_p. None means 1.0 where one
            of these is given, else 0.
        top_k: draws from the k likeliest tokens only.
        top_p: of these, draws from the likeliest tokens whose probabilities first reach p (Holtzman et al., 2020).
        seed: seed for the random draws. The same seed and logits give the same tokens. None draws a seed, which is then
            here.
        min_p: of these, draws from the tokens that are at least p times as likely as the likeliest.
        repetition_penalty: divides the positive logits of tokens that the prompt or the text has, and multiplies the
            negative ones (Keskar et al., 2019); 1 changes nothing.
        presence_penalty, frequency_penalty: are subtracted from the logit of a token that the text has: the first once,
            the second once for each time. 0 changes nothing. (The definition in OpenAI's API.)
        logit_bias: token id → number that is added to its logit.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    _rng: np.random.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            setattr(self, name, plain(getattr(self, name)))
        if isinstance(self.logit_bias, Mapping):
            self.logit_bias = {plain(token): plain(bias) for token, bias in self.logit_bias.items()}
        given = [name for name in _NEEDS_RANDOMNESS if getattr(self, name) is not None]
        if self.temperature is None:
            self.temperature = 1.0 if given else 0.0
        self._check(given)
        if self.seed is None:
            self.seed = secrets.randbelow(LARGEST_DRAWN_SEED)
        self._rng = np.random.default_rng(self.seed)

    def _check(self, given: list[str]) -> None:
        """Checks every field.

        Args:
            given: the names of those fields that need a temperature above 0 and are given.
        """
        _expect(self, "temperature", "a finite number of at least 0", lambda x: 0 <= x < float("inf"))
        if self.top_k is not None and (not is_whole(self.top_k) or self.top_k < 1):
            raise InputError(f"top_k: got {self.top_k!r}, expected a whole number of at least 1")
        for name in ("top_p", "min_p"):
            if getattr(self, name) is not None:
                _expect(self, name, "a number above 0 and at most 1", lambda x: 0 < x <= 1)
        if self.seed is not None and (not is_whole(self.seed) or self.seed < 0):
            raise InputError(f"seed: got {self.seed!r}, expected a whole number of at least 0")
        _expect(self, "repetition_penalty", "a finite number above 0", lambda x: 0 < x < float("inf"))
        for name in ("presence_penalty", "frequency_penalty"):
            _expect(self, name, "a number from -2 to 2", lambda x: -2 <= x <= 2)
        if not isinstance(self.logit_bias, Mapping) or not all(
            is_whole(token) and token >= 0 and _is_number(bias) and abs(bias) < float("inf")
            for token, bias in self.logit_bias.items()
        ):
            raise InputError(f"logit_bias: got {self.logit_bias!r:.80}, expected finite numbers by token id")
        if given and self.temperature == 0:
            names = " and ".join([", ".join(given[:-1]), given[-1]] if given[1:] else given)
            raise InputError(
                f"temperature: got 0, which always takes the likeliest token, with {names}, which change "
                "nothing then; leave them out for greedy text, or give a temperature above 0"
            )

    @property
    def is_random(self) -> bool:
        """Whether the seed matters."""
        return self.temperature != 0

    @property
    def needs_history(self) -> bool:
        """Whether the choice depends on the tokens so far."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def __call__(self, logits: np.ndarray, history: TokenHistory | None = None) -> int:
        """Returns the id of the next token.

        Args:
            logits: float32 [V]; they stay as they are.
            history: the tokens so far, for the penalties; None where there are none.

        Raises:
            InputError: a token with a bias is not in the vocabulary.
        """
        assert self.temperature is not None, "__post_init__ replaces None"
        logits = self._adjusted(logits, history)
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
        if self.min_p is not None:
            kept = int(np.count_nonzero(probabilities >= self.min_p * probabilities[0]))
            order, probabilities = order[:kept], probabilities[:kept] / probabilities[:kept].sum()
        return int(self._rng.choice(order, p=probabilities))

    def _adjusted(self, logits: np.ndarray, history: TokenHistory | None) -> np.ndarray:
        """Returns the logits with bias and penalties."""
        if not self.needs_history or history is None:
            history = TokenHistory(set(), {})
        if not self.logit_bias and not history.seen:
            return logits
        logits = logits.copy()
        if self.logit_bias:
            tokens = np.array(list(self.logit_bias), np.int64)
            if tokens.max() >= len(logits):
                raise InputError(
                    f"logit_bias: got token {tokens.max()}, expected 0 to {len(logits) - 1}, the model's vocabulary"
                )
            logits[tokens] += np.array(list(self.logit_bias.values()), logits.dtype)
        if history.seen and self.repetition_penalty != 1:
            seen = np.fromiter(history.seen, np.int64)
            values = logits[seen]
            logits[seen] = np.where(values > 0, values / self.repetition_penalty, values * self.repetition_penalty)
        if history.counts:
            tokens = np.fromiter(history.counts, np.int64)
            counts = np.fromiter(history.counts.values(), logits.dtype)
            logits[tokens] -= self.presence_penalty + self.frequency_penalty * counts
        return logits


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of the model's own probabilities, before any setting of a sampler.

    Attributes:
        logprob: that of the chosen token.
        top: the likeliest tokens, each with its own, from the likeliest on.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, logits: np.ndarray, token: int, n_top: int) -> TokenLogprobs:
        """Returns those of a token and of the `n_top` likeliest ones under logits [V]."""
        values = logits.astype(np.float64)
        values -= values.max()
        values -= np.log(np.exp(values).sum())
        top = np.argsort(-values, kind="stable")[:n_top]
        return cls(float(values[token]), tuple((int(index), float(values[index])) for index in top))


def _expect(sampler: Sampler, name: str, expected: str, fits: Any) -> None:
    value = getattr(sampler, name)
    if not _is_number(value) or not fits(value):
        raise InputError(f"{name}: got {value!r}, expected {expected}")


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
