"""Describes the machine and the code for a record."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path

from engines.library.gpu import visible_gpus
from exporter.common.versions import versions


def machine() -> dict:
    """Returns processor, cores, memory and GPUs, without the host's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
    return {
        "cpu": cpu,
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [gpu.name for gpu in visible_gpus()],
    }


def stamp() -> dict:
    """Returns date, commit and versions of packages."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit or "unknown",
        "versions": versions("torch", "onnx", "onnxruntime-gpu", "onnxruntime", "tensorrt-rtx", "tensorrt", "numpy"),
    }
