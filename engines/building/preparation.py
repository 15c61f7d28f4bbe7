"""Prepares a network for a build: reads the graph, fixes its capacity, chooses profiles, parses and checks it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import onnx

from engines.library.backend import Backend
from engines.library.gpu import visible_gpus
from engines.network.build_options import BuildOptions, check_options
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
from engines.network.source import Axes, cache_rows, check_attention_nodes, check_cache_axes, input_axes, load_source
from exporter.bundle.bundle import Bundle, check_in_place
from exporter.bundle.manifest import Manifest
from exporter.common.errors import InputError
from exporter.common.plain_numbers import is_whole, make_plain
from exporter.graph.fixed_capacity import fix_capacity
from exporter.placing.files import check_writable
from exporter.spec.limits import DEFAULT_CACHE_CAPACITY, check_cache_capacity
from exporter.spec.tensors import CAPACITY


@dataclass(frozen=True)
class BuildRequest:
    """Shapes and options of a build. None means the default.

    Attributes:
        max_batch: largest number of sequences in one step (default 4).
        max_seq_len: largest number of new tokens of a sequence in one step (default 512, at most the capacity).
        cache_capacity: cache rows per sequence (default 2,048, or the positions of the export where they are fewer).
        min_shapes, opt_shapes, max_shapes: texts of explicit profiles, given instead of max_batch and max_seq_len.
        options: options of TensorRT.
    """

    max_batch: int | None = None
    max_seq_len: int | None = None
    cache_capacity: int | None = None
    min_shapes: tuple[str, ...] = ()
    opt_shapes: tuple[str, ...] = ()
    max_shapes: tuple[str, ...] = ()
    options: BuildOptions = field(default_factory=BuildOptions)

    def __post_init__(self) -> None:
        """Makes plain values of the fields; one text of shapes may stand alone.

        Raises:
            InputError: a size is not a whole number, or shapes are not texts.
        """
        numbers, shapes = ("max_batch", "max_seq_len", "cache_capacity"), ("min_shapes", "opt_shapes", "max_shapes")
        make_plain(self, *numbers)
        for name in numbers:
            value = getattr(self, name)
            if value is not None and not is_whole(value):
                raise InputError(f"{name}: got {value!r}, expected a whole number of at least 1")
        for name in shapes:
            texts = getattr(self, name)
            texts = (texts,) if isinstance(texts, str) else tuple(texts)
            if not all(isinstance(text, str) for text in texts):
                raise InputError(f"{name}: got {texts!r:.80}, expected texts such as 'x:1x16'")
            object.__setattr__(self, name, texts)


@dataclass(frozen=True)
class PreparedNetwork:
    """A network that passed its checks, with what the build and the engine's record need.

    Attributes:
        model: the ONNX model with a fixed capacity, without external data.
        parsed: the network that TensorRT parsed from it.
        profiles: shapes to build for.
        cache_capacity: cache rows per sequence; None where the graph has no cache.
        notes: notes of the checks.
    """

    model: onnx.ModelProto
    parsed: ParsedNetwork
    profiles: list[Profile]
    cache_capacity: int | None
    notes: list[str]


def prepare_bundle(bundle: Bundle, backend: Backend, request: BuildRequest) -> PreparedNetwork:
    """Prepares the graph of a bundle. Each part of a bundle in parts is a bundle of its own, prepared on its own.

    Raises:
        InputError: the shapes are inconsistent, or the bundle has several graphs.
        BundleError: a file of the bundle is missing or damaged.
        CheckFailed: TensorRT would compute something else than the graph says.
        BackendError: the backend does not support an option, or has no kernel for the graph.
    """
    manifest = bundle.manifest
    check_in_place(bundle)
    check_weight_format(manifest)
    if manifest.parts:
        problem = f"got {len(manifest.parts)} parts, expected one graph"
        raise InputError(f"bundle {bundle.folder}: {problem}; prepare each of its parts")
    capacity = None
    if manifest.unit.has_cache:
        capacity = check_cache_capacity(request.cache_capacity, manifest.config, manifest.dtype, manifest.max_positions)
    elif request.cache_capacity is not None:
        raise InputError(f"cache_capacity: got {request.cache_capacity} for a {manifest.unit}, which has no cache")
    return _prepare(bundle.graph_path, backend, request, capacity, manifest)


def prepare_onnx(path: Path, backend: Backend, request: BuildRequest) -> PreparedNetwork:
    """Prepares any ONNX file, which may be untrusted.

    Raises:
        InputError: the shapes are inconsistent.
        BundleError: the file is missing or damaged.
        CheckFailed: TensorRT would compute something else than the graph says.
        BackendError: the backend does not support an option, or has no kernel for the graph.
    """
    path = Path(path)
    has_cache = any(CAPACITY in shape for shape in input_axes(load_source(path)).values())
    capacity = request.cache_capacity
    if capacity is not None and capacity < 1:
        raise InputError(f"cache_capacity: got {capacity}, expected at least 1")
    if capacity is None and has_cache:
        capacity = DEFAULT_CACHE_CAPACITY
    return _prepare(path, backend, request, capacity, None)


def _prepare(
    path: Path, backend: Backend, request: BuildRequest, capacity: int | None, manifest: Manifest | None
) -> PreparedNetwork:
    check_options(request.options, backend, visible_gpus())
    if request.options.timing_cache is not None:
        check_writable(request.options.timing_cache)
    model = load_source(path)
    check_attention_nodes(path, model)
    if capacity is not None:
        fix_capacity(model, capacity)
    check_cache_axes(path, model)
    capacity = _agreed_capacity(cache_rows(model), capacity)
    profiles = _profiles(input_axes(model), request, capacity)
    parsed = parse_network(backend, model, path)
    notes = check_network(parsed, manifest)
    return PreparedNetwork(model, parsed, profiles, capacity, notes)


def _agreed_capacity(rows: dict[str, int], capacity: int | None) -> int | None:
    """Returns the capacity that profiles are checked against: the one asked for, or what the graph's caches have.

    Args:
        rows: cache rows of each cache of the graph.
        capacity: the capacity asked for, or None.

    Raises:
        InputError: a cache has another capacity than the one asked for.
    """
    if capacity is None:
        return min(rows.values(), default=None)
    other = next((name for name, size in rows.items() if size != capacity), None)
    if other is not None:
        problem = f"got {capacity}, and {other} has {rows[other]} rows in the graph"
        raise InputError(f"cache_capacity: {problem}; give {rows[other]}, or leave it out")
    return capacity


def _profiles(axes: Axes, request: BuildRequest, capacity: int | None) -> list[Profile]:
    if request.min_shapes or request.opt_shapes or request.max_shapes:
        if request.max_batch is not None or request.max_seq_len is not None:
            problem = "got max_batch or max_seq_len beside explicit shapes, expected one or the other"
            raise InputError(f"profiles: {problem}")
        profiles = explicit_profiles(axes, request.min_shapes, request.opt_shapes, request.max_shapes)
    else:
        max_batch = DEFAULT_MAX_BATCH if request.max_batch is None else request.max_batch
        max_seq_len = request.max_seq_len
        if max_seq_len is None:
            max_seq_len = min(DEFAULT_MAX_SEQ_LEN, capacity or DEFAULT_MAX_SEQ_LEN)
        profiles = default_profiles(axes, max_batch, max_seq_len, capacity)
    if capacity is not None:
        check_capacity(profiles, axes, capacity)
    return profiles
