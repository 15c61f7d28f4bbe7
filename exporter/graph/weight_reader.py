"""Reads weights back from a bundle by canonical name, mapped from its data file, also merged and integer weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto
from torch import Tensor

from exporter.bundle.bundle import Bundle
from exporter.bundle.manifest import DATA_FILE, GRAPH_FILE
from exporter.common.errors import BundleError
from exporter.graph.quantize import Quantized, unpack
from exporter.model.weights import TORCH_DTYPES, WeightSource
from exporter.spec.catalogue import ModelConfig
from exporter.spec.dtypes import ONNX_NAMES
from exporter.spec.parameters import ROPE_TABLES, held_weights, renumbered, split_name
from exporter.spec.weight_formats import QUANTIZED_TENSORS, WeightFormat


def map_data(folder: Path) -> np.ndarray:
    """Maps the data file of a bundle as bytes, uint8 [size]; the file of a component without weights is empty.

    The mapping is private, because torch wants writable memory: the file never changes.
    """
    path = folder / DATA_FILE
    return np.memmap(path, dtype=np.uint8, mode="c") if path.stat().st_size else np.zeros(0, np.uint8)


@dataclass(frozen=True)
class WeightPlace:
    """The place of a weight.

    Attributes:
        stored: canonical name of the tensor that holds it.
        outputs: the outputs of that tensor that are the weight's.
    """

    stored: str
    outputs: slice


class GraphWeights:
    """The weights of a graph as a source. A weight is mapped from the data file while its tensor exists; integers are
    dequantized.
    """

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        first_layer: int,
        description: dict,
        weight_format: WeightFormat | None = None,
    ) -> None:
        self.description = description
        self._path, self._format = folder / DATA_FILE, weight_format
        self._tensors: dict[str, TensorProto] = {}
        self._places: dict[str, WeightPlace] = {}
        for tensor in onnx.load(folder / GRAPH_FILE, load_external_data=False).graph.initializer:
            if tensor.external_data and tensor.dims:
                name = renumbered(tensor.name, first_layer)
                self._tensors[name] = tensor
                weight, _, role = name.rpartition(".")
                self._places.update(weight_places(weight if role in QUANTIZED_TENSORS else name, config))
        self.has_own_head = "lm_head.weight" in self._places

    @property
    def names(self) -> Set[str]:
        return self._places.keys()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each weight, [out, in] for projections."""
        shapes = {}
        for name, place in self._places.items():
            integers = self._tensors.get(f"{place.stored}.integers")
            tensor = integers or self._tensors[place.stored]
            outputs, *inputs = tuple(tensor.dims)[:: -1 if integers is not None or _is_transposed(name) else 1]
            shapes[name] = (len(range(outputs)[place.outputs]), *inputs)
        return shapes

    def read(self, name: str, columns: slice = slice(None), rows: slice = slice(None)) -> Tensor:
        place = self._places[name]
        if place.stored not in self._tensors:
            return self._dequantized(place, columns)[rows]
        weight = self._mapped(place.stored)
        if weight.dim() == 1:
            return weight[place.outputs][columns]
        if _is_transposed(name):
            weight = weight.T
        return weight[place.outputs][rows, columns]

    def _dequantized(self, place: WeightPlace, columns: slice) -> Tensor:
        """Returns some inputs of a weight in integers, [out, columns]."""
        assert self._format is not None, "a stored tensor has a role only where the weights have an integer format"
        weight_format = self._format.of(place.stored)
        scales = self._mapped(f"{place.stored}.scales")
        size, shape = weight_format.block_size, (scales.shape[0] * weight_format.block_size, scales.shape[1])
        start, stop, _ = columns.indices(shape[0])
        blocks = slice(start // size, -(-stop // size))

        first, last = (block * size * shape[1] * weight_format.bits // 8 for block in (blocks.start, blocks.stop))
        run = self._raw(self._tensors[f"{place.stored}.integers"])[first:last]
        n_values = (blocks.stop - blocks.start) * size * shape[1]
        values = unpack(run, weight_format.bits, weight_format.symmetric)[:n_values].reshape(-1, shape[1])
        zero_points = None
        if not weight_format.symmetric:
            whole = unpack(self._raw(self._tensors[f"{place.stored}.zero_points"]), weight_format.bits, symmetric=False)
            zero_points = whole[: scales.numel()].reshape(scales.shape)[blocks, place.outputs]
        quantized = Quantized(values[:, place.outputs], scales[blocks, place.outputs], zero_points)
        weight = quantized.dequantized()
        return weight[start - blocks.start * size : stop - blocks.start * size].T

    def _mapped(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        return self._raw(tensor).view(TORCH_DTYPES[ONNX_NAMES[tensor.data_type]]).reshape(tuple(tensor.dims))

    def _raw(self, tensor: TensorProto) -> Tensor:
        where = {entry.key: int(entry.value) for entry in tensor.external_data if entry.key != "location"}
        mapped = np.memmap(self._path, np.uint8, mode="c", offset=where["offset"], shape=(where["length"],))
        return torch.from_numpy(np.asarray(mapped))


class PartedWeights:
    """The weights of several graphs as one source. A name is read from the graph that has it."""

    def __init__(self, parts: Sequence[GraphWeights]) -> None:
        self.description, self.has_own_head = parts[0].description, parts[-1].has_own_head
        self._parts = parts

    def read(self, name: str, columns: slice = slice(None), rows: slice = slice(None)) -> Tensor:
        return next(part for part in self._parts if name in part.names).read(name, columns, rows)


def bundle_weights(bundle: Bundle) -> WeightSource:
    """Returns the weights inside a bundle, mapped from its data files.

    Raises:
        BundleError: a weight or its shape is not the one that the geometry in the manifest needs.
    """
    manifest = bundle.manifest
    parts = [
        GraphWeights(part.folder, manifest.config, manifest.unit.first_layer, manifest.weights, manifest.weight_format)
        for part in bundle.parts
    ]
    found = {name: shape for part in parts for name, shape in part.shapes.items()}
    expected = manifest.spec.weight_shapes
    wrong = sorted(name for name, shape in expected.items() if found.get(name) != shape)
    if wrong:
        got = found.get(wrong[0], "none")
        raise BundleError(
            f"bundle {bundle.folder}: {wrong[0]} has shape {got}, expected {expected[wrong[0]]}, "
            f"as for {len(wrong) - 1} others"
        )
    rows = {found[table][0] for table in ROPE_TABLES if table in found}
    if rows - {2 * manifest.max_positions} or (manifest.unit.kind != "component" and not rows):
        raise BundleError(
            f"bundle {bundle.folder}: its RoPE tables have {sorted(rows)} rows, "
            f"expected {2 * manifest.max_positions}, two a position"
        )
    return parts[0] if len(parts) == 1 else PartedWeights(parts)


def weight_places(stored: str, config: ModelConfig) -> Iterator[tuple[str, WeightPlace]]:
    """Yields the weights that a stored tensor holds, with their places. A tensor outside of the table holds itself.

    Args:
        stored: canonical name of the tensor, such as `blocks.3.attention.qkv_proj.weight`.
        config: the geometry of the model.
    """
    block, name = split_name(stored)
    held = held_weights(name) if block else ()
    if len(held) < 2:
        yield stored, WeightPlace(stored, slice(None))
        return
    ends = accumulate(weight.shape(config)[0] for weight in held)
    for weight, (start, end) in zip(held, pairwise((0, *ends)), strict=True):
        # the last weight takes all that remains, so that its shape shows an extra output
        yield f"{block}.{weight.name}", WeightPlace(stored, slice(start, None if weight == held[-1] else end))


def _is_transposed(name: str) -> bool:
    """Whether a graph stores a weight as [in, out]; for a vector both are the same."""
    return name.startswith("blocks.")
