"""How many processors this process may use: by its affinity, and by the quota of its container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def usable_processors(root: Path = Path("/")) -> int:
    """Returns how many processors this process may use at once, at least 1.

    A quota of 1.5 processors counts as 1. With a thread more than the quota, all of them would stop for a part of each
    period.

    Args:
        root: the folder with proc and sys.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([affinity, *(int(quota) for quota in _quotas(root))]))


def limited_threads() -> int | None:
    """Returns the usable processors where they are fewer than the machine has, else None.

    A library that starts a thread for each core of the machine needs this number.
    """
    usable = usable_processors()
    return usable if usable < (os.cpu_count() or 1) else None


def _quotas(root: Path) -> Iterator[float]:
    """Yields the quotas of this process's control groups and of those above them, in processors.

    Files: cgroups(7); cpu.max of version 2, cpu.cfs_quota_us and cpu.cfs_period_us of version 1.
    """
    mounts = root / "sys/fs/cgroup"
    for line in _words(root / "proc/self/cgroup", "\n"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        names = controllers.split(",")
        if not controllers:
            folders = _upwards(mounts, path)
            pairs = (_words(folder / "cpu.max") for folder in folders)
        elif "cpu" in names:
            folders = [folder for mount in {controllers, "cpu"} for folder in _upwards(mounts / mount, path)]
            files = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            pairs = ([word for name in files for word in _words(folder / name)] for folder in folders)
        else:
            continue
        for pair in pairs:
            if len(pair) == 2 and all(word.isascii() and word.isdigit() and int(word) for word in pair):  # not max, -1
                yield int(pair[0]) / int(pair[1])


def _upwards(mount: Path, path: str) -> list[Path]:
    """Returns the folder of a control group and those above it. In a container its path may be one of the host."""
    parts = [part for part in path.split("/") if part and part != ".."]
    return [mount.joinpath(*parts[:n_parts]) for n_parts in range(len(parts), -1, -1)]


def _words(path: Path, separator: str | None = None) -> list[str]:
    try:
        return path.read_text().split(separator)
    except (OSError, UnicodeDecodeError):  # no such controller here
        return []
