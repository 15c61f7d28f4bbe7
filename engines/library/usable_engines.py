"""Whether an engine may be used here: its file, its origin, and the machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engines.library.gpu import Gpu
from exporter.bundle.bundle import Bundle
from exporter.bundle.engine_records import EngineRecord, changed_origins, file_problem, size_problem
from exporter.common.errors import BundleError


def check_engine(folder: Path, record: EngineRecord, verify: str = "size") -> None:
    """Checks an engine's file against its record: size, and with verify="full" its checksum.

    Raises:
        BundleError: the file is missing or not the one that was built.
    """
    problem = file_problem(folder, record, verify)
    if problem:
        raise BundleError(f"engine {folder / record.file}: {problem}")


def check_lineage(bundle: Bundle, record: EngineRecord) -> None:
    """Refuses an engine whose graph or weights are not the bundle's, or that is larger than one of these weights can be.

    Raises:
        BundleError: names what changed.
    """
    problem = size_problem(bundle, record)
    if problem:
        raise BundleError(f"engine {bundle.folder / record.file}: {problem}")
    changed = changed_origins(bundle, record)
    if changed:
        raise BundleError(
            f"engine {bundle.folder / record.file}: {', '.join(changed)} changed since it was built; build again"
        )


def check_runnable(record: EngineRecord, backend: str, version: str, gpus: Sequence[Gpu]) -> None:
    """Refuses an engine of another backend, version or GPU, before anything of it is loaded.

    Raises:
        BundleError: "built with X, this is Y".
    """
    if record.backend != backend:
        raise BundleError(
            f"engine {record.file}: built with {record.backend} {record.version}, this is {backend} {version}; build again with it"
        )
    if record.version != version and not record.options["version_compatible"]:
        raise BundleError(
            f"engine {record.file}: built with {record.backend} {record.version}, this is {version}; build again"
        )
    if not gpus:
        raise BundleError(f"engine {record.file}: it needs a GPU, and none is visible")
    here = gpus[0]
    if record.compute_capability is not None and record.compute_capability != here.compute_capability:
        raise BundleError(
            f"engine {record.file}: built for compute capability {record.compute_capability}, this is {here.name} with "
            f"{here.compute_capability}; build again here, or build with --hardware-compatibility"
        )
