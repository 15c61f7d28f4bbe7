"""`model.c<capacity>.onnx`: the graph of a bundle with a fixed cache capacity, for engines and other tools."""

from __future__ import annotations

from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from exporter.spec.tensors import CAPACITY


def fix_capacity(model: onnx.ModelProto, capacity: int) -> None:
    """Makes `cache_capacity` a number in every input and output; TensorRT's cache update needs it static.

    Inferred shapes inside the graph are dropped, because they would still have the symbol.
    """
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == CAPACITY:
                dim.dim_value = capacity
    del model.graph.value_info[:]


def fixed_graph_problem(path: Path, source: Path, capacity: int) -> str | None:
    """Returns the problem of a file that should be the graph at `source` with a fixed capacity, or None.

    Args:
        path: the file.
        source: the graph, which can be read.
        capacity: the cache capacity.
    """
    if not path.is_file():
        return "it is missing; build again"
    expected = onnx.load(source, load_external_data=False)
    fix_capacity(expected, capacity)
    try:
        same = onnx.load(path, load_external_data=False) == expected
    except DecodeError:
        same = False
    return None if same else f"it is not {source.name} with {CAPACITY} fixed at {capacity}; build again"
