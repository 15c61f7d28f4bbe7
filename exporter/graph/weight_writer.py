"""Writes weights into the external data of an assembled graph, one tensor at a time.

Memory is bounded by the largest slice, not by the model: a tensor above SLICE_BYTES is read and converted in slices
of its stored rows.
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
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from exporter.bundle.manifest import DATA_FILE, GRAPH_FILE
from exporter.common.errors import CheckpointError
from exporter.graph.assemble import AssembledGraph
from exporter.graph.quantize import Quantized, expected_error, pack, quantize
from exporter.model.rounding import Rounding, sum_of_squares
from exporter.model.weights import TORCH_DTYPES, WeightSource
from exporter.spec.catalogue import ModelConfig
from exporter.spec.dtypes import ONNX_TYPES
from exporter.spec.graph_spec import GraphSpec
from exporter.spec.parameters import ROPE_TABLES
from exporter.spec.rope import rotation_table
from exporter.spec.stored_tensor import StoredTensor
from exporter.spec.weight_formats import QUANTIZED_TENSORS, WeightFormat

log = logging.getLogger(__name__)

ALIGNMENT_BYTES = 4096  # one page: onnxruntime and TensorRT map tensors that start on a page
SLICE_BYTES = 64 * 2**20  # size of one slice in float32 bytes; wide column runs keep page reads few
ROUNDED_SLICE_BYTES = SLICE_BYTES // 4  # size of a slice that is rounded to integers, which takes several copies
BLOCK_VALUES = 2**19  # values that are converted and checked together, while they are in the caches of the processor
WORKERS = 2  # slices that are read and converted at the same time
KEPT_BUFFERS = 6  # more than the slices that are in work at any time
CACHED_BYTES = 64 * 2**20  # bytes of a file in work that stay in the page cache; the disk starts early


@dataclass(frozen=True)
class WrittenGraph:
    """The result of writing a graph.

    Attributes:
        checksums: SHA-256 of each file.
        roundings: canonical weight name → what it lost.
    """

    checksums: dict[str, str]
    roundings: dict[str, Rounding]


def write_graph(
    graph: AssembledGraph,
    folder: Path,
    weights: WeightSource,
    progress: Callable[[int], None] = lambda n_bytes: None,
) -> WrittenGraph:
    """Writes model.onnx and model.onnx.data into `folder`.

    Args:
        graph: the assembled graph. Its initializers are pointed at the data file (`place_weights`).
        folder: the folder that both files go to.
        weights: the source of the values, by canonical name.
        progress: called with the number of bytes just written.

    Raises:
        CheckpointError: a weight is inf or NaN, becomes so in the graph's dtype, or loses more than is allowed; the
            message names the tensor.
    """
    roundings: dict[str, Rounding] = {}
    end = 0
    offsets = dict(zip((stored.name for stored in graph.stored), place_weights(graph), strict=True))
    buffers = _Buffers()
    with _HashedFile(folder / DATA_FILE, progress) as file:
        for name, slices in groupby(_ahead(_slices(graph, weights, buffers)), lambda slice: slice.stored.name):
            file.write(bytes(offsets[name] - end))
            parts: dict[str, Rounding] = {}
            for stored, data, lost in slices:
                end = offsets[name] + stored.n_bytes
                file.write(data.numpy().data, partial(buffers.give_back, data))
                parts |= {weight: parts.get(weight, Rounding()) + rounding for weight, rounding in lost.items()}
            for weight, rounding in parts.items():
                rounding.check(weight, _stored_as(graph.spec, stored))
            roundings |= parts
    model = serialize_graph(graph)
    (folder / GRAPH_FILE).write_bytes(model)
    log.info("%d weights, %.1f MiB, and a graph of %.1f KiB", len(graph.stored), end / 2**20, len(model) / 2**10)
    return WrittenGraph({DATA_FILE: file.digest.hexdigest(), GRAPH_FILE: hashlib.sha256(model).hexdigest()}, roundings)


def _stored_as(spec: GraphSpec, stored: StoredTensor) -> str:
    return f"{stored.dtype} with scales in {spec.dtype}" if stored.role else stored.dtype


class _HashedFile:
    """A file that is written and hashed in its own thread, while the next slice is converted."""

    def __init__(self, path: Path, progress: Callable[[int], None]) -> None:
        self.digest = hashlib.sha256()
        self._path, self._progress, self._n_written = path, progress, 0
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._pending: deque[Future[None]] = deque()

    def write(self, data: memoryview | bytes, done: Callable[[], None] = lambda: None) -> None:
        """Queues a slice, and waits where two are queued already, so that memory stays bounded.

        Args:
            data: the bytes.
            done: called once they are written.

        Raises:
            OSError: an earlier slice could not be written.
        """
        while len(self._pending) >= 2:
            self._pending.popleft().result()
        self._pending.append(self._thread.submit(self._write, data, done))

    def _write(self, data: memoryview | bytes, done: Callable[[], None]) -> None:
        self._file.write(data)
        self._n_written += len(data)
        written_long_ago = self._n_written - CACHED_BYTES
        if written_long_ago > 0 and hasattr(os, "posix_fadvise"):  # only advice: the bytes of the file stay the same
            os.posix_fadvise(self._file.fileno(), 0, written_long_ago, os.POSIX_FADV_DONTNEED)
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
    """Points every initializer at its own page of the data file, and returns the offsets in bytes."""
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
    """Returns the bytes of model.onnx, once its weights are placed."""
    return ir.serde.serialize_model(graph.model).SerializeToString(deterministic=True)


class _Buffers:
    """Memory of slices that is used again, because the page faults of fresh memory cost more than the conversion."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, n_bytes: int) -> Tensor:
        """Returns memory uint8 [n_bytes] with any content."""
        if n_bytes > SLICE_BYTES:
            return torch.empty(n_bytes, dtype=torch.uint8)
        try:
            buffer = self._free.pop()
        except IndexError:  # lists pop and append in one step each, so threads need no lock
            buffer = torch.empty(SLICE_BYTES, dtype=torch.uint8)
        return buffer[:n_bytes]

    def give_back(self, data: Tensor) -> None:
        """Keeps the memory of a written slice for the next one; memory of another size did not come from here."""
        memory = data.untyped_storage()
        if memory.nbytes() == SLICE_BYTES and len(self._free) < KEPT_BUFFERS:
            self._free.append(torch.empty(0, dtype=torch.uint8).set_(memory))


