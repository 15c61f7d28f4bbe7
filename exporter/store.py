"""Writes weights into an assembled graph's external data, one tensor at a time, and reads them back.

Memory: the largest slice, not the model. A tensor above SLICE_BYTES is read and converted a slice of its stored rows at a time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx import TensorProto
from torch import Tensor

from exporter.assemble import ROPE_TABLES, AssembledGraph, StoredTensor
from exporter.bundle import Bundle
from exporter.catalogue import ModelConfig
from exporter.contract import ONNX_NAMES, ONNX_TYPES, QUANTIZED_PARTS, WeightFormat, weight_shapes
from exporter.errors import BundleError, CheckpointError
from exporter.manifest import DATA_FILE, GRAPH_FILE
from exporter.quantize import Quantized, pack, quantize, unpack
from exporter.rope import rotation_table
from exporter.weights import TORCH_DTYPES, WeightSource

log = logging.getLogger(__name__)

ALIGNMENT_BYTES = 4096  # a page: onnxruntime and TensorRT map tensors that start on one
SLICE_BYTES = 16 * 2**20  # of a piece, were it float32
WORKERS = 2  # pieces read and converted at the same time
KEPT_BUFFERS = 6  # of each size; more than are ever in flight
CACHED_BYTES = 64 * 2**20  # of a file being written stay in the page cache: the disk starts early, and room is left for what is read


@dataclass(frozen=True)
class WrittenGraph:
    """What was written.

    Attributes:
        checksums: SHA-256 of each file.
        flushed: canonical weight name → how many of its values became zero in the graph's dtype; others are left out.
    """

    checksums: dict[str, str]
    flushed: dict[str, int]


def write_graph(
    graph: AssembledGraph,
    folder: Path,
    config: ModelConfig,
    weights: WeightSource,
    progress: Callable[[int], None] = lambda n_bytes: None,
) -> WrittenGraph:
    """Writes model.onnx and model.onnx.data into `folder`.

    Args:
        graph: the assembled graph; its initializers are pointed at the data file (`place_weights`).
        weights: where the values come from, by canonical name.
        progress: called with the number of bytes just written.

    Raises:
        CheckpointError: a weight is inf or NaN, or becomes so in the graph's dtype; names the tensor.
    """
    flushed: dict[str, int] = {}
    end = 0
    offsets = dict(zip((stored.name for stored in graph.stored), place_weights(graph), strict=True))
    buffers = _Buffers()
    with _HashedFile(folder / DATA_FILE, progress) as file:
        for stored, data, n_flushed in _ahead(_pieces(graph, config, weights, buffers)):
            if stored.name in offsets:  # its first piece
                offset = offsets.pop(stored.name)
                file.write(bytes(offset - end))
                end = offset + stored.n_bytes
            file.write(data.numpy().data, partial(buffers.give_back, data))
            if n_flushed:
                flushed[stored.weight] = flushed.get(stored.weight, 0) + n_flushed
    model = serialize_graph(graph)
    (folder / GRAPH_FILE).write_bytes(model)
    log.info("%d weights, %.1f MiB, and a graph of %.1f KiB", len(graph.stored), end / 2**20, len(model) / 2**10)
    return WrittenGraph({DATA_FILE: file.digest.hexdigest(), GRAPH_FILE: hashlib.sha256(model).hexdigest()}, flushed)


class _HashedFile:
    """A file whose checksum is taken as it is written, both in a thread of its own while the next piece is being converted."""

    def __init__(self, path: Path, progress: Callable[[int], None]) -> None:
        self.digest = hashlib.sha256()
        self._path, self._progress, self._n_written = path, progress, 0
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._pending: deque[Future[None]] = deque()

    def write(self, data: memoryview | bytes, done: Callable[[], None] = lambda: None) -> None:
        """Queues a piece; waits where two are queued already, so that memory stays bounded. `done` is called once it is written.

        Raises:
            OSError: an earlier piece could not be written.
        """
        while len(self._pending) >= 2:
            self._pending.popleft().result()
        self._pending.append(self._thread.submit(self._write, data, done))

    def _write(self, data: memoryview | bytes, done: Callable[[], None]) -> None:
        self._file.write(data)
        self._n_written += len(data)
        if self._n_written > CACHED_BYTES and hasattr(os, "posix_fadvise"):  # advice only: where there is none the same bytes are written
            os.posix_fadvise(self._file.fileno(), 0, self._n_written - CACHED_BYTES, os.POSIX_FADV_DONTNEED)
        self.digest.update(data)
        self._progress(len(data))
        done()

    def __enter__(self) -> _HashedFile:
        self._file = open(self._path, "wb")
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        try:
            while self._pending and error is None:
                self._pending.popleft().result()
        finally:
            self._thread.shutdown(cancel_futures=True)
            self._file.close()


def place_weights(graph: AssembledGraph) -> list[int]:
    """Points every initializer at its place in the data file, each on a page of its own; returns the offsets in bytes."""
    offsets, end = [], 0
    for stored in graph.stored:
        offset = end + -end % ALIGNMENT_BYTES
        end = offset + stored.n_bytes
        graph.model.graph.initializers[stored.name].const_value = ir.ExternalTensor(
            DATA_FILE, offset, stored.n_bytes, ir.DataType(ONNX_TYPES[stored.dtype]), shape=ir.Shape(stored.shape), name=stored.name
        )
        offsets.append(offset)
    return offsets


def serialize_graph(graph: AssembledGraph) -> bytes:
    """The bytes of model.onnx, once its weights are placed."""
    return ir.serde.serialize_model(graph.model).SerializeToString(deterministic=True)


class _Buffers:
    """Memory of pieces in flight, used again: the page faults of fresh memory cost more than the conversion into it."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}

    def take(self, n_bytes: int) -> Tensor:
        """A buffer uint8 [n_bytes] of any content."""
        try:
            return self._free[n_bytes].pop()
        except (KeyError, IndexError):  # lists pop and append in one step each, so threads need no lock
            return torch.empty(n_bytes, dtype=torch.uint8)

    def give_back(self, buffer: Tensor) -> None:
        same_size = self._free.setdefault(buffer.numel(), [])
        if len(same_size) < KEPT_BUFFERS:
            same_size.append(buffer)


