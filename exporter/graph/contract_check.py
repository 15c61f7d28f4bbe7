"""Checks a finished graph file against its contract: inputs and outputs, and the operators that both engines need."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import GraphProto, NodeProto

from exporter.bundle.manifest import DATA_FILE
from exporter.common.errors import CheckFailed
from exporter.spec.dtypes import ONNX_NAMES, ONNX_TYPES, stored_bytes
from exporter.spec.tensors import OPSET, Contract, TensorSpec


def check_graph(path: Path, contract: Contract) -> None:
    """Checks names, dtypes, axes, opset, operators, the cache's path and the attention mask of a graph file.

    Raises:
        CheckFailed: the message lists every problem once.
    """
    problems = graph_problems(path, contract)
    if problems:
        raise CheckFailed(f"{path}: the graph breaks its contract:\n  " + "\n  ".join(problems))


def graph_problems(path: Path, contract: Contract, trusted: bool = True) -> list[str]:
    """Returns every difference between a graph file and its contract. A file that cannot be read is one problem.

    Args:
        path: the graph file.
        contract: the contract of the graph.
        trusted: whether the graph has the form of an export; onnx's own checker sees no other graph.
    """
    try:
        model = onnx.load(path, load_external_data=False)
    except (DecodeError, OSError) as error:
        return [f"it cannot be read as ONNX ({error})"]
    if any(not node.input or not node.output for node in model.graph.node):
        return ["a node reads or makes nothing"]
    return [
        *(_validity_problems(path) if trusted else []),
        *_opset_problems(model),
        *_interface_problems("input", model.graph.input, contract.inputs),
        *_interface_problems("output", model.graph.output, contract.outputs),
        *_node_problems(model.graph, contract),
        *_data_problems(path.parent / DATA_FILE, model.graph),
    ]


def _validity_problems(path: Path) -> list[str]:
    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        return [f"not valid ONNX: {str(error).strip().splitlines()[0]}"]
    return []


def _data_problems(data: Path, graph: GraphProto) -> list[str]:
    """Weights must be in the data file beside the graph, each within its bounds and as large as its shape."""
    size, problems = data.stat().st_size if data.is_file() else 0, []
    for tensor in graph.initializer:
        where = {entry.key: entry.value for entry in tensor.external_data}
        if not where:
            continue
        places = [where.get(key, "0") for key in ("offset", "length")]
        if not all(place.isascii() and place.isdigit() for place in places) or tensor.data_type not in ONNX_NAMES:
            problems.append(
                f"{tensor.name}: type {tensor.data_type} at {places}, expected a type of an export at a number of bytes"
            )
            continue
        offset, length = map(int, places)
        expected = stored_bytes(ONNX_NAMES[tensor.data_type], tensor.dims)
        if where.get("location") != data.name:
            problems.append(f"{tensor.name}: its data is in {where.get('location')!r}, expected {data.name}")
        elif length != expected or offset + length > size:
            got = f"bytes {offset:,} to {offset + length:,} of {data.name}"
            problems.append(f"{tensor.name}: {got}, expected {expected:,} of its {size:,}")
    return problems


def _opset_problems(model: onnx.ModelProto) -> list[str]:
    imports = {entry.domain: entry.version for entry in model.opset_import}
    problems = (
        [] if imports == {"": OPSET} else [f"opset imports: got {imports}, expected the default domain at {OPSET} only"]
    )
    if model.functions:
        problems.append(f"functions: got {[f.name for f in model.functions]}, expected none")
    return problems


def _interface_problems(kind: str, values: Iterable[onnx.ValueInfoProto], specs: tuple[TensorSpec, ...]) -> list[str]:
    got = [(value.name, value.type.tensor_type.elem_type, _axes(value)) for value in values]
    expected = [(spec.name, ONNX_TYPES[spec.dtype], spec.axes) for spec in specs]
    return [f"{kind}s: got {a}, expected {b}" for a, b in zip(got, expected, strict=False) if a != b] + (
        [f"{kind}s: got {len(got)}, expected {len(expected)}"] if len(got) != len(expected) else []
    )


def _axes(value: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    return tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim)


def _node_problems(graph: GraphProto, contract: Contract) -> list[str]:
    producer = {output: node for node in graph.node for output in node.output}
    problems = [
        f"{node.name}: operator {node.domain}::{node.op_type}, expected the default domain"
        for node in graph.node
        if node.domain
    ]
    for node in graph.node:
        if node.op_type == "Attention":
            problems += _attention_problems(node, producer, contract)
    scattered = {(node.input[0], node.output[0]) for node in graph.node if node.op_type == "TensorScatter"}
    if scattered != set(contract.cache_pairs):
        expected = f"one TensorScatter for each of {list(contract.cache_pairs)}"
        problems.append(f"cache updates: got {sorted(scattered)}, expected {expected}")
    return problems


def _attention_problems(node: NodeProto, producer: dict[str, NodeProto], contract: Contract) -> list[str]:
    """TensorRT's parser drops or refuses every form except one: explicit mask, no past, one output."""
    problems = []
    if len(node.input) != 4 or not all(node.input):
        problems.append(
            f"{node.name}: got inputs {list(node.input)}, expected queries, keys, values and an explicit mask"
        )
    if len(node.output) != 1:
        problems.append(f"{node.name}: got outputs {list(node.output)}, expected one")
    forbidden = sorted(
        a.name
        for a in node.attribute
        if a.name in ("is_causal", "softcap", "softmax_precision", "qk_matmul_output_mode")
    )
    if forbidden:
        problems.append(f"{node.name}: got attributes {forbidden}, expected none of them")
    presents = {present for _, present in contract.cache_pairs}
    for source in node.input[1:3] if presents else []:
        while source in producer and producer[source].op_type in ("Slice", "Cast"):
            source = producer[source].input[0]
        if source not in presents:
            problems.append(
                f"{node.name}: reads {source}, expected a slice of a present cache tensor and no copy of it"
            )
    return problems
