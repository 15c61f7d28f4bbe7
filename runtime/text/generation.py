"""The generation loop: it decodes tokens after a prompt until an end token, the wanted number, or a full cache."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from exporter.common.errors import InputError
from exporter.common.plain_numbers import is_whole, plain
from runtime.inputs import as_array
from runtime.session import DecodeSession
from runtime.text.sampling import Sampler


@dataclass
class Generation:
    """The generation of one sequence. Iterate over it for the new tokens.

    Attributes:
        session: a new session on a whole model.
        prompt: token ids, at least one.
        max_new_tokens: most tokens to generate.
        sampler: chooses each token.
        stopped_by: None while it runs, then "end token", "max_new_tokens" or "cache_capacity".
    """

    session: DecodeSession
    prompt: Sequence[int]
    max_new_tokens: int
    sampler: Sampler
    stopped_by: str | None = None

    def __post_init__(self) -> None:
        if self.session.manifest.unit.kind != "model":
            raise InputError(f"generate: the bundle is a {self.session.manifest.unit}, expected a whole model")
        self.max_new_tokens = plain(self.max_new_tokens)
        if not is_whole(self.max_new_tokens) or self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens: got {self.max_new_tokens!r}, expected a whole number of at least 1")
        tokens = as_array(self.prompt, "prompt")
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise InputError(f"prompt: got {reprlib.repr(self.prompt)}, expected token ids")
        if not tokens.size:
            raise InputError("prompt: it has no tokens, expected at least one")
        if len(self.prompt) > self.session.cache_capacity:
            raise InputError(
                f"prompt: it has {len(self.prompt)} tokens and the cache holds {self.session.cache_capacity}; "
                "shorten it, or open the session with a larger cache_capacity"
            )

    def __iter__(self) -> Iterator[int]:
        """Yields each new token except the end token."""
        logits = self.session.prefill(as_array([self.prompt], "prompt"))
        for count in range(1, self.max_new_tokens + 1):
            token = self.sampler(logits[0])
            if token in self.session.manifest.end_token_ids:
                self.stopped_by = "end token"
                return
            yield token
            if count == self.max_new_tokens:
                self.stopped_by = "max_new_tokens"
                return
            if self.session.lengths[0] == self.session.cache_capacity:
                self.stopped_by = "cache_capacity"
                return
            logits = self.session.decode(np.array([token], np.int64))
