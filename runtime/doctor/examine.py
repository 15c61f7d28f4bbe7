"""Examines this machine and what is installed on it: what is here, what works, what fails and how to fix it.

This module imports nothing that it examines. It tries backends in a child process (`runtime.doctor.probe`), because
they may crash or hang.
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
DOWNLOAD_BYTES = 90 * 2**20  # what `import` downloads and deletes when it ends
FILES_BYTES_PER_PARAMETER = 4 + 2 + 2  # float32 checkpoint, fp16 bundle, engine
MEMORY_BYTES_PER_PARAMETER = 3 * 4  # validation has three float32 copies (`bundle_validation`)
TIMEOUT_S = 300
KERNEL_DRIVER = Path("/proc/driver/nvidia/version")


def examine() -> Iterator[Finding]:
    """Yields each finding when it is made: versions, conflicts, the machine, then each backend."""
    stages = (
        version_findings(),
        conflict_findings(driver_cuda(), visible_gpus()),
        machine_findings(Path.cwd()),
        probe_findings(tuple(PROBES)),
    )
    for finding in itertools.chain.from_iterable(stages):
        log.info("%s: %s, %s", finding.name, finding.state, finding.detail)
        yield finding


# --- the machine -----------------------------------------------------------------------------------------------------


def machine_findings(folder: Path) -> Iterator[Finding]:
    """Checks the GPU, and whether disk and memory are large enough for the default model.

    Args:
        folder: a folder on the disk that bundles are written to.
    """
    yield gpu_finding()
    parameters = Ledger.of(CATALOGUE[DEFAULT_MODEL]).model_parameters
    needed = parameters * FILES_BYTES_PER_PARAMETER + DOWNLOAD_BYTES
    yield _free_space(
        "disk here", shutil.disk_usage(folder).free, needed, "free some, or give -o a folder on another disk"
    )
    temporary = Path(tempfile.gettempdir())
    yield _free_space(
        "disk for temporary files",
        shutil.disk_usage(temporary).free,
        DOWNLOAD_BYTES,
        "free some, or set TMPDIR to a folder on another disk",
    )
    yield _free_space(
        "memory",
        available_host_bytes(),
        parameters * MEMORY_BYTES_PER_PARAMETER,
        "close other programs, or validate with --by-layer",
    )


def gpu_finding() -> Finding:
    """Checks which GPUs the driver shows. No GPU is a fact; a driver that does not start is a failure."""
    gpus, cuda = visible_gpus(), driver_cuda()
    if gpus:
        listed = ", ".join(f"{gpu.name}, compute capability {gpu.compute_capability}" for gpu in gpus)
        return Finding("GPU", GOOD, f"{listed}; the driver knows CUDA {cuda[0]}.{cuda[1]}" if cuda else listed)
    if KERNEL_DRIVER.is_file() and "CUDA_VISIBLE_DEVICES" not in os.environ:
        detail = "an NVIDIA kernel driver is loaded, and CUDA shows no GPU"
        fix = "install the driver's libcuda of the same version, or give the container its devices"
        return Finding("GPU", FAILED, detail, fix)
    return Finding("GPU", FACT, "none is visible; engines compile without one with tensorrt-rtx, and do not run")


def _free_space(name: str, free: int, needed: int, fix: str) -> Finding:
    detail = f"{free / 2**30:.1f} GiB free, {needed / 2**30:.1f} needed for {DEFAULT_MODEL}"
    return Finding(name, GOOD, detail) if free >= needed else Finding(name, FAILED, detail, fix)


# --- backends --------------------------------------------------------------------------------------------------------


def probe_findings(names: Sequence[str]) -> Iterator[Finding]:
    """Runs probes in a child process. When it dies, another child process runs the remaining ones."""
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
    """Runs probes in one child process. Returns their findings, and how the process ended."""
    command = [sys.executable, "-m", "runtime.doctor.probe", str(scratch / "bundle"), *names]
    search = [str(packages_folder()), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(search)}
    with open(scratch / "stdout", "w+") as out, open(scratch / "stderr", "w+") as errors:
        try:
            code = subprocess.run(command, stdout=out, stderr=errors, env=environment, timeout=TIMEOUT_S).returncode
            end = f"its process ended with exit code {code}"
            if code < 0:
                end = f"it killed its process ({signal.Signals(-code).name})"
        except subprocess.TimeoutExpired:
            end = f"it did not end within {TIMEOUT_S} s"
        lines = (scratch / "stdout").read_text(errors="replace").splitlines()
        messages = (scratch / "stderr").read_text(errors="replace").strip().splitlines()
    found = [Finding(**json.loads(line.removeprefix(MARK))) for line in lines if line.startswith(MARK)]
    return found, f"{end}: {messages[-1][:300]}" if messages else end
