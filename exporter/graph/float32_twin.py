"""The float32 twin of a bf16 graph: the same nodes with every bf16 value widened to float32.

onnxruntime's CPU provider has no bf16 kernels, so a bf16 graph is validated there as its twin: weights are rounded to
bf16, as in the bundle, and the arithmetic is float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from exporter.bundle.manifest import DATA_FILE, GRAPH_FILE
from exporter.graph.weight_reader import map_data
from exporter.graph.weight_writer import ALIGNMENT_BYTES
from exporter.spec.dtypes import DTYPES

_BFLOAT16 = DTYPES["bf16"].numpy


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
    with open(folder / DATA_FILE, "wb") as file:
        for tensor in model.graph.initializer:
            if tensor.external_data:
                _widen_external(tensor, data, file)
            elif tensor.data_type == TensorProto.BFLOAT16:
                tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.BFLOAT16:
                attribute.i = TensorProto.FLOAT
    _round_dequantized(model.graph)
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        if value.type.tensor_type.elem_type == TensorProto.BFLOAT16:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    onnx.save(model, folder / GRAPH_FILE)
    return folder / GRAPH_FILE


def _round_dequantized(graph: onnx.GraphProto) -> None:
    """Rounds weights that are made of integers to bf16, as in the graph, before they are widened."""
    nodes = []
    for node in graph.node:
        nodes.append(node)
        if node.op_type == "DequantizeLinear":
            name = node.output[0]
            node.output[0] = f"{name}.exact"
            nodes.append(
                onnx.helper.make_node(
                    "Cast", [f"{name}.exact"], [f"{name}.rounded"], name=f"{name}.rounded", to=TensorProto.BFLOAT16
                )
            )
            nodes.append(
                onnx.helper.make_node("Cast", [f"{name}.rounded"], [name], name=f"{name}.widened", to=TensorProto.FLOAT)
            )
    del graph.node[:]
    graph.node.extend(nodes)


def _widen_external(tensor: TensorProto, data: np.ndarray, file: BinaryIO) -> None:
    where = {entry.key: entry.value for entry in tensor.external_data}
    start, length = int(where["offset"]), int(where["length"])
    raw = np.asarray(data[start : start + length])
    if tensor.data_type == TensorProto.BFLOAT16:
        raw = raw.view(_BFLOAT16).astype(np.float32)
        tensor.data_type = TensorProto.FLOAT
    file.write(bytes(-file.tell() % ALIGNMENT_BYTES))
    new = {"location": DATA_FILE, "offset": file.tell(), "length": raw.nbytes}
    file.write(raw.tobytes())
    del tensor.external_data[:]
    for key, value in new.items():
        tensor.external_data.add(key=key, value=str(value))
