"""Text out: it appears as soon as it is certain."""

from __future__ import annotations

from tokenizers import Tokenizer


class TextStream:
    """Turns tokens into text one at a time, holding back characters that the next token may still complete."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._sent = 0  # characters already returned

    def push(self, token: int) -> str:
        """The text that this token made certain, possibly empty."""
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        return "" if text.endswith("\ufffd") else self._rest(text)

    def flush(self) -> str:
        """What was held back."""
        return self._rest(self._tokenizer.decode(self._tokens))

    def _rest(self, text: str) -> str:
        rest, self._sent = text[self._sent :], len(text)
        return rest
