"""Text from tokens, as soon as its characters are complete."""

from __future__ import annotations

from tokenizers import Tokenizer


class TextStream:
    """Turns tokens into text one at a time. Keeps back characters that the next token may still complete."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._n_returned = 0  # characters

    def push(self, token: int) -> str:
        """Adds a token and returns the text that is now complete, possibly none."""
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        return "" if text.endswith("\ufffd") else self._rest(text)

    def flush(self) -> str:
        """Returns the text that was kept back."""
        return self._rest(self._tokenizer.decode(self._tokens))

    def _rest(self, text: str) -> str:
        rest, self._n_returned = text[self._n_returned :], len(text)
        return rest
