"""Text in and out: the bundle's tokenizer, and text that appears as soon as it is certain."""

from __future__ import annotations

from tokenizers import Tokenizer

from exporter.bundle import Bundle
from exporter.errors import BundleError, InputError


def open_tokenizer(bundle: Bundle) -> Tokenizer:
    """The tokenizer that travels with a whole model's bundle.

    Raises:
        BundleError: the bundle has none.
    """
    path = bundle.folder / "tokenizer.json"
    if path.name not in bundle.manifest.files:
        raise BundleError(f"bundle {bundle.folder}: it has no tokenizer.json; export it with --unit model from a checkpoint that has one")
    return Tokenizer.from_file(str(path))


def encode(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """A prompt's tokens.

    Raises:
        InputError: it is not valid Unicode.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"prompt: it is not valid UTF-8 at character {error.start}; give text") from None
    return tokenizer.encode(prompt).ids


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