class Slice(NamedTuple):
    """A slice of a stored tensor, ready to be written.

    Attributes:
        stored: the tensor.
        data: its bytes in file order, uint8 [n].
        lost: canonical weight name → what these values of it lost.
    """

    stored: StoredTensor
    data: Tensor
    lost: dict[str, Rounding]


# Reads the same run of inputs, or of rows, of each weight that a stored tensor holds.
Read = Callable[[], dict[str, Tensor]]


def _ahead(slices: Iterator[Callable[[], Slice]]) -> Iterator[Slice]:
    """Makes slices on several threads and yields them in order; a few are made before they are asked for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(max_workers=WORKERS) as pool:
            running: deque[Future[Slice]] = deque()
            for make in slices:
                running.append(pool.submit(make))
                if len(running) > WORKERS:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
    finally:
        torch.set_num_threads(threads)


def _slices(graph: AssembledGraph, weights: WeightSource, buffers: _Buffers) -> Iterator[Callable[[], Slice]]:
    """The stored tensors in file order, as slices of bounded size; calling one reads and converts it."""
    spec = graph.spec
    runs: list[_RoundedRun] = []
    for stored in graph.stored:
        if not stored.role:
            reads = _reads(stored, spec.config, weights, SLICE_BYTES)
            yield from (partial(_converted, stored, read, buffers) for read in reads)
            continue
        if stored.role == QUANTIZED_TENSORS[0]:  # the other tensors of the same weight follow
            assert spec.weight_format is not None, "a role exists only where the weights have an integer format"
            weight_format = spec.weight_format.of(stored.name.removesuffix(f".{stored.role}"))
            blocks = 2 * weight_format.block_size  # an even number of integers, because two of 4 bits share a byte
            reads = _reads(stored, spec.config, weights, ROUNDED_SLICE_BYTES, blocks)
            runs = [_RoundedRun(read, weight_format, spec.dtype) for read in reads]
        yield from (partial(run.slice, stored) for run in runs)


class _RoundedRun:
    """A run of a weight's inputs, rounded once for all tensors that the weight is made of.

    The slices are asked for by several threads, in any order. Each is kept until it is asked for.
    """

    def __init__(self, read: Read, weight_format: WeightFormat, dtype: str) -> None:
        self._read, self._format, self._dtype = read, weight_format, dtype
        self._lock = threading.Lock()  # one thread rounds; the others wait for it
        self._kept: dict[str, Tensor] | None = None
        self._lost: dict[str, Rounding] = {}

    def slice(self, stored: StoredTensor) -> Slice:
        """Returns these rows of one of the weight's tensors."""
        with self._lock:
            if self._kept is None:
                self._kept = self._rounded()
            lost = self._lost if stored.role == QUANTIZED_TENSORS[0] else {}  # counted once
            return Slice(stored, self._kept.pop(stored.role), lost)

    def _rounded(self) -> dict[str, Tensor]:
        """Returns the bytes of each tensor, by its role."""
        runs = self._read()
        for name, run in runs.items():
            _check_finite(name, run)
        whole = torch.cat(list(runs.values()))
        quantized = quantize(whole.T, self._format, self._dtype)
        self._lost = self._measured(runs, quantized)
        tensors = {
            "integers": pack(quantized.values, self._format.bits),
            "scales": quantized.scales.contiguous().view(torch.uint8).flatten(),
        }
        if quantized.zero_points is not None:
            tensors["zero_points"] = pack(quantized.zero_points, self._format.bits)
        return tensors

    def _measured(self, runs: dict[str, Tensor], quantized: Quantized) -> dict[str, Rounding]:
        """Returns what each weight lost.

        Raises:
            CheckpointError: a value is inf once it is dequantized.
        """
        lost, restored = {}, quantized.dequantized().T
        for (name, run), stored in zip(runs.items(), restored.split([len(run) for run in runs.values()]), strict=True):
            if not _is_finite(stored):
                _refuse_size(name, run, stored, self._dtype)
            expected = float(expected_error(run.T, self._format).sum())
            error = sum_of_squares(stored.float() - run.float())
            stored_name = "lm_head.weight" if name == "embedding.weight" else name  # only a tied head is in integers
            lost[stored_name] = Rounding(0, error, sum_of_squares(run.float()), expected)
        return lost


