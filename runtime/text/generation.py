"""The generation loop: it decodes tokens after a prompt until an end token, the wanted number, or a full cache."""

from __future__ import annotations

import contextlib
import dataclasses
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from exporter.common.errors import InputError
from exporter.common.plain_numbers import is_whole, plain
from runtime.inputs import as_array
from runtime.session import DecodeSession
from runtime.text.sampling import Sampler


@dataclass
class Generation:
    """The generation of one sequence. Iterate over it, once, for the new tokens.

    It takes a slot of the session when the iteration begins and releases it when the iteration ends. So several
    generations may use one session, one after the other or at the same time, and none sees another one's text.

    Attributes:
        session: a session on a whole model that is used with slots, and has a free one.
        prompt: token ids, at least one.
        max_new_tokens: most tokens to generate.
        sampler: chooses each token. A generation draws from the beginning of its seed, also where it is not the first.
        stopped_by: None while it runs, then "end token", "max_new_tokens" or "cache_capacity".
    """

    session: DecodeSession
    prompt: Sequence[int]
    max_new_tokens: int
    sampler: Sampler
    stopped_by: str | None = None
    _begun: bool = field(default=False, init=False, repr=False)

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
        """Returns an iterator over the new tokens, without the end token.

        Raises:
            InputError: the generation was iterated before. It would begin again, with other text where it draws.
        """
        if self._begun:
            raise InputError("generation: it was iterated already; keep its tokens in a list, or make another one")
        self._begun = True
        return self._tokens()

    def _tokens(self) -> Iterator[int]:
        session, sampler = self.session, dataclasses.replace(self.sampler)
        slot = session.acquire()
        try:
            logits = session.step({slot: as_array(self.prompt, "prompt")})[slot]
            for count in range(1, self.max_new_tokens + 1):
                token = sampler(logits)
                if token in session.manifest.end_token_ids:
                    self.stopped_by = "end token"
                    return
                yield token
                if count == self.max_new_tokens:
                    self.stopped_by = "max_new_tokens"
                    return
                if len(self.prompt) + count - 1 == session.cache_capacity:  # what the cache holds without this token
                    self.stopped_by = "cache_capacity"
                    return
                logits = session.step({slot: np.array([token], np.int64)})[slot]
        finally:
            with contextlib.suppress(InputError):  # the session was closed or reset meanwhile, and the slot with it
                session.release(slot)
