"""Text from tokens, as soon as its characters are complete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

CONTEXT_TOKENS = 4  # of a prompt; they are decoded before the new tokens, so that these are not the first of a text
HELD_CHARACTERS = 3  # a character has at most 4 bytes, and a decoder writes at most one U+FFFD for each missing one
PENDING_TOKENS = 8  # more than a character can need


class Detokenizer(Protocol):
    """What a `TextStream` needs of a tokenizer."""

    def decode(self, ids: list[int]) -> str: ...


class TextStream:
    """Turns tokens into text one at a time. Keeps back characters that the next token may still complete.

    A call decodes at most `2 * (PENDING_TOKENS + 1)` tokens at once, however long the text is. Invalid bytes become
    U+FFFD; at most `HELD_CHARACTERS` of these are kept back.
    """

    def __init__(self, tokenizer: Detokenizer, prompt: Sequence[int] = ()) -> None:
        """Begins a text.

        Args:
            tokenizer: decodes tokens.
            prompt: the tokens before the text. They are not returned. Some tokenizers drop a space at the beginning of
                a text, and after a prompt it is none.
        """
        self._tokenizer = tokenizer
        self._context = self._visible_end(prompt)
        self._pending: list[int] = []  # tokens whose text was not returned, or only in part
        self._n_returned = 0  # characters of their text

    def push(self, token: int) -> str:
        """Adds a token and returns the text that is now complete, possibly none."""
        self._pending.append(token)
        text = self._pending_text()
        n_unsure = len(text) - len(text.rstrip("\ufffd"))
        n_stable = len(text) - min(n_unsure, HELD_CHARACTERS)
        new = text[self._n_returned : n_stable]
        self._n_returned = max(self._n_returned, n_stable)
        if not text:  # special tokens, or a space that is dropped where nothing is before it
            self._pending = self._pending[-PENDING_TOKENS:]
        elif not n_unsure:
            self._settle(len(self._pending))
        elif len(self._pending) > PENDING_TOKENS:  # invalid bytes, which no token completes
            self._settle_invalid(len(text) - self._n_returned)
        return new

    def flush(self) -> str:
        """Returns the text that was kept back."""
        text = self._pending_text()[self._n_returned :]
        self._settle(len(self._pending))
        return text

    def _settle(self, n_tokens: int) -> None:
        """Makes the first pending tokens the context. Nothing of the others counts as returned."""
        self._context = self._pending[:n_tokens] or self._context
        self._pending, self._n_returned = self._pending[n_tokens:], 0

    def _settle_invalid(self, n_held: int) -> None:
        """Makes all but the last pending tokens the context, so that a run of invalid bytes costs no more than others.

        Args:
            n_held: characters at the end of the pending text that were not returned.
        """
        pending = self._pending
        for n_kept in range(HELD_CHARACTERS, PENDING_TOKENS):
            self._context, self._pending = pending[:-n_kept], pending[-n_kept:]
            n_characters = len(self._pending_text())
            if n_characters >= n_held:  # else the cut was inside of what is one U+FFFD together
                break
        self._n_returned = max(0, n_characters - n_held)

    def _pending_text(self) -> str:
        """Returns the text that the pending tokens have after the context."""
        before, whole = (self._tokenizer.decode(tokens) for tokens in (self._context, self._context + self._pending))
        if whole.startswith(before):
            return whole[len(before) :]
        # a decoder of bytes made one run of the context's last bytes and the new ones, and found it invalid
        return self._tokenizer.decode(self._pending)

    def _visible_end(self, prompt: Sequence[int]) -> list[int]:
        """Returns the last tokens of a prompt that have a text and begin with a whole character.

        Decoders leave special tokens out.
        """
        end = len(prompt)
        while end and not self._tokenizer.decode([int(prompt[end - 1])]):
            end -= 1
        tokens: list[int] = []
        for token in reversed(prompt[max(0, end - CONTEXT_TOKENS) : end]):
            tokens = [int(token), *tokens]
            if "\ufffd" not in self._tokenizer.decode(tokens):
                break
        return tokens
