"""The origin of a result: the checksums of the files that it was made from, taken from the files themselves.

A result that names its origin is an engine's record, a validation, or a comparison. Each takes an `Origin` before
it reads the files and calls `check_unchanged` before it is written. In between, other libraries may read the files by
their path, map them, or read them several times.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path

from exporter.bundle.bundle import Bundle, checksum_problem, sha256_of
from exporter.bundle.manifest import graph_files
from exporter.common.errors import BundleError, together
from exporter.common.timing import timed

log = logging.getLogger(__name__)

_CLOCK_TICK_NS = 20_000_000  # kernels before 6.13 round a file's times down to a tick of 1 to 10 ms

_State = tuple[int, int, int, int, int]


class Origin:
    """Files of one folder, with the checksums of their content and what shows a later change.

    A change is seen by the file's inode, size and times. A process that changes a file through a mapping which it wrote
    to before is not seen until the kernel writes that page to the disk.

    Attributes:
        checksums: file name → SHA-256 of the content.
    """

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        """Takes the checksums.

        Raises:
            BundleError: a file is missing or cannot be read.
        """
        self._folder = folder
        self._bundle: Bundle | None = None
        self._states = {name: _settled_state(folder / name) for name in names}
        try:
            with timed(log, "%s: checksums of %s", folder, ", ".join(self._states)):
                self.checksums = {name: sha256_of(folder / name) for name in self._states}
        except OSError as error:
            raise BundleError(f"{error.filename}: it cannot be read ({error.strerror}); restore it") from None

    @classmethod
    def of_bundle(cls, bundle: Bundle) -> Origin:
        """Returns the origin of what is made from a bundle: its graphs and weights, checked against the manifest.

        Raises:
            BundleError: a file is not the one that the manifest lists, or an export has replaced the bundle.
        """
        try:
            origin = cls(bundle.folder, graph_files(len(bundle.manifest.parts)))
        except BundleError:
            bundle.check_unchanged()
            raise
        expected = {name: bundle.manifest.files[name]["sha256"] for name in origin.checksums}
        wrong = [
            f"{name} {checksum_problem(got, expected[name])}"
            for name, got in origin.checksums.items()
            if got != expected[name]
        ]
        if wrong:
            bundle.check_unchanged()
            raise BundleError(together(f"bundle {bundle.folder}", wrong))
        origin._bundle = bundle
        return origin

    def check_unchanged(self) -> None:
        """Checks that no file changed since its checksum was taken.

        Raises:
            BundleError: one did, or an export has replaced the bundle; the result is void.
        """
        if self._bundle is not None:
            self._bundle.check_unchanged()
        changed = [name for name, state in self._states.items() if _state(self._folder / name) != state]
        if changed:
            raise BundleError(
                f"{self._folder}: {', '.join(changed)} changed while in use; the result is void; run again"
            )


def _settled_state(path: Path) -> _State:
    """Returns the state of a file. A change after this call gives the file another state."""
    changed_ns = _state(path)[-1]
    if abs(time.time_ns() - changed_ns) < _CLOCK_TICK_NS:  # a second change within one tick would leave the times alone
        time.sleep(_CLOCK_TICK_NS / 1e9)
    return _state(path)


def _state(path: Path) -> _State:
    try:
        status = os.stat(path)
    except OSError as error:
        raise BundleError(f"{path}: it cannot be read ({error.strerror}); restore it") from None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
