"""Checks whether an engine can be used here: its file, the files it was built from, and the machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from engines.library.backend import Backend, choose_backend
from engines.library.gpu import Gpu
from exporter.bundle.bundle import Bundle
from exporter.bundle.engine_records import EngineRecord, changed_origins, file_problem, size_problem
from exporter.common.errors import BackendError, BundleError


def check_engine(folder: Path, record: EngineRecord, verify: str = "size") -> None:
    """Checks an engine's file against its record: its size, and with verify="full" also its checksum.

    Raises:
        BundleError: the file is missing, or it is another file than the one that was built.
    """
    problem = file_problem(folder, record, verify)
    if problem:
        raise BundleError(f"engine {folder / record.file}: {problem}")


def check_lineage(bundle: Bundle, record: EngineRecord) -> None:
    """Checks that an engine was built from the bundle's graph and weights, and is no larger than they allow.

    Raises:
        BundleError: a file changed, or the engine is too large; the message names it.
    """
    problem = size_problem(bundle, record)
    changed = [] if problem else changed_origins(bundle, record)
    if changed:
        problem = f"{', '.join(changed)} changed since it was built; build again"
    if problem:
        raise BundleError(f"engine {bundle.folder / record.file}: {problem}")


def backend_of(record: EngineRecord) -> Backend:
    """Returns the TensorRT that an engine was built with.

    Raises:
        BackendError: it is not usable here; the message says what the engine was built with.
    """
    try:
        return choose_backend(record.backend)
    except BackendError as error:
        problem = f"built with {record.backend} {record.version}, which this machine lacks ({error})"
        fix = "install that, or build again with a TensorRT that is installed here"
        raise BackendError(f"engine {record.file}: {problem}; {fix}") from None


def check_runnable(record: EngineRecord, backend: str, version: str, gpus: Sequence[Gpu]) -> None:
    """Checks that this backend, version and GPU can run an engine. The engine's file is not read.

    Args:
        record: record of the engine.
        backend, version: name and version of the TensorRT that is installed here.
        gpus: the visible GPUs; the first one is used.

    Raises:
        BundleError: something differs; the message names both sides.
    """
    subject, built_with = f"engine {record.file}", f"built with {record.backend} {record.version}"
    if record.backend != backend:
        raise BundleError(f"{subject}: {built_with}, this is {backend} {version}; build again with it")
    if record.version != version:
        if not record.options["version_compatible"]:
            raise BundleError(f"{subject}: {built_with}, this is {version}; build again")
        if _numbers(version) < _numbers(record.version):
            problem = "and only a newer version reads an older one's engine"
            raise BundleError(f"{subject}: {built_with}, this is {version}, {problem}; update, or build again")
    if not gpus:
        raise BundleError(f"{subject}: it needs a GPU, and none is visible")
    here = gpus[0]
    if record.compute_capability not in (None, here.compute_capability):
        raise BundleError(
            f"{subject}: built for compute capability {record.compute_capability}, this is {here.name} with "
            f"{here.compute_capability}; build again here, or build with hardware_compatibility"
        )


def _numbers(version: str) -> list[int]:
    """Returns the numbers of a version, to compare. A record may hold any text."""
    return [int(number) for number in re.findall(r"\d{1,9}", version)]
