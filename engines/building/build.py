"""The build: source → checked network → engine file, with its record; nothing appears in the folder until all went well."""

from __future__ import annotations

import gc
import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx

from engines.building.progress import BuildProgress
from engines.building.publishing import publish
from engines.library.backend import Backend
from engines.library.gpu import visible_gpus
from engines.network.build_options import BuildOptions, apply_options, check_options
from engines.network.network_checks import check_network, check_weight_format
from engines.network.parsed import ParsedNetwork, parse_network
from engines.network.profiles import (
    DEFAULT_MAX_BATCH,
    DEFAULT_MAX_SEQ_LEN,
    Profile,
    check_capacity,
    default_profiles,
    explicit_profiles,
)
from engines.network.source import check_attention_nodes, check_cache_axes, input_axes, load_source
from exporter.bundle.bundle import ENGINES_FILE, Bundle, check_in_place, sha256_of
from exporter.bundle.engine_records import EngineRecord, read_records
from exporter.bundle.manifest import GRAPH_FILE, Manifest
from exporter.common.errors import CheckFailed, InputError
from exporter.common.memory import peak_memory_bytes
from exporter.graph.fixed_capacity import fix_capacity
from exporter.placing.files import check_writable, put_file_in_place
from exporter.placing.output_checks import check_space
from exporter.placing.temporaries import temporary_file
from exporter.spec.limits import DEFAULT_CACHE_CAPACITY, check_cache_capacity
from exporter.spec.tensors import CAPACITY

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuildRequest:
    """Shapes and options of a build; None takes the default.

    Attributes:
        max_batch: most sequences of one step (default 4).
        max_seq_len: most new tokens of one step (default 512, at most the capacity).
        cache_capacity: cache rows per sequence (default the smaller of 2,048 and the export's positions).
        min_shapes, opt_shapes, max_shapes: explicit profiles instead, as texts.
        options: everything else.
    """

    max_batch: int | None = None
    max_seq_len: int | None = None
    cache_capacity: int | None = None
    min_shapes: tuple[str, ...] = ()
    opt_shapes: tuple[str, ...] = ()
    max_shapes: tuple[str, ...] = ()
    options: BuildOptions = field(default_factory=BuildOptions)


@dataclass(frozen=True)
class Prepared:
    """A network that passed its checks, with what the build and its record need.

    Attributes:
        model: the source with its capacity fixed, without external data.
        parsed: the network.
        profiles: shapes to build for.
        cache_capacity: None where the graph has no cache.
        notes: of the checks.
    """

    model: onnx.ModelProto
    parsed: ParsedNetwork
    profiles: list[Profile]
    cache_capacity: int | None
    notes: list[str]


def prepare_bundle(bundle: Bundle, backend: Backend, request: BuildRequest) -> Prepared:
    """Parses and checks a bundle's graph for a build; of a bundle in parts, each part is a bundle to prepare.

    Raises:
        InputError: inconsistent shapes, or several graphs.
        CheckFailed: TensorRT would not compute what the graph says.
        BackendError: the backend cannot honour an option or has no kernel for the graph.
    """
    manifest = bundle.manifest
    check_in_place(bundle)
    check_weight_format(manifest)
    if manifest.parts:
        raise InputError(
            f"bundle {bundle.folder}: it lies in {len(manifest.parts)} parts, expected one graph; prepare each of its parts"
        )
    capacity = None
    if manifest.unit.has_cache:
        capacity = check_cache_capacity(request.cache_capacity, manifest.config, manifest.dtype, manifest.max_positions)
    elif request.cache_capacity is not None:
        raise InputError(f"cache_capacity: got {request.cache_capacity} for a {manifest.unit}, which has no cache")
    return _prepare(bundle.graph_path, backend, request, capacity, manifest)


def prepare_onnx(path: Path, backend: Backend, request: BuildRequest) -> Prepared:
    """Parses and checks any ONNX file for a build; raises as `prepare_bundle`."""
    has_cache = any(CAPACITY in shape for shape in input_axes(load_source(path)).values())
    capacity = request.cache_capacity
    if capacity is not None and capacity < 1:
        raise InputError(f"cache_capacity: got {capacity}, expected at least 1")
    if capacity is None and has_cache:
        capacity = DEFAULT_CACHE_CAPACITY
    return _prepare(path, backend, request, capacity, None)


def _prepare(
    path: Path, backend: Backend, request: BuildRequest, capacity: int | None, manifest: Manifest | None
) -> Prepared:
    check_options(request.options, backend, visible_gpus())
    if request.options.timing_cache is not None:
        check_writable(request.options.timing_cache)
    model = load_source(path)
    check_attention_nodes(path, model)
    if capacity is not None:
        fix_capacity(model, capacity)
    check_cache_axes(path, model)
    profiles = _profiles(input_axes(model), request, capacity)
    parsed = parse_network(backend, model, path)
    notes = check_network(parsed, manifest)
    return Prepared(model, parsed, profiles, capacity, notes)


