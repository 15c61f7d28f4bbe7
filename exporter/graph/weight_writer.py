"""Writes weights into an assembled graph's external data, one tensor at a time.

Memory: the largest slice, not the model. A tensor above SLICE_BYTES is read and converted a slice of its stored rows at a time.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from exporter.bundle.manifest import DATA_FILE, GRAPH_FILE
from exporter.common.errors import CheckpointError
from exporter.graph.assemble import AssembledGraph
from exporter.graph.quantize import pack, quantize
from exporter.graph.stored_tensor import StoredTensor
from exporter.model.weights import TORCH_DTYPES, WeightSource
from exporter.spec.catalogue import ModelConfig
from exporter.spec.dtypes import ONNX_TYPES
from exporter.spec.parameters import ROPE_TABLES
from exporter.spec.rope import rotation_table
from exporter.spec.weight_formats import QUANTIZED_TENSORS, WeightFormat

log = logging.getLogger(__name__)

ALIGNMENT_BYTES = 4096  # a page: onnxruntime and TensorRT map tensors that start on one
SLICE_BYTES = (
    64 * 2**20
)  # of a piece, were it float32; wide runs of a matrix's columns read its pages from the disk few times
ROUNDED_SLICE_BYTES = SLICE_BYTES // 4  # of one that is rounded to integers: that takes several copies of it
BLOCK_VALUES = 2**19  # converted, checked and put in place together, while they are in the processor's caches
WORKERS = 2  # pieces read and converted at the same time
KEPT_BUFFERS = 6  # more than are ever in flight
CACHED_BYTES = (
    64 * 2**20
)  # of a file being written stay in the page cache: the disk starts early, and room is left for what is read


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
        for stored, data, n_flushed in _ahead(_pieces(graph, weights, buffers)):
            if stored.name in offsets:  # its first piece
                offset = offsets.pop(stored.name)
                file.write(bytes(offset - end))
                end = offset + stored.n_bytes
            file.write(data.numpy().data, partial(buffers.give_back, data))
            for weight, count in n_flushed.items():
                if count:
                    flushed[weight] = flushed.get(weight, 0) + count
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
        if self._n_written > CACHED_BYTES and hasattr(
            os, "posix_fadvise"
        ):  # advice only: where there is none the same bytes are written
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
            DATA_FILE,
            offset,
            stored.n_bytes,
            ir.DataType(ONNX_TYPES[stored.dtype]),
            shape=ir.Shape(stored.shape),
            name=stored.name,
        )
        offsets.append(offset)
    return offsets


def serialize_graph(graph: AssembledGraph) -> bytes:
    """The bytes of model.onnx, once its weights are placed."""
    return ir.serde.serialize_model(graph.model).SerializeToString(deterministic=True)


class _Buffers:
    """Memory of pieces in flight, used again: the page faults of fresh memory cost more than the conversion into it."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, n_bytes: int) -> Tensor:
        """Memory uint8 [n_bytes] of any content."""
        if n_bytes > SLICE_BYTES:
            return torch.empty(n_bytes, dtype=torch.uint8)
        try:
            buffer = self._free.pop()
        except IndexError:  # lists pop and append in one step each, so threads need no lock
            buffer = torch.empty(SLICE_BYTES, dtype=torch.uint8)
        return buffer[:n_bytes]

    def give_back(self, piece: Tensor) -> None:
        """Keeps a written piece's memory for the next one; what is of another size did not come from here."""
        memory = piece.untyped_storage()
        if memory.nbytes() == SLICE_BYTES and len(self._free) < KEPT_BUFFERS:
            self._free.append(torch.empty(0, dtype=torch.uint8).set_(memory))


Piece = tuple[
    StoredTensor, Tensor, dict[str, int]
]  # what it is of, its bytes in file order uint8 [n], weight → how many values became zero
Read = Callable[[], dict[str, Tensor]]  # the same run of inputs, or of rows, of each weight that a stored tensor holds


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


def _pieces(graph: AssembledGraph, weights: WeightSource, buffers: _Buffers) -> Iterator[Callable[[], Piece]]:
    """The stored tensors in file order, each as pieces of bounded size that are read and converted when they are called."""
    runs: list[_RoundedRun] = []
    for stored in graph.stored:
        if not stored.role:
            yield from (
                partial(_piece, stored, read, buffers)
                for read in _reads(stored, graph.spec.config, weights, SLICE_BYTES)
            )
            continue
        if stored.role == QUANTIZED_TENSORS[0]:  # the others of the same weight follow
            assert graph.spec.weight_format is not None, "only a weight format has weights in parts"
            weight_format = graph.spec.weight_format.of(stored.name.removesuffix(f".{stored.role}"))
            blocks = 2 * weight_format.block_size  # an even number of integers, of which 4 bits are stored two a byte
            runs = [
                _RoundedRun(read, weight_format, graph.spec.dtype)
                for read in _reads(stored, graph.spec.config, weights, ROUNDED_SLICE_BYTES, blocks)
            ]
        yield from (partial(run.piece, stored) for run in runs)


