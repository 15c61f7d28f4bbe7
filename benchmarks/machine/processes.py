"""Runs commands in processes of their own to measure their time and memory, and limits the cores of this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile

from exporter.common.errors import InputError


def measure(*command: str, python: str = sys.executable) -> dict[str, float]:
    """Runs `python -m command`; returns its wall time in seconds and its largest resident size in bytes.

    Raises:
        RuntimeError: the command failed; the message has its stderr.
    """
    return measure_command([python, "-m", *command])


# The kernel counts the address space of the process that calls exec as the new process's memory.
# So a small process starts the command.
_LAUNCHER = """
import json, os, sys, time
started = time.perf_counter()
_, status, usage = os.wait4(os.posix_spawn(sys.argv[2], sys.argv[2:], os.environ), 0)
figures = {"seconds": time.perf_counter() - started, "peak_memory_bytes": usage.ru_maxrss * 1024}
figures["status"] = os.waitstatus_to_exitcode(status)
with open(sys.argv[1], "w") as file:
    json.dump(figures, file)
"""


def measure_command(command: list[str]) -> dict[str, float]:
    """Runs a command whose first word is the path of a program; returns the same figures as `measure`.

    Raises:
        RuntimeError: the command failed; the message has its stderr.
    """
    with tempfile.NamedTemporaryFile("r") as report:
        launcher = [sys.executable, "-S", "-c", _LAUNCHER, report.name, *command]
        run = subprocess.run(launcher, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        figures = json.loads(report.read() or "{}")
    if figures.pop("status", 1):
        raise RuntimeError(f"{' '.join(command)}: {run.stderr}")
    return {"seconds": round(figures["seconds"], 2), "peak_memory_bytes": figures["peak_memory_bytes"]}


def use_cores(wanted: int | None) -> int:
    """Limits this process and its children to a number of cores; returns that number. None takes all cores.

    Raises:
        InputError: the machine has fewer cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    if wanted is not None and not 1 <= wanted <= len(cores):
        raise InputError(f"threads: got {wanted}, expected 1 to {len(cores)}, the number of cores of this machine")
    os.sched_setaffinity(0, cores[:wanted])
    return wanted or len(cores)