def _profiles(axes: dict, request: BuildRequest, capacity: int | None) -> list[Profile]:
    if request.min_shapes or request.opt_shapes or request.max_shapes:
        if request.max_batch is not None or request.max_seq_len is not None:
            raise InputError(
                "profiles: got --max-batch or --max-seq-len beside explicit shapes, expected one or the other"
            )
        profiles = explicit_profiles(axes, request.min_shapes, request.opt_shapes, request.max_shapes)
    else:
        max_seq_len = (
            min(DEFAULT_MAX_SEQ_LEN, capacity or DEFAULT_MAX_SEQ_LEN)
            if request.max_seq_len is None
            else request.max_seq_len
        )
        max_batch = DEFAULT_MAX_BATCH if request.max_batch is None else request.max_batch
        profiles = default_profiles(axes, max_batch, max_seq_len, capacity)
    if capacity is not None:
        check_capacity(profiles, capacity)
    return profiles


def build_bundle(
    bundle: Bundle, backend: Backend, request: BuildRequest, say: Callable[[str], None] = lambda line: None
) -> EngineRecord:
    """Builds a bundle's engine beside its graph and records it; also leaves `model.c<capacity>.onnx` for other tools.

    Raises:
        As `prepare_bundle`; CheckFailed also when TensorRT fails to build. The bundle is then as before.
    """
    check_writable(bundle.folder / ENGINES_FILE, own=True)
    if not request.options.strip_plan:  # an engine holds the weights
        check_space(f"engine in {bundle.folder}", bundle.folder, bundle.manifest.weights_bytes)
    prepared = prepare_bundle(bundle, backend, request)
    capacity = prepared.cache_capacity
    stem = "model" if capacity is None else f"model.c{capacity}"
    graph_file = GRAPH_FILE if capacity is None else f"{stem}.onnx"
    return _build(
        prepared,
        bundle.folder,
        f"{stem}.{backend.name}.engine",
        graph_file,
        bundle.lineage,
        request.options,
        say,
        bundle,
    )


def build_parts(
    bundle: Bundle, backend: Backend, request: BuildRequest, say: Callable[[str], None] = lambda line: None
) -> list[EngineRecord]:
    """Builds the engines of all graphs of a bundle, one after the other, each in its own folder; raises as `build_bundle`.

    Memory is that of the largest part: what TensorRT made of one is gone before the next is parsed.
    """
    check_writable(*(part.folder / ENGINES_FILE for part in bundle.parts), own=True)
    records = []
    for number, part in enumerate(bundle.parts, 1):
        if bundle.manifest.parts:
            say(f"part {number} of {len(bundle.parts)}: layers {'{}:{}'.format(*bundle.manifest.parts[number - 1])}")
        records.append(build_bundle(part, backend, request, say))
        gc.collect()
    return records


