"""A lock on a folder: runs that add to it or replace it take turns."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from exporter.bundle.bundle import Bundle


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
