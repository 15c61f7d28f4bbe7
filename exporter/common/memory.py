"""The memory that this process has used, and the memory that is left."""

from __future__ import annotations

from pathlib import Path


def peak_memory_bytes() -> int:
    """Returns the largest resident size of this process so far.

    `getrusage` is no help here: its figure includes the memory of the process that started this one.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def available_host_bytes() -> int:
    """Returns the memory that this process can still take: the kernel's figure, limited by the control group."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    limit = group / "memory.max"
    if limit.is_file() and (text := limit.read_text().strip()) != "max":
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        reclaimable = int(statistics["inactive_file"])  # the kernel drops pages of files first
        used = int((group / "memory.current").read_text()) - reclaimable
        available = min(available, int(text) - used)
    return available
