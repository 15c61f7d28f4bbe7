"""Opens and uses the tokenizer in the bundle of a whole model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from exporter.bundle.bundle import Bundle
from exporter.common.documents import read_document, unreadable
from exporter.common.errors import BundleError, InputError

log = logging.getLogger(__name__)


def open_tokenizer(bundle: Bundle) -> Tokenizer:
    """Opens the tokenizer in the bundle of a whole model.

    Raises:
        BundleError: the bundle has none, or one that cannot be read.
    """
    path = bundle.folder / "tokenizer.json"
    if path.name not in bundle.manifest.files:
        raise BundleError(
            f"bundle {bundle.folder}: it has no tokenizer.json; export the whole model from a checkpoint that has one"
        )
    try:
        read_document(path)
        return load_tokenizer(path)
    except Exception as error:  # the library raises plain Exceptions
        raise BundleError(f"{path}: {unreadable(error, 'it is no tokenizer', 'export again')}") from None


def load_tokenizer(path: Path) -> Tokenizer:
    """Loads a tokenizer.json without the settings of the program that saved it.

    The file also holds how its writer cut and filled its own batches, and dropout of merges, which is for
    training. Here the tokens of a text depend on the text alone. What the file adds around a text stays: a begin token.

    Raises:
        Exception: the library cannot read the file.
    """
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None) is not None:
        tokenizer.model.dropout = None
    return tokenizer


def encode(tokenizer: Tokenizer, prompt: str, note: Callable[[str], None] = log.info) -> list[int]:
    """Returns the tokens of a prompt, with what the tokenizer adds to a text.

    Where the prompt has the begin token already, the tokenizer would add a second one, which models were not trained
    with. It is left out.

    Args:
        tokenizer: the bundle's tokenizer.
        prompt: a text.
        note: called with a line about a begin token that was left out.

    Raises:
        InputError: the prompt is not valid Unicode.
    """
    _check_text(prompt)
    with_added = tokenizer.encode(prompt)
    ids, text_ids = with_added.ids, tokenizer.encode(prompt, add_special_tokens=False).ids
    begins_twice = (
        len(ids) > len(text_ids) > 0 and with_added.special_tokens_mask[0] and ids[0] == ids[1] == text_ids[0]
    )
    if begins_twice and ids[1 : 1 + len(text_ids)] == text_ids:
        note(f"prompt: it begins with {tokenizer.id_to_token(ids[0])} already; the tokenizer adds no second one")
        return ids[1:]
    return ids


def encode_chat(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns the tokens of a rendered chat. Its template wrote all special tokens, so none is added.

    Raises:
        InputError: the text is not valid Unicode.
    """
    _check_text(text)
    return tokenizer.encode(text, add_special_tokens=False).ids


def _check_text(prompt: str) -> None:
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"prompt: it is not valid UTF-8 at character {error.start}; give text") from None