class _RoundedRun:
    """A run of a weight's inputs, rounded once for all of the tensors that the weight consists of.

    Its integers are asked for first, and not kept; scales and zero points are few, and are.
    """

    def __init__(self, read: Read, weight_format: WeightFormat, dtype: str) -> None:
        self._read, self._format, self._dtype = read, weight_format, dtype
        self._lock = threading.Lock()  # scales may be asked for while the integers are being made
        self._kept: dict[str, Tensor] = {}

    def piece(self, stored: StoredTensor) -> Piece:
        """These rows of one of the weight's tensors."""
        with self._lock:
            if stored.role in self._kept:
                return stored, self._kept.pop(stored.role), {}
            runs = self._read()
            for name, run in runs.items():
                _check_finite(name, run)
            quantized = quantize(torch.cat(list(runs.values())).T, self._format, self._dtype)
            self._kept["scales"] = quantized.scales.contiguous().view(torch.uint8).flatten()
            if quantized.zero_points is not None:
                self._kept["zero_points"] = pack(quantized.zero_points, self._format.bits)
            return stored, pack(quantized.values, self._format.bits), {}


def _piece(stored: StoredTensor, read: Read, buffers: _Buffers) -> Piece:
    runs = read()
    dtype = TORCH_DTYPES[stored.dtype]
    shape = (sum(len(run) for run in runs.values()), *next(iter(runs.values())).shape[1:])
    data = buffers.take(math.prod(shape) * dtype.itemsize)
    values = data.view(dtype).view(shape[::-1]).T if stored.transposed else data.view(dtype).view(shape)
    parts = zip(runs.items(), values.split([len(run) for run in runs.values()]), strict=True)
    return stored, data, {name: _convert(name, run, part, stored.dtype) for (name, run), part in parts}


def _reads(
    stored: StoredTensor, config: ModelConfig, weights: WeightSource, n_bytes: int, whole: int = 1
) -> Iterator[Read]:
    """Reads of the weights in their source's dtype and layout, each of `n_bytes` were it float32.

    Each makes a run of the stored tensor's rows, a multiple of `whole` but the last.
    """
    if stored.name in ROPE_TABLES:
        yield lambda: {
            stored.name: torch.from_numpy(
                rotation_table(config, stored.shape[0] // 2)[:, :, ROPE_TABLES.index(stored.name)]
            )
        }
        return
    if len(stored.shape) == 1:
        yield partial(_read, stored.weights, weights)
        return
    length, width = stored.shape
    step = max(1, n_bytes // (width * 4 * whole)) * whole
    for start in range(0, length, step):
        run = slice(
            start, min(start + step, length)
        )  # of stored rows: the weight's columns where it is stored transposed
        yield partial(_read, stored.weights, weights, **({"columns": run} if stored.transposed else {"rows": run}))


def _read(names: Sequence[str], weights: WeightSource, **run: slice) -> dict[str, Tensor]:
    return {name: weights.read(name, **run) for name in names}


def _convert(name: str, run: Tensor, target: Tensor, dtype: str) -> int:
    """Writes a run of a weight into `target`, which has that dtype; returns how many values became zero.

    Raises:
        CheckpointError: a value is inf or NaN, or became so.
    """
    n_flushed = 0
    rows = max(1, BLOCK_VALUES * len(run) // run.numel())
    for block, place in zip(run.split(rows), target.split(rows), strict=True):
        between_halves = block.element_size() == place.element_size() == 2 and block.dtype != place.dtype
        converted = (block.float() if between_halves else block).to(
            place.dtype
        )  # twice as fast as torch's own way from half to half
        if not _is_finite(converted):
            _check_finite(name, block)
            n_lost = int((~converted.isfinite()).sum())
            raise CheckpointError(
                f"weight {name}: {n_lost} of its values do not fit {dtype}, the largest is {float(block.abs().max()):.3g}; "
                "export with --dtype bf16 or fp32"
            )
        place.copy_(converted)
        if block.dtype != place.dtype:
            n_flushed += _count_nonzero(block) - _count_nonzero(converted)
    return n_flushed


def _is_finite(x: Tensor) -> bool:
    return all(bool(bound.isfinite()) for bound in torch.aminmax(x))  # NaN among the values makes both bounds NaN


def _check_finite(name: str, run: Tensor) -> None:
    if not _is_finite(run):
        n_bad = int((~run.isfinite()).sum())
        raise CheckpointError(
            f"weight {name}: {n_bad} of its values are inf or NaN; the checkpoint is damaged, fetch it again"
        )


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _count_nonzero(x: Tensor) -> int:
    """Values that are neither 0 nor −0, counted by their bits without the sign: many times faster than comparing floats."""
    return int(np.count_nonzero(np.left_shift(x.view(_BITS[x.element_size()]).numpy(), 1)))
