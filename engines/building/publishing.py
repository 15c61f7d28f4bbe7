"""Puts an engine and its record in place together.

`exporter.bundle.engine_records` defines the engine record. `python -m exporter verify` reads it there too.
"""

from __future__ import annotations

from pathlib import Path

from exporter.bundle.bundle import ENGINES_FILE, Bundle
from exporter.bundle.engine_records import EngineRecord, read_records, records_json
from exporter.placing.files import put_file_in_place, write_atomically
from exporter.placing.folder_lock import changing, locked
from exporter.placing.temporaries import temporary_file


def publish(
    folder: Path, temporary_engine: Path, record: EngineRecord, bundle: Bundle | None = None, graph: bytes | None = None
) -> None:
    """Puts a finished engine and its record in place. Builds that end at the same time take turns.

    The old record is removed first and the new one is written last. A run that is killed in between leaves an engine
    without a record, which nothing uses. It never leaves the record of another engine.

    Args:
        folder: folder for the engine.
        temporary_engine: finished file of the engine, in `folder`.
        record: record of the engine.
        bundle: the bundle that the engine was built from, where `folder` is the bundle's.
        graph: content of the record's `graph_file`; None where that file is there already or there is none.

    Raises:
        BundleError: an export replaced the bundle since it was opened; the new bundle stays as it is.
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
