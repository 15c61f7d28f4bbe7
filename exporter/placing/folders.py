"""Puts a whole folder in place in one step. A power cut leaves either the old folder or the new one."""

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
    """Removes what killed runs left beside `target` and in the temporary folder.

    A run calls this where its work is already done.
    """
    target = Path(os.path.realpath(target))
    with contextlib.suppress(OSError):  # a user who cannot write there left nothing there
        _restore(target)
    remove_leftovers(target.parent, target.name)
    remove_leftovers(Path(tempfile.gettempdir()), SCRATCH)


@contextlib.contextmanager
def new_folder(target: str | Path, needed_bytes: int = 0) -> Iterator[Path]:
    """Yields a temporary folder beside `target` to write into, and puts it in place when the body ends without error.

    It replaces an older bundle at `target` in one step. Files there that do not belong to that bundle stay, and links
    to `target` stay valid. When the body raises, nothing changes. It also removes what killed runs left.

    Args:
        target: the folder to make.
        needed_bytes: least number of bytes that will be written; 0 where it is unknown.

    Raises:
        InputError: `target` is a file, cannot be written or replaced, has too little space, or holds another file
            with a name that would be written.
    """
    if not os.fspath(target):
        raise InputError("output: got an empty path, expected a folder to make; give its path")
    if not is_text(target):
        raise InputError(
            f"output {target}: its path is not valid UTF-8, which onnx and onnxruntime need; choose another output"
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
            f"output {target}: cannot write beside it ({reason(error, target.parent)}); choose another output"
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
                raise  # else another run was first, and this bundle replaces its bundle
    with locked(target):
        take_along(target, temporary)
        for folder, _, _ in os.walk(temporary):
            sync(Path(folder))
        _exchange(temporary, target)  # the older folder is now at `temporary`, which the caller removes
        sync(target.parent)
        take_latecomers(temporary, target)


def _exchange(first: Path, second: Path) -> None:
    """Swaps two folders in one step where the kernel has renameat2, else in three renames."""
    at_fdcwd, rename_exchange = -100, 2
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    places = (at_fdcwd, os.fsencode(first), at_fdcwd, os.fsencode(second))
    if renameat2 is not None and renameat2(*places, rename_exchange) == 0:
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
    """Returns the path of the older folder while three renames replace it."""
    return target.with_name(f".{target.name}.replaced")


def _restore(target: Path) -> None:
    """Puts back an older folder that a run left aside when it was killed between two renames.

    Where the new folder is in place, it removes the older one.
    """
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
