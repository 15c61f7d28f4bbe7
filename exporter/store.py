"""Writes weights into an assembled graph's external data, one tensor at a time, and reads them back.

Memory: the largest slice, not the model. A tensor above SLICE_BYTES is read and converted a slice of columns at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch import Tensor

from exporter.assemble import ROPE_TABLES, AssembledGraph, StoredTensor
from exporter.bundle import DATA_FILE, GRAPH_FILE
from exporter.catalogue import ModelConfig
from exporter.contract import DTYPES, ONNX_TYPES
from exporter.errors import CheckpointError
from exporter.rope import rotation_table
from exporter.weights import TORCH_DTYPES, WeightSource

ALIGNMENT_BYTES = 4096  # a page: onnxruntime and TensorRT map tensors that start on one
SLICE_BYTES = 256 * 2**20


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
        graph: the assembled graph; its initializers are pointed at the data file.
        weights: where the values come from, by canonical name.
        progress: called with the number of bytes just written.

    Raises:
        CheckpointError: a weight is inf or NaN, or becomes so in the graph's dtype; names the tensor.
    """
    digest, flushed = hashlib.sha256(), {}
    initializers = graph.model.graph.initializers
    offset = 0
    with open(folder / DATA_FILE, "wb") as file:

        def emit(data: memoryview | bytes) -> None:
            file.write(data)
            digest.update(data)
            progress(len(data))

        for stored in graph.stored:
            padding = -offset % ALIGNMENT_BYTES
            emit(bytes(padding))
            offset += padding
            start = file.tell()
            for piece in _chunks(stored, config, weights):
                chunk, n_flushed = _converted(stored, piece)
                emit(memoryview(chunk.contiguous().reshape(-1).view(torch.uint8).numpy()))
                if n_flushed:
                    flushed[stored.weight] = flushed.get(stored.weight, 0) + n_flushed
            length = file.tell() - start
            value = initializers[stored.name]
            value.const_value = ir.ExternalTensor(
                DATA_FILE, offset, length, ir.DataType(ONNX_TYPES[stored.dtype]), shape=ir.Shape(stored.shape), name=stored.name
            )
            offset += length
    model = ir.serde.serialize_model(graph.model).SerializeToString(deterministic=True)
    (folder / GRAPH_FILE).write_bytes(model)
    return WrittenGraph({DATA_FILE: digest.hexdigest(), GRAPH_FILE: hashlib.sha256(model).hexdigest()}, flushed)


def _chunks(stored: StoredTensor, config: ModelConfig, weights: WeightSource) -> Iterator[Tensor]:
    """The stored tensor's rows in file order, in the source's dtype and in pieces of bounded size."""
    if stored.weight in ROPE_TABLES:
        table = rotation_table(config, stored.shape[0] // 2)
        yield torch.from_numpy(table[:, :, ROPE_TABLES.index(stored.weight)])
        return
    if not stored.transposed:
        yield weights.read(stored.weight)
        return
    columns, rows = stored.shape  # of the weight [rows, columns]; a slice of its columns is a run of stored rows
    step = max(1, SLICE_BYTES // (rows * 4))
    for start in range(0, columns, step):
        yield weights.read(stored.weight, slice(start, min(start + step, columns))).T


def _converted(stored: StoredTensor, piece: Tensor) -> tuple[Tensor, int]:
    """A piece in the graph's dtype, and how many of its values became zero on the way."""
    chunk = piece.to(TORCH_DTYPES[stored.dtype])
    n_lost = int((~chunk.isfinite()).sum())
    if n_lost:
        n_bad = int((~piece.isfinite()).sum())
        if n_bad:
            raise CheckpointError(f"weight {stored.weight}: {n_bad} of its values are inf or NaN; the checkpoint is damaged, fetch it again")
        raise CheckpointError(
            f"weight {stored.weight}: {n_lost} of its values do not fit {stored.dtype}, the largest is {float(piece.abs().max()):.3g}; "
            "export with --dtype bf16 or fp32"
        )
    if chunk.dtype == piece.dtype:
        return chunk, 0
    return chunk, int(((chunk == 0) & (piece != 0)).sum())


def map_data(folder: Path) -> np.ndarray:
    """A bundle's data file mapped as bytes, uint8 [size]; a component without weights has an empty one.

    The mapping is private: torch wants writable memory, the file never changes.
    """
    path = folder / DATA_FILE
    return np.memmap(path, dtype=np.uint8, mode="c") if path.stat().st_size else np.zeros(0, np.uint8)


class GraphWeights:
    """A bundle's own weights as a source, mapped from its data file: nothing is copied until it is read.

    Raises (on construction):
        OSError: the data file cannot be mapped.
    """

    def __init__(self, folder: Path, first_layer: int, description: dict) -> None:
        self.description = description
        self._data = map_data(folder)
        self._tensors = {}
        for tensor in onnx.load(folder / GRAPH_FILE, load_external_data=False).graph.initializer:
            if tensor.external_data:
                self._tensors[_canonical(tensor.name, first_layer)] = tensor

    def read(self, name: str, columns: slice = slice(None)) -> Tensor:
        tensor = self._tensors[name]
        where = {entry.key: entry.value for entry in tensor.external_data}
        start, length = int(where["offset"]), int(where["length"])
        dtype = next(key for key, dtype in DTYPES.items() if dtype.onnx == tensor.data_type)
        raw = torch.from_numpy(np.asarray(self._data[start : start + length]))
        weight = raw.view(TORCH_DTYPES[dtype]).reshape(tuple(tensor.dims))
        if name.startswith("blocks.") and weight.dim() == 2:
            weight = weight.T  # stored [in, out]
        return weight[..., columns]


def _canonical(name: str, first_layer: int) -> str:
    parts = name.split(".")
    if parts[0] == "blocks":
        parts[1] = str(int(parts[1]) + first_layer)
    return ".".join(parts)
