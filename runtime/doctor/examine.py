"""Looks at this machine and this installation: what is here, what really works, what is wrong and how to mend it.

Nothing here imports what it examines: backends are tried in a child process (`runtime.doctor.probe`), which may crash or hang.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from engines.library.gpu import driver_cuda, visible_gpus
from exporter.common.memory import available_host_bytes
from exporter.costs.ledger import Ledger
from exporter.spec.catalogue import CATALOGUE
from runtime.doctor.findings import FACT, FAILED, GOOD, Finding
from runtime.doctor.installed import conflict_findings, packages_folder, version_findings
from runtime.doctor.probe import MARK, PROBES

log = logging.getLogger(__name__)

DEFAULT_MODEL = "smollm2-135m"
DOWNLOAD_BYTES = 90 * 2**20  # of its import, gone afterwards
FILES_BYTES_PER_PARAMETER = 4 + 2 + 2  # float32 checkpoint, fp16 bundle, engine
MEMORY_BYTES_PER_PARAMETER = 3 * 4  # validation holds three float32 copies (exporter/export.py)
TIMEOUT_S = 300
KERNEL_DRIVER = Path("/proc/driver/nvidia/version")


def examine() -> Iterator[Finding]:
    """Every finding, as it is made: versions, conflicts, the machine, then each backend at work."""
    stages = (
        version_findings(),
        conflict_findings(driver_cuda(), visible_gpus()),
        machine_findings(Path.cwd()),
        probe_findings(tuple(PROBES)),
    )
    for finding in itertools.chain.from_iterable(stages):
        log.info("%s: %s, %s", finding.name, finding.state, finding.detail)
        yield finding


# --- the machine -----------------------------------------------------------------------------------------------------------


def machine_findings(folder: Path) -> Iterator[Finding]:
    """The GPU, and disk and memory against what the default model needs, bundles being written below `folder`."""
    yield gpu_finding()
    parameters = Ledger.of(CATALOGUE[DEFAULT_MODEL]).model_parameters
    needed = parameters * FILES_BYTES_PER_PARAMETER + DOWNLOAD_BYTES
    yield _room("disk here", shutil.disk_usage(folder).free, needed, "free some, or give -o a folder on another disk")
    temporary = Path(tempfile.gettempdir())
    yield _room(
        "disk for temporary files",
        shutil.disk_usage(temporary).free,
        DOWNLOAD_BYTES,
        "free some, or set TMPDIR to a folder on another disk",
    )
    yield _room(
        "memory",
        available_host_bytes(),
        parameters * MEMORY_BYTES_PER_PARAMETER,
        "close what else runs, or validate with --by-layer",
    )


def gpu_finding() -> Finding:
    """Which GPUs the driver shows; none is a fact, a driver that does not start is not."""
    gpus, cuda = visible_gpus(), driver_cuda()
    if gpus:
        listed = ", ".join(f"{gpu.name}, compute capability {gpu.compute_capability}" for gpu in gpus)
        return Finding("GPU", GOOD, f"{listed}; the driver knows CUDA {cuda[0]}.{cuda[1]}" if cuda else listed)
    if KERNEL_DRIVER.is_file() and "CUDA_VISIBLE_DEVICES" not in os.environ:
        detail = "an NVIDIA kernel driver is loaded, and CUDA shows no GPU"
        return Finding(
            "GPU", FAILED, detail, "install the driver's libcuda of the same version, or give the container its devices"
        )
    return Finding("GPU", FACT, "none is visible; engines compile without one with tensorrt-rtx, and do not run")


def _room(name: str, free: int, needed: int, fix: str) -> Finding:
    detail = f"{free / 2**30:.1f} GiB free, {needed / 2**30:.1f} needed for {DEFAULT_MODEL}"
    return Finding(name, GOOD, detail) if free >= needed else Finding(name, FAILED, detail, fix)


# --- backends at work ------------------------------------------------------------------------------------------------------


def probe_findings(names: Sequence[str]) -> Iterator[Finding]:
    """Runs probes in child processes: one for all of them, and another one for the rest whenever one dies."""
    with tempfile.TemporaryDirectory(prefix="blockline-doctor-") as scratch:
        pending = list(names)
        while pending:
            found, end = _run_child(Path(scratch), pending)
            yield from found
            pending = pending[len(found) :]
            if pending:
                name = pending.pop(0)
                yield Finding(name, FAILED, end, PROBES[name][1])


def _run_child(scratch: Path, names: Sequence[str]) -> tuple[list[Finding], str]:
    """The findings of a child, and how it ended."""
    command = [sys.executable, "-m", "runtime.doctor.probe", str(scratch / "bundle"), *names]
    search = [str(packages_folder()), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(search)}
    with open(scratch / "stdout", "w+") as out, open(scratch / "stderr", "w+") as errors:
        try:
            code = subprocess.run(command, stdout=out, stderr=errors, env=environment, timeout=TIMEOUT_S).returncode
            end = (
                f"it killed its process ({signal.Signals(-code).name})"
                if code < 0
                else f"its process ended with exit code {code}"
            )
        except subprocess.TimeoutExpired:
            end = f"it did not end within {TIMEOUT_S} s"
        lines = (scratch / "stdout").read_text(errors="replace").splitlines()
        said = (scratch / "stderr").read_text(errors="replace").strip().splitlines()
    found = [Finding(**json.loads(line.removeprefix(MARK))) for line in lines if line.startswith(MARK)]
    return found, f"{end}: {said[-1][:300]}" if said else end
