"""Temporary files and folders beside their target, locked while they are written.

A run that is killed leaves a temporary whose lock is free. The next run knows it by its name and removes it.
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

SCRATCH = "blockline"  # what the temporary folder's are called


def claim(parent: Path, name: str, folder: bool) -> tuple[Path, int]:
    """A new file or folder in `parent` for what will be called `name`, and a descriptor that locks it while it is open.

    Leftovers of killed runs under that name are removed first: their locks are free, their owners being dead.

    Raises:
        OSError: `parent` cannot be written.
    """
    remove_leftovers(parent, name)
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


def remove_leftovers(parent: Path, name: str) -> None:
    for leftover in parent.glob(f"{glob.escape(_prefix(name))}*"):
        with contextlib.suppress(OSError), lock_of(leftover):
            remove(leftover)


def _prefix(name: str) -> str:
    return f".{name}.partial-"


@contextlib.contextmanager
def lock_of(leftover: Path) -> Iterator[None]:
    """Holds what a dead run left; raises BlockingIOError where the run lives. Opening neither follows links nor waits for a pipe."""
    lock = os.open(leftover, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def remove(path: Path) -> None:
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


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder in the system's temporary one (TMPDIR) for what is needed only meanwhile; that of a killed run goes with the next.

    Raises:
        InputError: there is none that can be written, or it is full.
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
