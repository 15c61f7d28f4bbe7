"""What this process has used of the machine's memory."""

from __future__ import annotations

import resource


def peak_memory_bytes() -> int:
    """The largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
