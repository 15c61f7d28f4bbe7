"""Functions that both checkpoint formats use: JSON, end tokens, tokenizer files, coverage of weights, tied heads."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from exporter.bundle.manifest import TOKENIZER_FILES
from exporter.common.documents import is_inside, read_document
from exporter.common.errors import CheckpointError
from exporter.model.weights import WeightSource
from exporter.spec.catalogue import short

_ROWS = 8192  # rows of a vocabulary-sized matrix that are read at a time


def check_opens(path: Path) -> None:
    """Checks that a file can be opened. A library that cannot open a file says that its content is damaged.

    It does not wait where the path is a pipe, which the caller refuses.

    Raises:
        CheckpointError: the system refuses to open it; the message has the system's reason.
    """
    try:
        open(path, "rb", opener=lambda file, flags: os.open(file, flags | os.O_NONBLOCK)).close()
    except OSError as error:
        raise CheckpointError(
            f"{path}: it cannot be opened ({error.strerror}); its content was not read; check its permissions"
        ) from None


def read_json(path: Path) -> dict:
    """Reads a JSON object from a file of a checkpoint.

    NaN and infinity are read: transformers writes them under keys that are not read here. A value that is read is
    checked.

    Raises:
        CheckpointError: the file is missing or not a JSON object.
    """
    if not path.is_file():
        raise CheckpointError(f"checkpoint {path.parent}: it holds no {path.name}")
    check_opens(path)
    try:
        data = read_document(path, infinite=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({str(error)[:300]})") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: got a JSON {type(data).__name__}, expected an object")
    return data


def stated(data: dict, key: str, default: Any) -> Any:
    """Returns a value of a config. Only a missing key and null mean the default: 0 and false are statements."""
    value = data.get(key)
    return default if value is None else value


def same(a: object, b: object) -> bool:
    """Whether two values of a config say the same. In Python true equals 1; in a config they say different things."""
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def end_token_ids(folder: Path, config: dict, vocab_size: int) -> tuple[int, ...]:
    """Returns the tokens that end a generation: those of generation_config.json, else those of the config.

    Raises:
        CheckpointError: a value is not a token of the vocabulary.
    """
    ids = _token_setting(folder, config, "eos_token_id", [])
    ids = ids if isinstance(ids, list) else [ids]
    if not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < vocab_size for token in ids):
        raise CheckpointError(
            f"checkpoint {folder}: got eos_token_id {short(ids)}, expected whole numbers from 0 to {vocab_size - 1}, "
            "the model's vocabulary"
        )
    return tuple(ids)


def token_id(folder: Path, config: dict, key: str) -> int | None:
    """Returns a single token of generation_config.json, else of the config. None where both leave it out, or say -1.

    Raises:
        CheckpointError: the value is not a token id.
    """
    token = _token_setting(folder, config, key, None)
    if token is None or token == -1:
        return None
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < 2**63:
        raise CheckpointError(f"checkpoint {folder}: got {key} {short(token)}, expected a whole number of at least 0")
    return token


def _token_setting(folder: Path, config: dict, key: str, default: Any) -> Any:
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    return stated(generation, key, stated(config, key, default))


def tokenizer_files(folder: Path) -> tuple[Path, ...]:
    """Returns the tokenizer's files that the folder holds, in a fixed order.

    Raises:
        CheckpointError: a file is a link that leads out of the folder. A bundle would get a copy of what it leads to.
    """
    files = tuple(folder / name for name in TOKENIZER_FILES if (folder / name).is_file())
    for path in files:
        if not is_inside(path, folder):
            raise CheckpointError(f"{path}: it is a link that leads out of its folder; put the file itself there")
    return files


def check_coverage(folder: Path, found: set[str], expected: set[str], optional: set[str]) -> None:
    """Checks that a checkpoint's tensors are exactly the expected ones.

    Args:
        folder: the checkpoint, for the message.
        found: names of the tensors in the checkpoint.
        expected: names that must be there.
        optional: names that may be there.


    Raises:
        CheckpointError: tensors are missing or unexpected; the message has counts and names.
    """
    missing, unexpected = sorted(expected - found), sorted(found - expected - optional)
    if missing or unexpected:
        raise CheckpointError(
            f"checkpoint {folder}: {len(expected & found)} of {len(expected)} expected tensors found; "
            f"missing {listed(missing)}; unexpected {listed(unexpected)}"
        )


def head_is_embedding(weights: WeightSource, vocab_size: int) -> bool:
    """Whether the output head is bit-equal to the embedding, so that one matrix can serve for both.

    It reads a slice of rows at a time.
    """
    for start in range(0, vocab_size, _ROWS):
        rows = slice(start, min(start + _ROWS, vocab_size))
        head, embedding = (weights.read(name, rows=rows) for name in ("lm_head.weight", "embedding.weight"))
        if head.dtype != embedding.dtype or not torch.equal(head, embedding):
            return False
    return True


def listed(names: Iterable[str]) -> str:
    """Returns the number of names and the first few of them, as text."""
    names = list(names)
    return f"{len(names)} ({', '.join(names[:4])}{', …' if len(names) > 4 else ''})" if names else "none"
