"""Opens and uses the tokenizer in the bundle of a whole model."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from exporter.bundle.bundle import Bundle
from exporter.common.documents import read_document
from exporter.common.errors import BundleError, InputError


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
        raise BundleError(f"{path}: it is no tokenizer ({str(error)[:300]}); export again") from None


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


def encode(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Returns the tokens of a prompt.

    Raises:
        InputError: the prompt is not valid Unicode.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"prompt: it is not valid UTF-8 at character {error.start}; give text") from None
    return tokenizer.encode(prompt).ids
