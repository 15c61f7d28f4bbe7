"""Replaces one file in one step. Its content is on the disk before the rename that shows it."""

from __future__ import annotations

import os
from pathlib import Path

from exporter.bundle.bundle import REPORT_FILE, Bundle
from exporter.common.documents import is_inside, to_json
from exporter.common.errors import InputError
from exporter.placing.foreign_files import sync
from exporter.placing.temporaries import temporary_file


def put_file_in_place(temporary: Path, target: Path) -> None:
    """Renames a finished file, its content first brought to the disk.

    Raises:
        InputError: another run replaced the folder, and the file with it.
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
    """Replaces a small text file in one step: readers see the old or the new content, never a part. A link to it stays one.

    Args:
        own: it is one of a bundle's own files, and the bundle may be a stranger's: a link that leads out of its folder is not followed.

    Raises:
        InputError: the folder cannot be written, or not followed; the file is as before.
    """
    path = _followed(path, own)
    _check_replaces_a_file(path)
    with temporary_file(path.parent, path.name) as temporary:
        temporary.write_text(text, encoding="utf-8")
        put_file_in_place(temporary, path)


def check_writable(*paths: Path, own: bool = False) -> None:
    """Refuses files that could not be written, before the work for their content is done. `own` as in `write_atomically`.

    Raises:
        InputError: names the file and the reason.
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
        raise InputError(
            f"output {path}: it is {'a folder' if path.is_dir() else 'no plain file'}, expected a file; choose another path"
        )


def write_report(bundle: Bundle, report: dict) -> None:
    """Replaces a bundle's report.json."""
    write_atomically(bundle.folder / REPORT_FILE, to_json(report), own=True)