Piece = tuple[StoredTensor, Tensor, int]  # what it is of, its bytes in file order uint8 [n], how many values became zero


def _ahead(pieces: Iterator[Callable[[], Piece]]) -> Iterator[Piece]:
    """Runs pieces in order and yields their results, a few ahead of what is asked for, each on one thread of several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(max_workers=WORKERS) as pool:
            running: deque[Future[Piece]] = deque()
            for piece in pieces:
                running.append(pool.submit(piece))
                if len(running) > WORKERS:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
    finally:
        torch.set_num_threads(threads)


def _pieces(graph: AssembledGraph, config: ModelConfig, weights: WeightSource, buffers: _Buffers) -> Iterator[Callable[[], Piece]]:
    """The stored tensors in file order, each as pieces of bounded size that are read and converted when they are called."""
    runs: list[_RoundedRun] = []
    for stored in graph.stored:
        if not stored.part:
            yield from (partial(_piece, stored, read, buffers) for read in _reads(stored, config, weights))
            continue
        if stored.part == QUANTIZED_PARTS[0]:  # the others of the same weight follow
            assert graph.weight_format is not None, "only a weight format has weights in parts"
            weight_format = graph.weight_format.of(stored.name.removesuffix(f".{stored.part}"))
            blocks = 2 * weight_format.block_size  # an even number of integers, of which 4 bits are stored two a byte
            runs = [_RoundedRun(read, weight_format, graph.dtype) for read in _reads(stored, config, weights, blocks)]
        yield from (partial(run.piece, stored) for run in runs)


class _RoundedRun:
    """A run of a weight's inputs, rounded once for all of the tensors that the weight consists of.

    Its integers are asked for first, and not kept; scales and zero points are few, and are.
    """

    def __init__(self, read: Callable[[], Tensor], weight_format: WeightFormat, dtype: str) -> None:
        self._read, self._format, self._dtype = read, weight_format, dtype
        self._lock = threading.Lock()  # scales may be asked for while the integers are being made
        self._kept: dict[str, Tensor] = {}

    def piece(self, stored: StoredTensor) -> Piece:
        """These rows of one of the weight's tensors."""
        with self._lock:
            if stored.part in self._kept:
                return stored, self._kept.pop(stored.part), 0
            weight = self._read().T
            _check_finite(stored, weight)
            quantized = quantize(weight, self._format, self._dtype)
            self._kept["scales"] = quantized.scales.contiguous().view(torch.uint8).flatten()
            if quantized.zero_points is not None:
                self._kept["zero_points"] = pack(quantized.zero_points, self._format.bits)
            return stored, pack(quantized.values, self._format.bits), 0


