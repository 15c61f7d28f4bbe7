"""Replaces one file in one step. The content is on the disk before the rename makes it visible."""

from __future__ import annotations

import os
from pathlib import Path

from exporter.bundle.bundle import REPORT_FILE, Bundle
from exporter.common.documents import is_inside, to_json
from exporter.common.errors import InputError
from exporter.placing.foreign_files import sync
from exporter.placing.temporaries import temporary_file


def put_file_in_place(temporary: Path, target: Path) -> None:
    """Writes the content of a finished file to the disk and then renames it to its target.

    Raises:
        InputError: another run replaced the folder, and the temporary file with it.
        OSError: the disk is full.
    """
    try:
        sync(temporary)
        os.replace(temporary, target)
    except FileNotFoundError:
        raise InputError(
            f"output {target}: its folder was replaced by another run meanwhile; nothing was written; run again"
        ) from None


def write_atomically(path: Path, text: str, own: bool = False) -> None:
    """Replaces a small text file in one step. Readers see the old or the new content, and a link stays a link.

    Args:
        path: the file.
        text: the new content.
        own: the file belongs to a bundle, which may be untrusted; a link that leads out of its folder is refused.

    Raises:
        InputError: the folder cannot be written, or the link is refused. The file stays as it was.
    """
    path = _followed(path, own)
    _check_replaces_a_file(path)
    with temporary_file(path.parent, path.name) as temporary:
        temporary.write_text(text, encoding="utf-8")
        put_file_in_place(temporary, path)


def check_writable(*paths: Path, own: bool = False) -> None:
    """Checks that files can be written, before the work for their content is done.

    Args:
        paths: the files.
        own: the files belong to a bundle; a link that leads out of its folder is refused.

    Raises:
        InputError: a file cannot be written; the message has the file and the reason.
    """
    for path in paths:
        path = _followed(path, own)
        _check_replaces_a_file(path)
        with temporary_file(path.parent, path.name):
            pass


def _followed(path: Path, own: bool) -> Path:
    if own and not is_inside(path, path.parent):
        raise InputError(
            f"output {path}: it is a link out of its folder, expected a file of the bundle's own; remove the link"
        )
    return Path(os.path.realpath(path))


def _check_replaces_a_file(path: Path) -> None:
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "no plain file"
        raise InputError(f"output {path}: it is {what}, expected a file; choose another path")


def write_report(bundle: Bundle, report: dict) -> None:
    """Replaces the report.json of a bundle."""
    write_atomically(bundle.folder / REPORT_FILE, to_json(report), own=True)
