"""Chooses the engine of a bundle that can be used here."""

from __future__ import annotations

import logging

from engines.library.backend import choose_backend
from engines.library.gpu import visible_gpus
from engines.library.usable_engines import check_engine, check_lineage, check_runnable
from exporter.bundle.bundle import Bundle
from exporter.bundle.engine_records import EngineRecord, file_problem, read_records
from exporter.common.errors import BackendError, BundleError, InputError

log = logging.getLogger(__name__)


def find_engine(bundle: Bundle, cache_capacity: int | None, verify: str = "graph") -> EngineRecord:
    """The engine of a bundle that can be used here.

    Args:
        bundle: an opened bundle.
        cache_capacity: what the caller asked for; None takes any.
        verify: "full" takes the engine's checksum too; it holds weights of its own.

    Raises:
        BackendError: there is none; says why for each that there is.
        BundleError: the one to use is not the file that was built, found by a full check; another would be a silent substitute.
    """
    gpus = visible_gpus()
    if not gpus:
        raise BackendError("backend tensorrt: no GPU is visible; use --backend onnxruntime")
    reasons = []
    for record in read_records(bundle.folder):
        try:
            check_engine(bundle.folder, record)
            check_lineage(bundle, record)
            backend = choose_backend(record.backend)
            check_runnable(record, backend.name, backend.version, gpus)
            capacity = record.decode_capacity()
        except InputError as error:
            reasons.append(str(error))
            continue
        if cache_capacity not in (None, capacity):
            reasons.append(f"engine {record.file}: its cache_capacity is {capacity}, asked for was {cache_capacity}")
            continue
        if verify == "full" and (problem := file_problem(bundle.folder, record, verify)):
            raise BundleError(f"engine {bundle.folder / record.file}: {problem}")
        log.info(
            "engine %s: chosen, %s %s, cache capacity %s",
            record.file,
            record.backend,
            record.version,
            record.cache_capacity,
        )
        return record
    raise BackendError(
        "backend tensorrt: "
        + ("; ".join(reasons) or f"bundle {bundle.folder} has no engine; build one with `python -m engines build`")
    )
