"""Temporary files and folders beside their target. A lock marks them while a run writes them.

A killed run leaves a temporary whose lock is free. The next run finds it by its name and removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from exporter.common.errors import InputError
from exporter.placing.output_checks import DISK_REFUSES, free_bytes, reason

SCRATCH = "blockline"  # name of our folders in the system's temporary folder


def claim(parent: Path, name: str, folder: bool) -> tuple[Path, int]:
    """Makes a temporary file or folder for a target, and removes what killed runs left of it.

    Args:
        parent: the folder of the target.
        name: the name of the target.
        folder: make a folder; else a file.

    Returns:
        The path of the temporary, and a descriptor that locks it until it is closed.

    Raises:
        OSError: `parent` cannot be written.
    """
    remove_leftovers(parent, name)
    prefix = _prefix(name)
    while True:  # until no other run removed it as a leftover before it was locked
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


def remove_leftovers(parent: Path, name: str) -> None:
    """Removes the temporaries of a target that killed runs left."""
    for leftover in parent.glob(f"{glob.escape(_prefix(name))}*"):
        with contextlib.suppress(OSError), lock_of(leftover):
            remove(leftover)


def _prefix(name: str) -> str:
    return f".{name}.partial-"


@contextlib.contextmanager
def lock_of(leftover: Path) -> Iterator[None]:
    """Holds the lock on what a killed run left. Opening it follows no link and waits for no pipe.

    Raises:
        BlockingIOError: the run is still alive.
        FileNotFoundError: there is nothing of this name.
    """
    lock = os.open(leftover, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def remove(path: Path) -> None:
    """Removes a file or a folder, as far as this user can."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def temporary_file(folder: Path, name: str) -> Iterator[Path]:
    """Yields a temporary file for the target `name` in a folder. It is removed at the end unless it was put in place.

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


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yields a folder in the system's temporary folder (TMPDIR) and removes it at the end.

    The next run removes the folder of a killed run.

    Raises:
        InputError: the temporary folder cannot be written, or it is full.
    """
    try:
        path, lock = claim(Path(tempfile.gettempdir()), SCRATCH, folder=True)
    except OSError as error:
        raise InputError(
            f"temporary folder: {error.strerror or error}; set TMPDIR to one that can be written"
        ) from None
    free = free_bytes(path)
    try:
        os.chmod(path, 0o700)
        yield path
    except OSError as error:
        if error.errno in DISK_REFUSES:
            raise InputError(
                f"temporary folder {path.parent}: {reason(error, path.parent, free)}; set TMPDIR to one with more room"
            ) from None
        raise
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)
