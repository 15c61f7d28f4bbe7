"""Reads and writes JSON files.

Every file is read as an untrusted file: its size is bounded, it is inside its folder, and it is JSON exactly. Equal
data are written as equal bytes.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

LARGEST_BYTES = 64 * 2**20  # size limit of a JSON file; the largest tokenizers have 35 MB


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a file is in its folder after links are followed.

    Hugging Face's download cache keeps links in `snapshots/REVISION` and the folders below it. They lead into the
    folder `blobs` beside `snapshots`. Files of that folder count as inside; other files of the cache do not.
    """
    home, target = folder.resolve(), path.resolve()
    revision = next((place for place in (home, *home.parents) if place.parent.name == "snapshots"), None)
    blobs = None if revision is None else revision.parents[1] / "blobs"
    return target.is_relative_to(home) or (blobs is not None and target.is_relative_to(blobs))


def is_text(path: str | Path) -> bool:
    """Whether a path is valid Unicode. File systems allow other paths, but libraries in C++ cannot open them."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def unreadable(error: Exception, damage: str, remedy: str) -> str:
    """Returns why a file cannot be read, for a message. A file that cannot be opened may well be whole.

    Args:
        error: what `read_document` raised.
        damage: what a content that is not the expected one means, such as "it is damaged".
        remedy: what to do then.
    """
    if isinstance(error, OSError):
        return f"it cannot be opened ({error.strerror}); its content was not read; check its permissions"
    return f"{damage} ({str(error)[:300]}); {remedy}"


def read_document(path: Path, folder: Path | None = None, infinite: bool = False) -> object:
    """Returns the data of a JSON file.

    NaN, infinity, keys given twice and texts that are not Unicode are refused, because parsers disagree about them.

    Args:
        path: the file.
        folder: the folder that the file must be in; None takes the file's own folder.
        infinite: whether NaN and infinity are read, as Python's own writer writes them.

    Raises:
        ValueError: the file leads out of the folder, is not a plain file, is too large, or is not JSON.
        OSError: the file cannot be read.
    """
    if not is_inside(path, folder or path.parent):
        raise ValueError("it is a link that leads out of its folder")
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a plain file")
    if status.st_size > LARGEST_BYTES:
        raise ValueError(f"it has {status.st_size:,} bytes, expected at most {LARGEST_BYTES:,}")
    return parse_document(path.read_bytes().decode("utf-8"), infinite)


def parse_document(text: str, infinite: bool = False) -> object:
    """Returns the data of a JSON text.

    Args:
        text: the text.
        infinite: as in `read_document`.

    Raises:
        ValueError: the text is not JSON, or has NaN, a key given twice or a text that is not Unicode.
    """
    try:
        constant = float if infinite else _refuse_constant
        data = json.loads(text, parse_constant=constant, object_pairs_hook=_without_duplicates)
        if "\\u" in text:
            json.dumps(data, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair in a text") from None
    return data


def to_json(data: object) -> str:
    """Returns data as JSON text, always with the same layout, so that equal data are equal bytes."""
    return json.dumps(data, indent=1, ensure_ascii=False, sort_keys=False) + "\n"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number in JSON")


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict:
    data = dict(pairs)
    if len(data) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)[:80]!r} is given twice")
    return data
