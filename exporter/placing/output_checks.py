"""Whether a folder can be written or replaced as a whole: asked before the work is done, answered in one line."""

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
    """Refuses a place for a bundle whose folder could not be put there, or where that would take more with it than a bundle.

    Args:
        target: with symbolic links already followed; may not exist.

    Raises:
        InputError: it is a file, a loop of links, the root, a folder that somebody stands or lives in, holds a mount, or is not
            the caller's to replace.
    """
    problem = _problem(target)
    if problem:
        raise InputError(f"output {target}: {problem}; nothing was written; choose another -o")


def _problem(target: Path) -> str | None:
    if target.is_symlink():
        return "its symbolic links lead in a circle, expected a folder or nothing"
    if not target.exists():
        return None
    if not target.is_dir():
        return "it is a file, expected a folder or nothing"
    for place, what in ((os.path.expanduser("~"), "your home folder"), (_current_folder(), "the current folder")):
        if place and target in (Path(os.path.realpath(place)), *Path(os.path.realpath(place)).parents):
            return f"{what} lies there, and a bundle replaces its folder as a whole, expected a folder for the bundle alone"
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
    """What keeps this user from moving an existing folder away and removing it."""
    for folder, _, _ in os.walk(target):
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
            return f"{'it' if folder == str(target) else folder} is read-only for this user, so that an older bundle there cannot be replaced"
    parent, user = target.parent.stat(), os.geteuid()
    if parent.st_mode & stat.S_ISVTX and user not in (0, parent.st_uid, target.stat().st_uid):
        return f"it belongs to another user, and only that one may replace it in {target.parent}"
    return None


def free_bytes(folder: Path) -> int | None:
    """What this user can still write to a folder's disk; None where its file system does not say."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return None
    return disk.f_frsize * (disk.f_bfree if os.geteuid() == 0 else disk.f_bavail) if disk.f_blocks else None


def check_space(subject: str, folder: Path, needed_bytes: int) -> None:
    """Refuses to begin what cannot fit on the disk.

    Raises:
        InputError: has both numbers.
    """
    free = free_bytes(folder)
    if free is not None and free < needed_bytes:
        raise InputError(
            f"{subject}: {folder} has {free:,} bytes free, expected at least {needed_bytes:,}; nothing was written; make room or choose another disk"
        )


def reason(error: OSError, folder: Path, free: int | None = None, needed_bytes: int = 0) -> str:
    """Why writing to a folder failed, with what is known of the space there.

    Args:
        error: what the system said.
        folder: the folder.
        free: bytes that were free there before anything was written; None where that is not known.
        needed_bytes: what was to be written at least; 0 where that is not known.
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
