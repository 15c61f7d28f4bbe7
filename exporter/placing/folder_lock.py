"""A lock on a folder: only one run at a time adds to the folder or replaces it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from exporter.bundle.bundle import Bundle


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Waits for the lock on a folder and holds it.

    Raises:
        OSError: there is no such folder.
    """
    while True:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not os.path.samestat(os.fstat(descriptor), os.stat(folder)):
                continue  # another run replaced it during the wait
            yield
            return
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def changing(bundle: Bundle) -> Iterator[None]:
    """Holds the lock on a bundle's folder, to add something made from the bundle.

    Raises:
        BundleError: an export has replaced the bundle since it was opened.
    """
    whole = bundle.whole or bundle
    with locked(whole.folder):
        whole.check_unchanged()
        yield