def _piece(stored: StoredTensor, read: Callable[[], Tensor], buffers: _Buffers) -> Piece:
    piece = read()
    dtype = TORCH_DTYPES[stored.dtype]
    data, scratch = (buffers.take(piece.numel() * dtype.itemsize) for _ in range(2))
    chunk = scratch.view(dtype).view(piece.shape).copy_(piece)
    n_flushed = _check_converted(stored, piece, chunk)
    if stored.transposed:
        data.view(dtype).view(*reversed(piece.shape)).copy_(chunk.T)
    else:
        data, scratch = scratch, data
    buffers.give_back(scratch)
    return stored, data, n_flushed


def _reads(stored: StoredTensor, config: ModelConfig, weights: WeightSource, whole: int = 1) -> Iterator[Callable[[], Tensor]]:
    """Reads of the weight in its source's dtype and layout; each makes a run of the stored tensor's rows, a multiple of `whole` but the last."""
    if stored.weight in ROPE_TABLES:
        yield lambda: torch.from_numpy(rotation_table(config, stored.shape[0] // 2)[:, :, ROPE_TABLES.index(stored.weight)])
        return
    if len(stored.shape) == 1:
        yield partial(weights.read, stored.weight)
        return
    length, width = stored.shape
    step = max(1, SLICE_BYTES // (width * 4 * whole)) * whole
    for start in range(0, length, step):
        run = slice(start, min(start + step, length))  # of stored rows: the weight's columns where it is stored transposed
        yield partial(weights.read, stored.weight, **({"columns": run} if stored.transposed else {"rows": run}))


def _check_converted(stored: StoredTensor, piece: Tensor, chunk: Tensor) -> int:
    """How many values of a piece became zero in its converted form.

    Raises:
        CheckpointError: a value is inf or NaN, or became so.
    """
    if not _is_finite(chunk):
        _check_finite(stored, piece)
        n_lost = int((~chunk.isfinite()).sum())
        raise CheckpointError(
            f"weight {stored.weight}: {n_lost} of its values do not fit {stored.dtype}, the largest is {float(piece.abs().max()):.3g}; "
            "export with --dtype bf16 or fp32"
        )
    return 0 if chunk.dtype == piece.dtype else _count_nonzero(piece) - _count_nonzero(chunk)


def _is_finite(x: Tensor) -> bool:
    return all(bool(bound.isfinite()) for bound in torch.aminmax(x))  # NaN among the values makes both bounds NaN


def _check_finite(stored: StoredTensor, piece: Tensor) -> None:
    if not _is_finite(piece):
        n_bad = int((~piece.isfinite()).sum())
        raise CheckpointError(f"weight {stored.weight}: {n_bad} of its values are inf or NaN; the checkpoint is damaged, fetch it again")


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _count_nonzero(x: Tensor) -> int:
    """Values that are neither 0 nor −0, counted by their bits without the sign: many times faster than comparing floats."""
    return int(np.count_nonzero(np.left_shift(x.view(_BITS[x.element_size()]).numpy(), 1)))


def map_data(folder: Path) -> np.ndarray:
    """A bundle's data file mapped as bytes, uint8 [size]; a component without weights has an empty one.

    The mapping is private: torch wants writable memory, the file never changes.
    """
    path = folder / DATA_FILE
    return np.memmap(path, dtype=np.uint8, mode="c") if path.stat().st_size else np.zeros(0, np.uint8)


class GraphWeights:
    """A graph's own weights as a source, each mapped from the data file for as long as its tensor lives; those in integers as what
    they stand for.

    Raises (on construction):
        OSError: the graph cannot be read.
    """

    def __init__(self, folder: Path, first_layer: int, description: dict, weight_format: WeightFormat | None = None) -> None:
        self.description = description
        self._path, self._format = folder / DATA_FILE, weight_format
        self._tensors: dict[str, TensorProto] = {}
        self._names = set()
        for tensor in onnx.load(folder / GRAPH_FILE, load_external_data=False).graph.initializer:
            if tensor.external_data and tensor.dims:
                name = _canonical(tensor.name, first_layer)
                self._tensors[name] = tensor
                weight, _, part = name.rpartition(".")
                self._names.add(weight if part in QUANTIZED_PARTS else name)
        self.has_own_head = "lm_head.weight" in self._names

    @property
    def names(self) -> Set[str]:
        return self._names

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each weight, [out, in] for projections."""
        shapes = {}
        for name in self._names:
            integers = self._tensors.get(f"{name}.integers")
            tensor = integers or self._tensors[name]
            shapes[name] = tuple(tensor.dims)[:: -1 if integers is not None or _is_transposed(name) else 1]
        return shapes

    def read(self, name: str, columns: slice = slice(None), rows: slice = slice(None)) -> Tensor:
        if name not in self._tensors:
            return self._dequantized(name, columns, rows)
        weight = self._mapped(name)
        if _is_transposed(name) and weight.dim() == 2:
            weight = weight.T
        return weight[columns] if weight.dim() == 1 else weight[rows, columns]

    def _dequantized(self, name: str, columns: slice, rows: slice) -> Tensor:
        assert self._format is not None, "only a bundle with a weight format has tensors that are parts of a weight"
        weight_format = self._format.of(name)
        scales = self._mapped(f"{name}.scales")
        size, shape = weight_format.block_size, (scales.shape[0] * weight_format.block_size, scales.shape[1])
        start, stop, _ = columns.indices(shape[0])
        blocks = slice(start // size, -(-stop // size))

        first, last = (block * size * shape[1] * weight_format.bits // 8 for block in (blocks.start, blocks.stop))
        run = self._raw(self._tensors[f"{name}.integers"])[first:last]
        values = unpack(run, weight_format.bits, weight_format.symmetric)[: (blocks.stop - blocks.start) * size * shape[1]]
        zero_points = None
        if not weight_format.symmetric:
            whole = unpack(self._raw(self._tensors[f"{name}.zero_points"]), weight_format.bits, symmetric=False)
            zero_points = whole[: scales.numel()].reshape(scales.shape)[blocks]
        weight = Quantized(values.reshape(-1, shape[1]), scales[blocks], zero_points).dequantized()
        return weight[start - blocks.start * size : stop - blocks.start * size].T[rows]

    def _mapped(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        return self._raw(tensor).view(TORCH_DTYPES[ONNX_NAMES[tensor.data_type]]).reshape(tuple(tensor.dims))

    def _raw(self, tensor: TensorProto) -> Tensor:
        where = {entry.key: int(entry.value) for entry in tensor.external_data if entry.key != "location"}
        return torch.from_numpy(np.asarray(np.memmap(self._path, np.uint8, mode="c", offset=where["offset"], shape=(where["length"],))))


class PartedWeights:
    """The weights of several graphs as one source: each name is read from the graph that has it."""

    def __init__(self, parts: Sequence[GraphWeights]) -> None:
        self.description, self.has_own_head = parts[0].description, parts[-1].has_own_head
        self._parts = parts

    def read(self, name: str, columns: slice = slice(None), rows: slice = slice(None)) -> Tensor:
        return next(part for part in self._parts if name in part.names).read(name, columns, rows)


def bundle_weights(bundle: Bundle) -> WeightSource:
    """A bundle's own weights, mapped from its data files.

    Raises:
        BundleError: they are not the weights, of the shapes, that the manifest's geometry asks for.
    """
    manifest = bundle.manifest
    parts = [GraphWeights(part.folder, manifest.unit.first_layer, manifest.weights, manifest.weight_format) for part in bundle.parts]
    found = {name: shape for part in parts for name, shape in part.shapes.items()}
    expected = weight_shapes(manifest.config, manifest.unit)
    wrong = sorted(name for name, shape in expected.items() if found.get(name) != shape)
    if wrong:
        got = found.get(wrong[0], "none")
        raise BundleError(f"bundle {bundle.folder}: {wrong[0]} has shape {got}, expected {expected[wrong[0]]}, as for {len(wrong) - 1} others")
    rows = {found[table][0] for table in ROPE_TABLES if table in found}
    if rows - {2 * manifest.max_positions} or (manifest.unit.kind != "component" and not rows):
        raise BundleError(f"bundle {bundle.folder}: its RoPE tables have {sorted(rows)} rows, expected {2 * manifest.max_positions}, two a position")
    return parts[0] if len(parts) == 1 else PartedWeights(parts)


def _is_transposed(name: str) -> bool:
    """Whether a graph stores a weight [in, out]; of a vector both are the same."""
    return name.startswith("blocks.")


def _canonical(name: str, first_layer: int) -> str:
    parts = name.split(".")
    if parts[0] == "blocks" and len(parts) > 1:
        parts[1] = str(int(parts[1]) + first_layer) if parts[1].isdecimal() else parts[1]
    return ".".join(parts)
