"""Commands measured in processes of their own, so that memory and time are theirs alone."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile


def measure(*command: str, python: str = sys.executable) -> dict[str, float]:
    """Runs `python -m command`; returns its wall time in seconds and its largest resident size in bytes.

    Raises:
        RuntimeError: it failed; the message has its stderr.
    """
    return measure_command([python, "-m", *command])


# A process that is started from a large one is charged with that one's memory: the kernel counts the address space it leaves at
# exec. So a small one starts it.
_LAUNCHER = """
import json, os, sys, time
started = time.perf_counter()
_, status, usage = os.wait4(os.posix_spawn(sys.argv[2], sys.argv[2:], os.environ), 0)
figures = {"seconds": time.perf_counter() - started, "peak_memory_bytes": usage.ru_maxrss * 1024, "status": os.waitstatus_to_exitcode(status)}
with open(sys.argv[1], "w") as file:
    json.dump(figures, file)
"""


def measure_command(command: list[str]) -> dict[str, float]:
    """Runs any command, its program by path; returns and raises as `measure`."""
    with tempfile.NamedTemporaryFile("r") as report:
        launcher = [sys.executable, "-S", "-c", _LAUNCHER, report.name, *command]
        run = subprocess.run(launcher, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        figures = json.loads(report.read() or "{}")
    if figures.pop("status", 1):
        raise RuntimeError(f"{' '.join(command)}: {run.stderr}")
    return {"seconds": round(figures["seconds"], 2), "peak_memory_bytes": figures["peak_memory_bytes"]}
