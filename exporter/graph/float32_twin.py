"""The float32 twin of a graph: the same nodes over the same stored weights, with every half value widened to float32.

Validation runs it to answer whether a graph means what the definition means: in float32, a right graph agrees to
rounding, and a wrong one misses by orders of magnitude. Weights keep the values that the graph's own dtype gave them.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from exporter.bundle.manifest import DATA_FILE, GRAPH_FILE
from exporter.graph.weight_reader import map_data
from exporter.graph.weight_writer import ALIGNMENT_BYTES
from exporter.spec.dtypes import DTYPES

_HALVES = {dtype.onnx: dtype.numpy for dtype in DTYPES.values() if dtype.n_bytes == 2}  # ONNX type → numpy's
_RUN_BYTES = 32 * 2**20  # a weight is widened in runs of this size, so that memory does not follow the largest weight


def float32_twin(bundle_folder: Path, scratch: Path) -> Path:
    """Returns the path of a graph's twin, and writes it into its own folder in `scratch` the first time."""
    folder = scratch / f"{bundle_folder.name}.twin"
    if folder.is_dir():
        return folder / GRAPH_FILE
    folder.mkdir()
    return widen_model(onnx.load(bundle_folder / GRAPH_FILE, load_external_data=False), bundle_folder, folder)


def widen_model(model: onnx.ModelProto, data_folder: Path, folder: Path) -> Path:
    """Writes the twin of a model, or of a part of it, whose data is in `data_folder`; the model is changed."""
    data = map_data(data_folder)
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    with open(folder / DATA_FILE, "wb") as file:
        for tensor in model.graph.initializer:
            if tensor.external_data:
                _widen_external(tensor, data, file)
            elif tensor.data_type in _HALVES:
                tensor.CopyFrom(_widened(tensor))
    _round_dequantized(model.graph, types)
    for node in model.graph.node:
        _widen_attributes(node)
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        if value.type.tensor_type.elem_type in _HALVES:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    onnx.save(model, folder / GRAPH_FILE)
    return folder / GRAPH_FILE


def _widened(tensor: TensorProto) -> TensorProto:
    return numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name)


def _widen_attributes(node: NodeProto) -> None:
    """Casts to half become casts to float32, and constants in half become float32."""
    if node.name.endswith(_ROUNDED):
        return
    for attribute in node.attribute:
        if attribute.name in ("to", "dtype") and attribute.i in _HALVES:
            attribute.i = TensorProto.FLOAT
        if attribute.HasField("t") and attribute.t.data_type in _HALVES:
            attribute.t.CopyFrom(_widened(attribute.t))


_ROUNDED = "/twin.rounded"


def _round_dequantized(graph: onnx.GraphProto, types: dict[str, int]) -> None:
    """Rounds weights that are made of integers to the graph's dtype, as in the graph, before they are widened.

    Args:
        graph: the graph; it is changed.
        types: ONNX type of each initializer before it was widened. A weight has the type of its scales.
    """
    nodes = []
    for node in graph.node:
        nodes.append(node)
        kind = types.get(node.input[1]) if node.op_type == "DequantizeLinear" else None
        if kind in _HALVES:
            name = node.output[0]
            exact, rounded = f"{name}/twin.exact", name + _ROUNDED
            node.output[0] = exact
            nodes.append(helper.make_node("Cast", [exact], [rounded], name=rounded, to=kind))
            nodes.append(helper.make_node("Cast", [rounded], [name], name=f"{name}/twin.widened", to=TensorProto.FLOAT))
    del graph.node[:]
    graph.node.extend(nodes)


def _widen_external(tensor: TensorProto, data: np.ndarray, file: BinaryIO) -> None:
    where = {entry.key: entry.value for entry in tensor.external_data}
    start, length = int(where["offset"]), int(where["length"])
    half = _HALVES.get(tensor.data_type)
    file.write(bytes(-file.tell() % ALIGNMENT_BYTES))
    offset = file.tell()
    for first in range(start, start + length, _RUN_BYTES):
        run = np.asarray(data[first : min(first + _RUN_BYTES, start + length)])
        file.write(run.view(half).astype(np.float32).data if half is not None else run.data)
    if half is not None:
        tensor.data_type = TensorProto.FLOAT
    del tensor.external_data[:]
    for key, value in {"location": DATA_FILE, "offset": offset, "length": file.tell() - offset}.items():
        tensor.external_data.add(key=key, value=str(value))
