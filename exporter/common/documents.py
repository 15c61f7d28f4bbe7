"""JSON files: read as though a stranger had made them (bounded, inside of their folder, and JSON to the letter), written in one spelling."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

LARGEST_BYTES = 64 * 2**20  # of a JSON file; the largest tokenizers have 35 MB


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a file lies in its folder once links are followed.

    Hugging Face's download cache keeps a folder of links `snapshots/REVISION` beside the `blobs` they lead to; that counts as one.
    """
    home = folder.resolve()
    if home.parent.name == "snapshots":
        home = home.parent.parent
    return path.resolve().is_relative_to(home)


def is_text(path: str | Path) -> bool:
    """Whether a path is valid Unicode: libraries in C++ open no other, and file systems allow them."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def read_document(path: Path, folder: Path | None = None) -> object:
    """The data of a JSON file in a folder, by default its own.

    Numbers that are not JSON's (NaN), keys given twice and texts that are no Unicode are refused: parsers disagree about them.

    Raises:
        ValueError: it leads out of the folder, is no plain file, too large, or not JSON.
        OSError: it cannot be read.
    """
    if not is_inside(path, folder or path.parent):
        raise ValueError("it is a link that leads out of its folder")
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a plain file")
    if status.st_size > LARGEST_BYTES:
        raise ValueError(f"it has {status.st_size:,} bytes, expected at most {LARGEST_BYTES:,}")
    return parse_document(path.read_bytes().decode("utf-8"))


def parse_document(text: str) -> object:
    """The data of a JSON text; raises ValueError as `read_document`."""
    try:
        data = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_without_duplicates)
        if "\\u" in text:
            json.dumps(data, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair in a text") from None
    return data


def to_json(data: object) -> str:
    """The one spelling of JSON that bundles use, so that equal data are equal bytes."""
    return json.dumps(data, indent=1, ensure_ascii=False, sort_keys=False) + "\n"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number in JSON")


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict:
    data = dict(pairs)
    if len(data) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)[:80]!r} is given twice")
    return data
