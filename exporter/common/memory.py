"""What this process has used of the machine's memory, and what is left."""

from __future__ import annotations

import resource
from pathlib import Path


def peak_memory_bytes() -> int:
    """The largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def available_host_bytes() -> int:
    """Memory that this process can still take: what the kernel says is available, within its control group's limit."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    limit = group / "memory.max"
    if limit.is_file() and (text := limit.read_text().strip()) != "max":
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(
            statistics["inactive_file"]
        )  # pages of files are given up first
        available = min(available, int(text) - used)
    return available
