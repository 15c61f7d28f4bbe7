"""Puts files and whole folders in place in one step: written beside their target, locked while they are, then renamed.

What a killed run leaves behind is known by its name and by its lock being free, and the next run removes it. Contents are on
the disk before the rename that shows them, so that a power cut leaves the old or the new, never an empty file.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from exporter.bundle.bundle import REPORT_FILE, Bundle
from exporter.common.documents import is_inside, is_text, to_json
from exporter.common.errors import InputError
from exporter.placing.foreign_files import sync, take_along, take_latecomers
from exporter.placing.output_checks import CANNOT_WRITE, DISK_REFUSES, check_replaceable, check_space, free_bytes, reason

SCRATCH = "blockline"  # what the temporary folder's are called

# --- temporaries ---------------------------------------------------------------------------------------------------------


def claim(parent: Path, name: str, folder: bool) -> tuple[Path, int]:
    """A new file or folder in `parent` for what will be called `name`, and a descriptor that locks it while it is open.

    Leftovers of killed runs under that name are removed first: their locks are free, their owners being dead.

    Raises:
        OSError: `parent` cannot be written.
    """
    _remove_leftovers(parent, name)
    prefix = _prefix(name)
    while True:  # until another run has not taken it for a leftover before it was locked
        if folder:
            path = tempfile.mkdtemp(prefix=prefix, dir=parent)
            try:
                lock = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                continue
        else:
            lock, path = tempfile.mkstemp(prefix=prefix, dir=parent)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(path):
            os.chmod(path, 0o755 if folder else 0o644)
            return Path(path), lock
        os.close(lock)


def clear_up(target: str | Path) -> None:
    """Removes what killed runs left beside `target` and in the temporary folder: for a run that finds its work done already."""
    target = Path(os.path.realpath(target))
    with contextlib.suppress(OSError):  # one that may not write there has nothing of its own there
        _restore(target)
    _remove_leftovers(target.parent, target.name)
    _remove_leftovers(Path(tempfile.gettempdir()), SCRATCH)


def _remove_leftovers(parent: Path, name: str) -> None:
    for leftover in parent.glob(f"{glob.escape(_prefix(name))}*"):
        with contextlib.suppress(OSError), _lock_of(leftover):
            _remove(leftover)


def _prefix(name: str) -> str:
    return f".{name}.partial-"


@contextlib.contextmanager
def _lock_of(leftover: Path) -> Iterator[None]:
    """Holds what a dead run left; raises BlockingIOError where the run lives. Opening neither follows links nor waits for a pipe."""
    lock = os.open(leftover, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def temporary_file(folder: Path, name: str) -> Iterator[Path]:
    """A file in the folder to write what will be called `name` into; it is gone at the end unless it was put in place.

    Raises:
        InputError: the folder cannot be written, or writing failed.
    """
    free = free_bytes(folder)
    try:
        path, lock = claim(folder, name, folder=False)
    except OSError as error:
        raise InputError(f"output {folder / name}: it cannot be written ({reason(error, folder, free)})") from None
    try:
        yield path
    except OSError as error:
        raise InputError(f"output {folder / name}: {reason(error, folder, free)}; nothing was left behind") from None
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


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
        raise InputError(f"output {target}: its folder was replaced by another run meanwhile; nothing was written; run again") from None


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
        raise InputError(f"output {path}: it is a link out of its folder, expected a file of the bundle's own; remove the link")
    return Path(os.path.realpath(path))


def _check_replaces_a_file(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise InputError(f"output {path}: it is {'a folder' if path.is_dir() else 'no plain file'}, expected a file; choose another path")


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder in the system's temporary one (TMPDIR) for what is needed only meanwhile; that of a killed run goes with the next.

    Raises:
        InputError: there is none that can be written, or it is full.
    """
    try:
        path, lock = claim(Path(tempfile.gettempdir()), SCRATCH, folder=True)
    except OSError as error:
        raise InputError(f"temporary folder: {error.strerror or error}; set TMPDIR to one that can be written") from None
    free = free_bytes(path)
    try:
        os.chmod(path, 0o700)
        yield path
    except OSError as error:
        if error.errno in DISK_REFUSES:
            raise InputError(f"temporary folder {path.parent}: {reason(error, path.parent, free)}; set TMPDIR to one with more room") from None
        raise
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


# --- a bundle that is there ------------------------------------------------------------------------------------------------


def write_report(bundle: Bundle, report: dict) -> None:
    """Replaces a bundle's report.json."""
    write_atomically(bundle.folder / REPORT_FILE, to_json(report), own=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds a folder: whoever adds to it or replaces it takes turns.

    Raises:
        OSError: there is no such folder.
    """
    while True:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not os.path.samestat(os.fstat(descriptor), os.stat(folder)):
                continue  # it was replaced while its lock was waited for
            yield
            return
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def changing(bundle: Bundle) -> Iterator[None]:
    """Holds a bundle's folder while something made from the bundle is put into it.

    Raises:
        BundleError: an export has replaced the bundle since it was opened.
    """
    whole = bundle.whole or bundle
    with locked(whole.folder):
        whole.check_unchanged()
        yield


# --- whole folders ---------------------------------------------------------------------------------------------------------


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
        raise InputError(f"output {target}: its path is not valid UTF-8, which onnx and onnxruntime cannot open; choose another -o")
    target, missing = Path(os.path.realpath(target)), []
    try:
        check_replaceable(target)
        missing = [parent for parent in target.parents if not parent.exists()]
        target.parent.mkdir(parents=True, exist_ok=True)
        _restore(target)
        temporary, lock = claim(target.parent, target.name, folder=True)
    except OSError as error:
        _remove_empty(missing)
        raise InputError(f"output {target}: cannot write beside it ({reason(error, target.parent)}); choose another -o") from None
    try:
        free = free_bytes(target.parent)
        check_space(f"output {target}", target.parent, needed_bytes)
        yield temporary
        _put_in_place(temporary, target)
    except OSError as error:
        if error.errno in CANNOT_WRITE:
            raise InputError(f"output {target}: {reason(error, target.parent, free, needed_bytes)}; nothing was left behind") from None
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
    if renameat2 is not None and renameat2(at_fdcwd, os.fsencode(first), at_fdcwd, os.fsencode(second), rename_exchange) == 0:
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
    with contextlib.suppress(FileNotFoundError, BlockingIOError), _lock_of(aside):
        if target.exists():
            take_latecomers(aside, target)
            _remove(aside)
        else:
            os.rename(aside, target)


def _sync_all(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        sync(path)