def build_onnx(
    path: Path, folder: Path, backend: Backend, request: BuildRequest, say: Callable[[str], None] = lambda line: None
) -> EngineRecord:
    """Builds an engine of any ONNX file into a folder of its own; raises as `build_bundle`."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"output {folder}: it is a file, expected a folder; choose another -o")
    if folder.is_dir():
        check_writable(folder / ENGINES_FILE, own=True)
    prepared = prepare_onnx(path, backend, request)
    data = {
        entry.value for t in prepared.model.graph.initializer for entry in t.external_data if entry.key == "location"
    }
    lineage = {name: sha256_of(path.parent / name) for name in sorted({path.name, *data})}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"output {folder}: it cannot be made ({error.strerror}); choose another -o") from None
    return _build(prepared, folder, f"{path.stem}.{backend.name}.engine", "", lineage, request.options, say)


def _build(
    prepared: Prepared,
    folder: Path,
    name: str,
    graph_file: str,
    lineage: dict,
    options: BuildOptions,
    say: Callable[[str], None],
    bundle: Bundle | None = None,
) -> EngineRecord:
    parsed, backend = prepared.parsed, prepared.parsed.backend
    for note in prepared.notes:
        say(f"note: {note}")
    log.info("building %s for cache capacity %s: %s", name, prepared.cache_capacity, options)
    read_records(folder)  # a damaged engines.json shows before the build, not after it
    compute_capability, portability = _portability(backend, options)
    started = time.perf_counter()
    with temporary_file(folder, name) as temporary:
        config = _configure(parsed, prepared.profiles, options, say)
        digest, size_bytes = _serialize(parsed, config, temporary)
        if options.timing_cache is not None:
            _save_timing_cache(options.timing_cache, config)
        record = EngineRecord(
            file=name,
            size_bytes=size_bytes,
            sha256=digest,
            graph_file=graph_file,
            backend=backend.name,
            version=backend.version,
            compute_capability=compute_capability,
            portability=portability,
            profiles=[profile.to_dict() for profile in prepared.profiles],
            cache_capacity=prepared.cache_capacity,
            dtypes={tensor.name: tensor.dtype for tensor in (*parsed.inputs, *parsed.outputs)},
            lineage=lineage,
            options=options.to_dict(),
            build_seconds=round(time.perf_counter() - started, 3),
            peak_memory_bytes=peak_memory_bytes(),
        )
        graph = (
            prepared.model.SerializeToString(deterministic=True) if graph_file and graph_file != GRAPH_FILE else None
        )
        publish(folder, temporary, record, bundle, graph)
    log.info(
        "%s: %.1f MiB in %.2f s, %d profiles",
        folder / name,
        record.size_bytes / 2**20,
        record.build_seconds,
        len(record.profiles),
    )
    return record


def _portability(backend: Backend, options: BuildOptions) -> tuple[str | None, str]:
    """The compute capability that an engine is bound to, if it is, and the GPUs it is for in words."""
    if backend.is_rtx:
        return None, "portable: Ampere and newer RTX GPUs"
    here = visible_gpus()[0]
    if options.hardware_compatibility == "ampere_plus":
        return None, "Ampere and newer GPUs"
    return here.compute_capability, f"compute capability {here.compute_capability}, built on {here.name}"


def _configure(
    parsed: ParsedNetwork, profiles: list[Profile], options: BuildOptions, say: Callable[[str], None]
) -> Any:
    trt = parsed.backend.trt
    config = parsed.builder.create_builder_config()
    apply_options(options, trt, config)
    if options.timing_cache is not None:
        _load_timing_cache(options.timing_cache, config, say)
    for profile in profiles:
        optimization = parsed.builder.create_optimization_profile()
        for name, r in profile.ranges.items():
            try:
                optimization.set_shape(name, r.min, r.opt, r.max)
            except RuntimeError as error:
                raise CheckFailed(
                    f"profile {profile.name}: {parsed.backend} refuses the shapes of {name}: {error}"
                ) from None
        if config.add_optimization_profile(optimization) < 0:
            raise CheckFailed(
                f"profile {profile.name}: {parsed.backend} refuses it: {' '.join(parsed.logger.errors[-1:])}"
            )
    return config


def _load_timing_cache(path: Path, config: Any, say: Callable[[str], None]) -> None:
    """Gives the config a timing cache: the file's, or a new one where the file is missing or does not fit."""
    content = path.read_bytes() if path.is_file() else b""
    cache = config.create_timing_cache(content)
    if cache is None or not config.set_timing_cache(cache, False):
        say(f"warning: timing cache {path} is damaged or of another TensorRT; it will be replaced")
        config.set_timing_cache(config.create_timing_cache(b""), False)


def _save_timing_cache(path: Path, config: Any) -> None:
    """Writes the timings that the build has added to, in one step."""
    try:
        with temporary_file(path.parent, path.name) as temporary:
            temporary.write_bytes(memoryview(config.get_timing_cache().serialize()))
            put_file_in_place(temporary, path)
    except InputError as error:
        raise InputError(f"timing cache {path}: {error}") from None


def _serialize(parsed: ParsedNetwork, config: Any, path: Path) -> tuple[str, int]:
    """Builds and streams the engine into a file; returns its SHA-256 and its size in bytes.

    Raises:
        CheckFailed: TensorRT failed; the message has its first error.
        OSError: the file could not be written.
        KeyboardInterrupt: a signal; the build was stopped through its progress monitor.
    """
    trt: Any = parsed.backend.trt

    class FileWriter(trt.IStreamWriter):
        digest, size_bytes, error = hashlib.sha256(), 0, None

        def write(self, data: Any) -> int:
            view = memoryview(data).cast("B")
            try:
                file.write(view)
            except (
                OSError
            ) as error:  # must not reach TensorRT, which would die of it; fewer bytes than asked for stop it
                self.error = error
                return 0
            self.digest.update(view)
            self.size_bytes += len(view)
            return len(view)

    with open(path, "wb") as file, BuildProgress(trt) as progress:
        config.progress_monitor = progress.monitor
        writer = FileWriter()  # kept alive until the build has ended
        good = parsed.builder.build_serialized_network_to_stream(parsed.network, config, writer)
    progress.raise_if_interrupted()
    if writer.error is not None:
        raise writer.error
    if not good or writer.size_bytes == 0:
        raise CheckFailed(f"build: {parsed.backend} failed: {first_sentence(parsed.logger.errors)}")
    return writer.digest.hexdigest(), writer.size_bytes


def first_sentence(errors: list[str]) -> str:
    """TensorRT's first error, which is the cause of the others, in one line."""
    return errors[0].splitlines()[0][:300] if errors else "it gave no reason"
