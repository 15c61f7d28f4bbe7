"""Checks whether a folder can be written or replaced, before the work for it is done."""

from __future__ import annotations

import errno
import os
import re
import resource
import stat
from pathlib import Path

from exporter.common.errors import InputError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
DISK_REFUSES = (*NO_SPACE, errno.EFBIG, errno.EIO)
CANNOT_WRITE = (*DISK_REFUSES, errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.EXDEV, errno.ENOTEMPTY)


def check_replaceable(target: Path) -> None:
    """Refuses a target that cannot become a bundle's folder, or whose replacement would move more than a bundle.

    Args:
        target: path without symbolic links; it may not exist yet.

    Raises:
        InputError: the target is a file, a loop of links, the root, the home or current folder or above one of them,
            contains a mount point, or this user may not replace it.
    """
    problem = _problem(target)
    if problem:
        raise InputError(f"output {target}: {problem}; nothing was written; choose another output")


def _problem(target: Path) -> str | None:
    if target.is_symlink():
        return "its symbolic links lead in a circle, expected a folder or nothing"
    if not target.exists():
        return None
    if not target.is_dir():
        return "it is a file, expected a folder or nothing"
    for place, what in ((os.path.expanduser("~"), "your home folder"), (_current_folder(), "the current folder")):
        if place and target in (Path(os.path.realpath(place)), *Path(os.path.realpath(place)).parents):
            return (
                f"{what} is there, and a bundle replaces its folder as a whole; expected a folder for the bundle alone"
            )
    mounts = [point for point in _mount_points() if target in (point, *point.parents)]
    if mounts:
        return (
            f"{mounts[0]} is a mount point, which cannot be moved; expected a folder without one, such as one inside it"
        )
    return _not_the_callers(target)


def _current_folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


def _mount_points() -> list[Path]:
    try:
        lines = os.fsdecode(Path("/proc/self/mountinfo").read_bytes()).splitlines()
    except OSError:  # not Linux
        return []
    return [Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line.split()[4])) for line in lines]


def _not_the_callers(target: Path) -> str | None:
    """Returns the reason why this user cannot move and remove an existing folder; None where there is none."""
    for folder, _, _ in os.walk(target):
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
            what = "it" if folder == str(target) else folder
            return f"{what} is read-only for this user, so that an older bundle there cannot be replaced"
    parent, user = target.parent.stat(), os.geteuid()
    if parent.st_mode & stat.S_ISVTX and user not in (0, parent.st_uid, target.stat().st_uid):
        return f"it belongs to another user, and only that user may replace it in {target.parent}"
    return None


def free_bytes(folder: Path) -> int | None:
    """Returns the bytes that this user can still write to a folder's disk; None where the file system does not say."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return None
    return disk.f_frsize * (disk.f_bfree if os.geteuid() == 0 else disk.f_bavail) if disk.f_blocks else None


def check_space(subject: str, folder: Path, needed_bytes: int) -> None:
    """Checks that a folder's disk has enough space.

    Args:
        subject: the begin of the message.
        folder: the folder to write to.
        needed_bytes: least number of bytes that will be written.

    Raises:
        InputError: the space is too small; the message has both numbers.
    """
    free = free_bytes(folder)
    if free is not None and free < needed_bytes:
        raise InputError(
            f"{subject}: {folder} has {free:,} bytes free, expected at least {needed_bytes:,}; nothing was written; "
            "make room or choose another disk"
        )


def reason(error: OSError, folder: Path, free: int | None = None, needed_bytes: int = 0) -> str:
    """Returns the reason why writing to a folder failed, with the space there.

    Args:
        error: the system's error.
        folder: the folder.
        free: bytes that were free there before anything was written; None where it is unknown.
        needed_bytes: least number of bytes to write; 0 where it is unknown.
    """
    text = error.strerror or str(error)
    if error.filename:
        text += f": {error.filename}"
    if error.errno in NO_SPACE:
        text += f" in {folder}, where {'an unknown number of' if free is None else f'{free:,}'} bytes were free"
        text += f" and at least {needed_bytes:,} are needed" if needed_bytes else ""
    elif error.errno == errno.EFBIG:
        text += f": a file may have {resource.getrlimit(resource.RLIMIT_FSIZE)[0]:,} bytes at most (ulimit -f)"
    return text
