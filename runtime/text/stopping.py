"""When a text ends: a stop string is found also where it is spread over several tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from exporter.common.errors import InputError
from exporter.common.plain_numbers import is_whole, make_plain, plain

END_TOKEN, STOP_TOKEN, STOP_STRING = "end token", "stop token", "stop string"
MAX_NEW_TOKENS, CACHE_CAPACITY = "max_new_tokens", "cache_capacity"


@dataclass(frozen=True)
class StopRules:
    """When the text of one sequence ends. The names are those of vLLM's SamplingParams.

    Attributes:
        max_new_tokens: most tokens to generate.
        stop: strings that end the text. The text ends before them.
        stop_token_ids: tokens that end the text, besides the model's own end tokens.
        ignore_eos: whether the model's end tokens are tokens like others.
    """

    max_new_tokens: int
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        make_plain(self, "max_new_tokens")
        if not is_whole(self.max_new_tokens) or self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens: got {self.max_new_tokens!r}, expected a whole number of at least 1")
        if not isinstance(self.stop, Sequence) or isinstance(self.stop, str) or not all(map(_is_stop, self.stop)):
            raise InputError(f"stop: got {self.stop!r:.80}, expected a list of texts of at least one character")
        tokens = self.stop_token_ids
        if not isinstance(tokens, Sequence) or not all(is_whole(plain(token)) and token >= 0 for token in tokens):
            raise InputError(f"stop_token_ids: got {tokens!r:.80}, expected a list of token ids")
        object.__setattr__(self, "stop_token_ids", tuple(map(plain, tokens)))

    def reason(self, token: int, end_token_ids: Sequence[int]) -> str | None:
        """Returns why a token ends the text, or None."""
        if not self.ignore_eos and token in end_token_ids:
            return END_TOKEN
        return STOP_TOKEN if token in self.stop_token_ids else None


class StopStrings:
    """Looks for stop strings in a text that comes in pieces.

    Attributes:
        found: the stop string that ended the text, or None.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.found: str | None = None
        self._stop = tuple(stop)
        self._held = ""  # the end of the text, which may be the beginning of a stop string

    def push(self, piece: str) -> str:
        """Adds a piece and returns the text that is before any stop string for sure. Nothing comes after one."""
        if self.found is not None:
            return ""
        text = self._held + piece
        places = [(text.index(stop), -len(stop), stop) for stop in self._stop if stop in text]
        if places:
            start, _, self.found = min(places)
            self._held = ""
            return text[:start]
        n_held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def flush(self) -> str:
        """Returns the text that was kept back, when no more comes."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Returns how many characters at the end of a text are the beginning of a stop string."""
    for n_characters in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:n_characters]):
            return n_characters
    return 0


def _is_stop(value: object) -> bool:
    return isinstance(value, str) and value != ""
