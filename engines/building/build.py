"""Builds engines: a graph becomes an engine file with its record. The folder changes only after a complete build."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engines.building.compilation import compile_network
from engines.building.preparation import BuildRequest, PreparedNetwork, prepare_bundle, prepare_onnx
from engines.building.publishing import publish
from engines.library.backend import Backend
from engines.library.gpu import visible_gpus
from engines.network.build_options import BuildOptions
from engines.network.source import data_files, load_source
from exporter.bundle.bundle import ENGINES_FILE, Bundle
from exporter.bundle.engine_records import EngineRecord, read_records
from exporter.bundle.manifest import GRAPH_FILE
from exporter.bundle.origin import Origin
from exporter.common.errors import InputError
from exporter.common.memory import peak_memory_bytes
from exporter.placing.files import check_writable
from exporter.placing.output_checks import check_space
from exporter.placing.temporaries import temporary_file

log = logging.getLogger(__name__)
Say = Callable[[str], None]


def build_bundle(bundle: Bundle, backend: Backend, request: BuildRequest, say: Say = lambda line: None) -> EngineRecord:
    """Builds a bundle's engine beside its graph and records it. `model.c<capacity>.onnx` is left there for other tools.

    After an error the bundle is as before.

    Raises:
        InputError: the shapes are inconsistent, the bundle has several graphs, or its folder cannot be written.
        BundleError: a file of the bundle is missing, damaged, not the one in its manifest, or changed during the build.
        CheckFailed: TensorRT would compute something else than the graph says, or fails to build.
        BackendError: the backend does not support an option, or has no kernel for the graph.
        OSError: the engine cannot be written.
    """
    check_writable(bundle.folder / ENGINES_FILE, own=True)
    if not request.options.strip_plan:  # an engine holds the weights
        check_space(f"engine in {bundle.folder}", bundle.folder, bundle.manifest.weights_bytes)
    origin = Origin.of_bundle(bundle)
    prepared = prepare_bundle(bundle, backend, request)
    capacity = prepared.cache_capacity
    stem = "model" if capacity is None else f"model.c{capacity}"
    graph_file = GRAPH_FILE if capacity is None else f"{stem}.onnx"
    place = _Place(bundle.folder, f"{stem}.{backend.name}.engine", graph_file, origin, bundle)
    return _build(prepared, place, request.options, say)


def build_parts(
    bundle: Bundle, backend: Backend, request: BuildRequest, say: Say = lambda line: None
) -> list[EngineRecord]:
    """Builds the engines of all graphs of a bundle, one after the other, each in its own folder.

    The build needs memory for the largest part only, because each part is freed before the next one is parsed.

    Raises:
        InputError, BundleError, CheckFailed, BackendError, OSError: as `build_bundle`, for one of the parts.
    """
    check_writable(*(part.folder / ENGINES_FILE for part in bundle.parts), own=True)
    records = []
    for number, part in enumerate(bundle.parts, 1):
        if bundle.manifest.parts:
            first, stop = bundle.manifest.parts[number - 1]
            say(f"part {number} of {len(bundle.parts)}: layers {first}:{stop}")
        records.append(build_bundle(part, backend, request, say))
        gc.collect()
    return records


def build_onnx(
    path: str | Path, folder: str | Path, backend: Backend, request: BuildRequest, say: Say = lambda line: None
) -> EngineRecord:
    """Builds an engine from any ONNX file, in a folder of its own.

    Raises:
        InputError: the shapes are inconsistent, or the folder cannot be made or written.
        BundleError: the file or its data is missing, damaged, or changed during the build.
        CheckFailed: TensorRT would compute something else than the graph says, or fails to build.
        BackendError: the backend does not support an option, or has no kernel for the graph.
        OSError: the engine cannot be written.
    """
    path, folder = Path(path), Path(folder)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"output {folder}: it is a file, expected a folder; choose another one")
    if folder.is_dir():
        check_writable(folder / ENGINES_FILE, own=True)
    origin = Origin(path.parent, sorted({path.name, *data_files(load_source(path))}))
    prepared = prepare_onnx(path, backend, request)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"output {folder}: it cannot be made ({error.strerror}); choose another one") from None
    place = _Place(folder, f"{path.stem}.{backend.name}.engine", "", origin)
    return _build(prepared, place, request.options, say)


@dataclass(frozen=True)
class _Place:
    """Where an engine goes, and what it comes from.

    Attributes:
        folder, name: folder and name of the engine's file.
        graph_file: name of the ONNX file beside the engine that it was built from; "" where there is none.
        origin: the graph and the weights that the engine is built from.
        bundle: the bundle in the folder, where there is one.
    """

    folder: Path
    name: str
    graph_file: str
    origin: Origin
    bundle: Bundle | None = None


def _build(prepared: PreparedNetwork, place: _Place, options: BuildOptions, say: Say) -> EngineRecord:
    """Compiles a prepared network, and publishes the engine with its record."""
    parsed, backend, capacity = prepared.parsed, prepared.parsed.backend, prepared.cache_capacity
    for note in prepared.notes:
        say(f"note: {note}")
    log.info("building %s for cache capacity %s: %s", place.name, capacity, options)
    read_records(place.folder)  # a damaged engines.json must fail before the build, not after it
    compute_capability, portability = _portability(backend, options)
    started = time.perf_counter()
    with temporary_file(place.folder, place.name) as temporary:
        checksum, size_bytes = compile_network(prepared, options, temporary, say)
        place.origin.check_unchanged()
        record = EngineRecord(
            file=place.name,
            size_bytes=size_bytes,
            sha256=checksum,
            graph_file=place.graph_file,
            backend=backend.name,
            version=backend.version,
            compute_capability=compute_capability,
            portability=portability,
            profiles=[profile.to_dict() for profile in prepared.profiles],
            cache_capacity=capacity,
            dtypes={tensor.name: tensor.dtype for tensor in (*parsed.inputs, *parsed.outputs)},
            lineage=place.origin.checksums,
            options=options.to_dict(),
            build_seconds=round(time.perf_counter() - started, 3),
            peak_memory_bytes=peak_memory_bytes(),
        )
        new_graph = place.graph_file not in ("", GRAPH_FILE)
        graph = prepared.model.SerializeToString(deterministic=True) if new_graph else None
        publish(place.folder, temporary, record, place.bundle, graph)
    figures = (record.size_bytes / 2**20, record.build_seconds, len(record.profiles))
    log.info("%s: %.1f MiB in %.2f s, %d profiles", place.folder / place.name, *figures)
    return record


def _portability(backend: Backend, options: BuildOptions) -> tuple[str | None, str]:
    """The only compute capability that can run the engine, or None; and the GPUs that can run it, in words."""
    if backend.is_rtx:
        return None, "portable: Ampere and newer RTX GPUs"
    here = visible_gpus()[0]
    if options.hardware_compatibility == "ampere_plus":
        return None, "Ampere and newer GPUs"
    return here.compute_capability, f"compute capability {here.compute_capability}, built on {here.name}"
