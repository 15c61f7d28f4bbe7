"""Makes disks and users that cause errors, in a child process: full, read-only and small disks, and other users."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.campaigns.children import fork

NOBODY = 65534
_NEW_MOUNTS = 0x00020000  # CLONE_NEWNS
PAGE = os.sysconf("SC_PAGE_SIZE")  # tmpfs allocates whole pages


def run_apart(body: Callable[[], None], tmp_path: Path) -> None:
    """Runs `body` in a forked child. The test fails with its traceback where it raises."""
    said = tmp_path / "said"
    with open(said, "wb") as output:
        child = fork(body, output.fileno())
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
        pytest.fail(said.read_text(errors="replace"))


def mount_tmpfs(folder: Path, options: str) -> None:
    """Mounts a small disk that only this process sees. Call it in a child; the test needs `can_mount`."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_MOUNTS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)


def _mounting_works() -> bool:
    command = ["unshare", "-m", "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


can_mount = pytest.mark.skipif(
    not _mounting_works(), reason="needs leave to mount a tmpfs in a mount namespace of its own"
)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


def leave_free(folder: Path, n_pages: int) -> None:
    """Fills a tmpfs with a file called ballast and leaves so many pages free."""
    ballast = folder / "ballast"
    ballast.unlink(missing_ok=True)
    disk = os.statvfs(folder)
    n_bytes = disk.f_bfree * disk.f_frsize - n_pages * PAGE
    with open(ballast, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, n_bytes))


class Said:
    """Runs a command in this process and keeps its output.

    Attributes:
        code: its exit code.
        error: its last line on stderr that reports an error; empty where there is none.
        lines: all its lines on stderr.
    """

    def __init__(self, main: Callable[[list[str]], int], *arguments: object) -> None:
        from exporter.common import terminal

        with terminal.stderr.capture() as capture:
            self.code = main([str(argument) for argument in arguments])
        lines = capture.get().splitlines()
        self.error = next((line for line in reversed(lines) if line.startswith(("error:", "failed:"))), "")
        self.lines = lines
