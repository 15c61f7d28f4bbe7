"""One text while it is generated: it takes the logits of each step and gives the token and the text."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from exporter.common.errors import InputError
from exporter.common.plain_numbers import is_whole, plain
from runtime.inputs import as_array
from runtime.text.sampling import Sampler, TokenHistory, TokenLogprobs
from runtime.text.stopping import CACHE_CAPACITY, MAX_NEW_TOKENS, STOP_STRING, StopRules, StopStrings
from runtime.text.stream import Detokenizer, TextStream

MOST_LOGPROBS = 100


@dataclass(frozen=True)
class Piece:
    """What one step adds to a text.

    Attributes:
        token: the new token; None where the step ended the text and added no token.
        text: the text that is now complete, possibly none.
        logprobs: of the new token, where they were asked for.
    """

    token: int | None
    text: str
    logprobs: TokenLogprobs | None = None


class GeneratedSequence:
    """One text while it is generated. It knows no session, so that any loop over any session can run it.

    Attributes:
        prompt: token ids, int64 [T].
        tokens: the new tokens, without a token that ended the text.
        text: their text, without a stop string and what is after it; empty without a tokenizer.
        logprobs: those of the new tokens, where they were asked for.
        stopped_by: None while it runs, then "end token", "stop token", "stop string", "max_new_tokens" or
            "cache_capacity".
        stop_string: the stop string that ended it, or None.
    """

    def __init__(
        self,
        prompt: Sequence[int] | np.ndarray,
        sampler: Sampler,
        rules: StopRules,
        end_token_ids: Sequence[int],
        tokenizer: Detokenizer | None = None,
        n_logprobs: int | None = None,
    ) -> None:
        """Begins a text.

        Args:
            prompt: token ids, at least one.
            sampler: chooses each token. The sequence draws from the beginning of its seed, and changes nothing in it.
            rules: when the text ends.
            end_token_ids: the model's own end tokens.
            tokenizer: makes the text; without one there is none, and no stop strings.
            n_logprobs: None for none, or how many of the likeliest tokens each step notes beside the chosen one.

        Raises:
            InputError: the prompt or `n_logprobs` is wrong, or there are stop strings and no tokenizer.
        """
        self.prompt, n_logprobs = _checked(prompt), plain(n_logprobs)
        self.tokens: list[int] = []
        self.text = ""
        self.logprobs: list[TokenLogprobs] | None = None if n_logprobs is None else []
        self.stopped_by: str | None = None
        if n_logprobs is not None and (not is_whole(n_logprobs) or not 0 <= n_logprobs <= MOST_LOGPROBS):
            raise InputError(f"logprobs: got {n_logprobs!r}, expected a whole number from 0 to {MOST_LOGPROBS}")
        if rules.stop and tokenizer is None:
            raise InputError(f"stop: got {rules.stop!r:.80} without a tokenizer, expected one to look for them")
        self._sampler, self._rules, self._end_token_ids = dataclasses.replace(sampler), rules, end_token_ids
        self._n_logprobs = n_logprobs
        self._history = TokenHistory.after(self.prompt.tolist()) if sampler.needs_history else None
        self._stream = TextStream(tokenizer, self.prompt.tolist()) if tokenizer is not None else None
        self._strings = StopStrings(rules.stop)

    @property
    def stop_string(self) -> str | None:
        return self._strings.found

    @property
    def next_tokens(self) -> np.ndarray:
        """The tokens of the next step, int64 [T]: at first the prompt, then the last new token."""
        return np.array(self.tokens[-1:], np.int64) if self.tokens else self.prompt

    def take(self, logits: np.ndarray, has_room: bool = True) -> Piece:
        """Adds the next token.

        Args:
            logits: float32 [V] of the last token.
            has_room: whether the cache has room for one more token after this step.

        Returns:
            The token and the text that is now complete. With the last one comes all the text that was kept back.
        """
        assert self.stopped_by is None, "a text that has ended takes no more tokens"
        token = self._sampler(logits, self._history)
        self.stopped_by = self._rules.reason(token, self._end_token_ids)
        if self.stopped_by:
            return Piece(None, self._add_text(None))
        logprobs = None
        if self.logprobs is not None and self._n_logprobs is not None:
            logprobs = TokenLogprobs.of(logits, token, self._n_logprobs)
            self.logprobs.append(logprobs)
        self.tokens.append(token)
        if self._history is not None:
            self._history.add(token)
        if len(self.tokens) == self._rules.max_new_tokens:
            self.stopped_by = MAX_NEW_TOKENS
        elif not has_room:
            self.stopped_by = CACHE_CAPACITY
        return Piece(token, self._add_text(token), logprobs)

    def _add_text(self, token: int | None) -> str:
        """Returns the text that is complete with a new token, or with none, and all of it where the text has ended."""
        if self._stream is None:
            return ""
        text = self._strings.push(self._stream.push(token)) if token is not None else ""
        if self.stopped_by and not self.stop_string:
            text += self._strings.push(self._stream.flush())
            if not self.stop_string:
                text += self._strings.flush()
        if self.stop_string:
            self.stopped_by = STOP_STRING
        self.text += text
        return text


def _checked(prompt: Sequence[int] | np.ndarray) -> np.ndarray:
    array = as_array(prompt, "prompt")
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InputError(f"prompt: got {reprlib.repr(prompt)}, expected token ids")
    if not array.size:
        raise InputError("prompt: it has no tokens, expected at least one")
    return array.astype(np.int64)
