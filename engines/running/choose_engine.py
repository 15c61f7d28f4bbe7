"""Chooses the engine of a bundle that can be used here."""

from __future__ import annotations

import logging

from engines.library.gpu import visible_gpus
from engines.library.usable_engines import backend_of, check_engine, check_lineage, check_runnable
from exporter.bundle.bundle import Bundle
from exporter.bundle.engine_records import EngineRecord, file_problem, read_records
from exporter.common.errors import BackendError, BundleError, InputError

log = logging.getLogger(__name__)


def find_engine(
    bundle: Bundle, cache_capacity: int | None, verify: str = "graph", allow_host_code: bool = False
) -> EngineRecord:
    """Returns the engine of a bundle that can be used here.

    Args:
        bundle: an opened bundle.
        cache_capacity: capacity that the engine must have; None takes any.
        verify: "full" also checks the checksum of the engine's file, because the engine contains weights.
        allow_host_code: whether an engine may run code of its own on the CPU, as version-compatible ones do.

    Raises:
        BackendError: no engine can be used; the message has the reason for each one.
        BundleError: the chosen engine is not the file that was built, found by the full check.
    """
    gpus = visible_gpus()
    if not gpus:
        raise BackendError("backend tensorrt: no GPU is visible; use backend=onnxruntime")
    reasons = []
    for record in read_records(bundle.folder):
        try:
            check_engine(bundle.folder, record)
            check_lineage(bundle, record)
            backend = backend_of(record)
            check_runnable(record, backend.name, backend.version, gpus)
            _check_host_code(record, allow_host_code)
            capacity = record.decode_capacity()
        except InputError as error:
            reasons.append(str(error))
            continue
        if cache_capacity not in (None, capacity):
            reasons.append(f"engine {record.file}: its cache_capacity is {capacity}, expected {cache_capacity}")
            continue
        if verify == "full" and (problem := file_problem(bundle.folder, record, verify)):
            raise BundleError(f"engine {bundle.folder / record.file}: {problem}")
        found = (record.file, record.backend, record.version, capacity)
        log.info("engine %s: chosen, %s %s, cache capacity %s", *found)
        return record
    no_engine = f"bundle {bundle.folder} has no engine; build one with `python -m engines build`"
    raise BackendError(f"backend tensorrt: {'; '.join(reasons) or no_engine}")


def _check_host_code(record: EngineRecord, allowed: bool) -> None:
    """Checks that an engine with code for the CPU may run it.

    Raises:
        BundleError: it has such code, and the caller has not allowed it.
    """
    if record.options["version_compatible"] and not allowed:
        raise BundleError(
            f"engine {record.file}: built with version_compatible, so it holds code that runs on the CPU; "
            "allow_host_code is off; turn it on if you trust the engine's source, or build again without"
        )
