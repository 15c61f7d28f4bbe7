"""Engines and their records: put in place together, and the question whether an engine may be used here.

What a record holds and how engines.json is read is in `exporter.bundle.engine_records`, which `python -m exporter verify` shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engines.library.gpu import Gpu
from exporter.bundle.bundle import ENGINES_FILE, Bundle
from exporter.bundle.engine_records import EngineRecord, changed_origins, file_problem, read_records, records_json, size_problem
from exporter.common.errors import BundleError
from exporter.placing.placing import changing, locked, put_file_in_place, temporary_file, write_atomically


def publish(folder: Path, temporary_engine: Path, record: EngineRecord, bundle: Bundle | None = None, graph: bytes | None = None) -> None:
    """Puts a finished engine and its record in place; builds that end at the same time take turns.

    The record is taken out first and put back last, so that a run killed in between leaves an engine without a record,
    which nothing uses, and never a record of another engine.

    Args:
        folder: where it goes.
        temporary_engine: the engine's file there.
        record: of the engine.
        bundle: what it was built from, where that lies in `folder`.
        graph: content of the record's `graph_file`, where that is to be left beside the engine.

    Raises:
        BundleError: an export replaced the bundle since it was opened; nothing of the engine goes into the new one.
    """
    with changing(bundle) if bundle is not None else locked(folder):
        if graph is not None:
            with temporary_file(folder, record.graph_file) as temporary:
                temporary.write_bytes(graph)
                put_file_in_place(temporary, folder / record.graph_file)
        others = [other for other in read_records(folder) if other.file != record.file]
        write_atomically(folder / ENGINES_FILE, records_json(others), own=True)
        put_file_in_place(temporary_engine, folder / record.file)
        write_atomically(folder / ENGINES_FILE, records_json([*others, record]), own=True)


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
        raise BundleError(f"engine {bundle.folder / record.file}: {', '.join(changed)} changed since it was built; build again")


def check_runnable(record: EngineRecord, backend: str, version: str, gpus: Sequence[Gpu]) -> None:
    """Refuses an engine of another backend, version or GPU, before anything of it is loaded.

    Raises:
        BundleError: "built with X, this is Y".
    """
    if record.backend != backend:
        raise BundleError(f"engine {record.file}: built with {record.backend} {record.version}, this is {backend} {version}; build again with it")
    if record.version != version and not record.options["version_compatible"]:
        raise BundleError(f"engine {record.file}: built with {record.backend} {record.version}, this is {version}; build again")
    if not gpus:
        raise BundleError(f"engine {record.file}: it needs a GPU, and none is visible")
    here = gpus[0]
    if record.compute_capability is not None and record.compute_capability != here.compute_capability:
        raise BundleError(
            f"engine {record.file}: built for compute capability {record.compute_capability}, this is {here.name} with "
            f"{here.compute_capability}; build again here, or build with --hardware-compatibility"
        )
