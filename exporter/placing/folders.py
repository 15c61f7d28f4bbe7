"""Puts a whole folder in place in one step. A power cut leaves the old folder or the new one, never a part."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from exporter.common.documents import is_text
from exporter.common.errors import InputError
from exporter.placing.folder_lock import locked
from exporter.placing.foreign_files import sync, take_along, take_latecomers
from exporter.placing.output_checks import CANNOT_WRITE, check_replaceable, check_space, free_bytes, reason
from exporter.placing.temporaries import SCRATCH, claim, lock_of, remove, remove_leftovers


def clear_up(target: str | Path) -> None:
    """Removes what killed runs left beside `target` and in the temporary folder: for a run that finds its work done already."""
    target = Path(os.path.realpath(target))
    with contextlib.suppress(OSError):  # one that may not write there has nothing of its own there
        _restore(target)
    remove_leftovers(target.parent, target.name)
    remove_leftovers(Path(tempfile.gettempdir()), SCRATCH)


@contextlib.contextmanager
def new_folder(target: str | Path, needed_bytes: int = 0) -> Iterator[Path]:
    """Gives a temporary sibling of `target` to write a folder into, and puts it in place when the body ends well.

    An older bundle at `target` is replaced in one step; files there that are not that bundle's own stay, and a link keeps
    pointing to it. When the body raises, nothing changes. Leftovers of killed runs are removed on the way.

    Args:
        target: the folder to make.
        needed_bytes: what will be written at least, as far as that is known.

    Raises:
        InputError: `target` is a file, or cannot be written or replaced, or has no room, or holds somebody's file of a name that
            would be written.
    """
    if not os.fspath(target):
        raise InputError("output: got an empty path, expected a folder to make; give one with -o")
    if not is_text(target):
        raise InputError(
            f"output {target}: its path is not valid UTF-8, which onnx and onnxruntime cannot open; choose another -o"
        )
    target, missing = Path(os.path.realpath(target)), []
    try:
        check_replaceable(target)
        missing = [parent for parent in target.parents if not parent.exists()]
        target.parent.mkdir(parents=True, exist_ok=True)
        _restore(target)
        temporary, lock = claim(target.parent, target.name, folder=True)
    except OSError as error:
        _remove_empty(missing)
        raise InputError(
            f"output {target}: cannot write beside it ({reason(error, target.parent)}); choose another -o"
        ) from None
    try:
        free = free_bytes(target.parent)
        check_space(f"output {target}", target.parent, needed_bytes)
        yield temporary
        _put_in_place(temporary, target)
    except OSError as error:
        if error.errno in CANNOT_WRITE:
            raise InputError(
                f"output {target}: {reason(error, target.parent, free, needed_bytes)}; nothing was left behind"
            ) from None
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(lock)
        _remove_empty(missing)


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # it is not empty
            folder.rmdir()


def _put_in_place(temporary: Path, target: Path) -> None:
    _sync_all(temporary)
    if not target.exists():
        try:
            os.rename(temporary, target)
            sync(target.parent)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise  # else another run was first, and its bundle is now the older one
    with locked(target):
        take_along(target, temporary)
        for folder, _, _ in os.walk(temporary):
            sync(Path(folder))
        _exchange(temporary, target)  # the older folder now lies at `temporary`, which the caller removes
        sync(target.parent)
        take_latecomers(temporary, target)


def _exchange(first: Path, second: Path) -> None:
    """Swaps two folders in one step where the kernel can (renameat2), else in three renames."""
    at_fdcwd, rename_exchange = -100, 2
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if (
        renameat2 is not None
        and renameat2(at_fdcwd, os.fsencode(first), at_fdcwd, os.fsencode(second), rename_exchange) == 0
    ):
        return
    aside = _aside(second)
    os.rename(second, aside)
    try:
        os.rename(first, second)
    except OSError:
        os.rename(aside, second)
        raise
    os.rename(aside, first)


def _aside(target: Path) -> Path:
    """Where an older folder lies while it is replaced in three renames."""
    return target.with_name(f".{target.name}.replaced")


def _restore(target: Path) -> None:
    """Puts an older folder back that a run was killed over between its renames, or removes it where the new one is in place."""
    aside = _aside(target)
    with contextlib.suppress(FileNotFoundError, BlockingIOError), lock_of(aside):
        if target.exists():
            take_latecomers(aside, target)
            remove(aside)
        else:
            os.rename(aside, target)


def _sync_all(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        sync(path)
