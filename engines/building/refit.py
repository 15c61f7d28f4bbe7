"""Refits an engine: puts a bundle's weights into an engine that was built for it. Needs a GPU."""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import replace

from engines.building.publishing import publish
from engines.library.backend import Backend
from engines.library.gpu import visible_gpus
from engines.library.tensorrt_logger import create_logger
from engines.library.usable_engines import check_engine, check_runnable
from exporter.bundle.bundle import ENGINES_FILE, Bundle, sha256_of
from exporter.bundle.engine_records import EngineRecord
from exporter.bundle.manifest import GRAPH_FILE
from exporter.bundle.origin import Origin
from exporter.common.errors import BundleError, CheckFailed
from exporter.common.timing import timed
from exporter.graph.fixed_capacity import fixed_graph_problem
from exporter.placing.files import check_writable
from exporter.placing.temporaries import temporary_file

log = logging.getLogger(__name__)


def refit_bundle(bundle: Bundle, backend: Backend, record: EngineRecord) -> EngineRecord:
    """Refits an engine from the bundle's graph and weights, and replaces its file.

    The graph must be the one that the engine was built from. The weights may be others where the engine was built with
    `refit`. An engine with `strip_plan` alone takes the weights that it was built with: TensorRT may have folded them
    into others, and gives wrong results with new ones without a word.

    Raises:
        BundleError: the engine was not built to be refitted, is not usable here, is not the file that was built, or was
            built from another graph or, without `refit`, from other weights; or a file of the bundle is not the one in
            its manifest, or changed meanwhile.
        CheckFailed: TensorRT could not refit it; the old file is as before.
    """
    if not record.options.get("refit") and not record.options.get("strip_plan"):
        problem, fix = "it was not built to be refitted", "build again with refit=True or strip_plan=True"
        raise BundleError(f"engine {record.file}: {problem}; {fix}")
    check_engine(bundle.folder, record)
    if record.lineage.get(GRAPH_FILE) != bundle.lineage[GRAPH_FILE]:
        problem = "the graph changed since it was built, and a refit replaces only weights"
        raise BundleError(f"engine {record.file}: {problem}; build again")
    if not record.options["refit"] and record.lineage != bundle.lineage:
        problem = "it was built with strip_plan=True alone, which takes back only the weights it was built with"
        fix = "they changed; build again, with refit=True too for other weights"
        raise BundleError(f"engine {record.file}: {problem}; {fix}")
    check_runnable(record, backend.name, backend.version, visible_gpus())
    check_writable(bundle.folder / ENGINES_FILE, own=True)
    origin = Origin.of_bundle(bundle)
    _check_graph_file(bundle, record)
    started = time.perf_counter()
    with timed(log, "%s refitted with the weights of %s", record.file, bundle.folder):
        serialized = _refitted(bundle, backend, record)
    with temporary_file(bundle.folder, record.file) as temporary:
        with open(temporary, "wb") as file:
            file.write(serialized)
        refitted = replace(
            record,
            size_bytes=temporary.stat().st_size,
            sha256=sha256_of(temporary),
            lineage=origin.checksums,
            options=record.options | {"strip_plan": False},
            build_seconds=round(time.perf_counter() - started, 3),
        )
        origin.check_unchanged()
        publish(bundle.folder, temporary, refitted, bundle)
    return refitted


def _check_graph_file(bundle: Bundle, record: EngineRecord) -> None:
    """Checks that the file that TensorRT refits from is the bundle's graph with the engine's capacity.

    Raises:
        BundleError: it is missing or another graph.
    """
    if record.graph_file == GRAPH_FILE:
        return
    problem = fixed_graph_problem(bundle.folder / record.graph_file, bundle.graph_path, record.decode_capacity())
    if problem:
        raise BundleError(f"bundle {bundle.folder}: {record.graph_file}: {problem}")


def _refitted(bundle: Bundle, backend: Backend, record: EngineRecord) -> memoryview:
    """Returns the content of the refitted engine."""
    trt, logger = backend.trt, create_logger(backend.trt)
    runtime = trt.Runtime(logger)
    plan = (bundle.folder / record.file).read_bytes()
    if hashlib.sha256(plan).hexdigest() != record.sha256:
        raise BundleError(f"engine {record.file}: it is not the file that was built (another SHA-256); build again")
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise CheckFailed(f"engine {record.file}: it does not load: {logger.reason()}")
    refitter = trt.Refitter(engine, logger)
    parser_refitter = trt.OnnxParserRefitter(refitter, logger)
    good = parser_refitter.refit_from_file(str(bundle.folder / record.graph_file)) and refitter.refit_cuda_engine()
    if not good:
        raise CheckFailed(f"engine {record.file}: {backend} could not refit it: {logger.reason()}")
    config = engine.create_serialization_config()
    flags = trt.SerializationFlag
    config.clear_flag(flags.EXCLUDE_WEIGHTS)
    if record.options["refit"] and hasattr(flags, "INCLUDE_REFIT"):  # without it, the new engine takes no second refit
        config.set_flag(flags.INCLUDE_REFIT)
    return memoryview(engine.serialize_with_config(config))