def _converted(stored: StoredTensor, read: Read, buffers: _Buffers) -> Slice:
    """Reads a run of every weight that the tensor holds, and puts them side by side in the tensor's dtype."""
    runs = read()
    dtype = TORCH_DTYPES[stored.dtype]
    shape = (sum(len(run) for run in runs.values()), *next(iter(runs.values())).shape[1:])
    data = buffers.take(math.prod(shape) * dtype.itemsize)
    values = data.view(dtype).view(shape[::-1]).T if stored.transposed else data.view(dtype).view(shape)
    targets = values.split([len(run) for run in runs.values()])
    lost = {
        name: _convert(name, run, target, stored.dtype)
        for (name, run), target in zip(runs.items(), targets, strict=True)
    }
    return Slice(stored, data, lost)


def _reads(
    stored: StoredTensor, config: ModelConfig, weights: WeightSource, n_bytes: int, whole: int = 1
) -> Iterator[Read]:
    """Yields reads of the weights in the dtype and layout of their source, each of `n_bytes` in float32.

    Each read is a run of the stored tensor's rows. The number of rows is a multiple of `whole`, except in the last run.
    """
    if stored.name in ROPE_TABLES:
        yield partial(_read_rope_table, stored.name, config, stored.shape[0] // 2)
        return
    if len(stored.shape) == 1:
        yield partial(_read, stored.weights, weights)
        return
    length, width = stored.shape
    step = max(1, n_bytes // (width * 4 * whole)) * whole
    for start in range(0, length, step):
        run = slice(start, min(start + step, length))  # stored rows are the weight's columns where it is transposed
        yield partial(_read, stored.weights, weights, **({"columns": run} if stored.transposed else {"rows": run}))


def _read_rope_table(name: str, config: ModelConfig, max_positions: int) -> dict[str, Tensor]:
    return {name: torch.from_numpy(rotation_table(config, max_positions)[:, :, ROPE_TABLES.index(name)])}


def _read(names: Sequence[str], weights: WeightSource, **run: slice) -> dict[str, Tensor]:
    return {name: weights.read(name, **run) for name in names}


def _convert(name: str, run: Tensor, target: Tensor, dtype: str) -> Rounding:
    """Writes a run of a weight into `target`, which has that dtype, and returns what was lost.

    Raises:
        CheckpointError: a value is inf or NaN, or becomes so in that dtype.
    """
    lost = Rounding()
    rows = max(1, BLOCK_VALUES * len(run) // run.numel())
    for block, place in zip(run.split(rows), target.split(rows), strict=True):
        between_halves = block.element_size() == place.element_size() == 2 and block.dtype != place.dtype
        source = block.float() if between_halves else block  # twice as fast as torch converts half to half
        converted = source.to(place.dtype)
        if not _is_finite(converted):
            _check_finite(name, block)
            _refuse_size(name, block, converted, dtype)
        place.copy_(converted)
        if block.dtype != place.dtype and place.dtype != torch.float32:  # float32 holds every value of a checkpoint
            n_zero = _count_nonzero(block) - _count_nonzero(converted)
            wide = source.float()
            size = sum_of_squares(wide)
            lost += Rounding(n_zero, sum_of_squares(converted.float().sub_(wide)), size)
    return lost


def _refuse_size(name: str, run: Tensor, stored: Tensor, dtype: str) -> NoReturn:
    n_lost = int((~stored.isfinite()).sum())
    raise CheckpointError(
        f"weight {name}: {n_lost} of its values do not fit {dtype}, "
        f"the largest is {float(run.abs().max()):.3g}; export with dtype bf16 or fp32"
    )


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
    """Counts values except 0 and −0 by their bits without the sign, many times faster than a float comparison."""
    return int(np.count_nonzero(np.left_shift(x.view(_BITS[x.element_size()]).numpy(), 1)))
