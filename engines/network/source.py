"""Reads the ONNX file that an engine is built from, without its weights, and checks it before TensorRT parses it.

Two kinds of checks are here:

* `load_source` checks the form of an untrusted file. A damaged or hostile file never reaches TensorRT. The graph of a
  bundle passes a stricter check first, in `exporter.bundle.graph_form`.
* `check_cache_axes` and `check_attention_nodes` check the content of a valid graph: TensorRT must be able to compute it
  as ONNX defines it.

`engines.network.network_checks` checks the parsed network against our contract.
"""

from __future__ import annotations

import graphlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError, Message

from exporter.common.documents import is_inside, is_text
from exporter.common.errors import BundleError, CheckFailed
from exporter.spec.catalogue import short
from exporter.spec.tensors import CAPACITY

LARGEST_BYTES = 2**31 - 1  # limit of a protobuf message
DAMAGED = "not an ONNX file, or a damaged one"
Axes = dict[str, tuple[int | str, ...]]  # tensor name → number or symbol of each axis

_UPPER_LEFT = (
    "TensorRT aligns a causal mask to the upper left, so that query t sees keys 0 … t only: "
    "a decode step over a cache would attend to position 0 alone, without a warning"
)


def load_source(path: Path) -> onnx.ModelProto:
    """Reads an ONNX file without its external data, and checks its form. The file may be untrusted.

    Raises:
        BundleError: the file is missing or damaged, a function calls itself, or external data is missing, too short or
            outside of the file's folder.
    """
    if not path.is_file() or not is_text(path):
        raise BundleError(f"{path}: no such file, or a path that is not valid UTF-8")
    size = path.stat().st_size
    if size > LARGEST_BYTES:
        problem = f"got {size:,} bytes, expected less than 2 GiB, the limit of an ONNX file"
        raise BundleError(f"{path}: {problem}; keep its weights in a file beside it")
    try:
        model = onnx.load(path, load_external_data=False)
        tensors = list(_tensors(model))
    except (DecodeError, UnicodeError) as error:
        raise BundleError(f"{path}: {DAMAGED} ({error})") from None
    if not model.graph.node:
        raise BundleError(f"{path}: {DAMAGED} (it has no nodes)")
    for node in model.graph.node:
        if not any(node.output) or (node.op_type == "TensorScatter" and not node.input):
            name = f"{short(node.name)} ({short(node.op_type)})"
            raise BundleError(f"{path}: the node {name} reads or makes nothing; the file is damaged")
    for tensor in tensors:
        if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
            _check_external(path, tensor)
    _check_functions(path, model)
    return model


def data_files(model: onnx.ModelProto) -> set[str]:
    """Returns the names of the files with external data of a model, of all tensors in it."""
    entries = (entry for tensor in _tensors(model) for entry in tensor.external_data)
    return {entry.value for entry in entries if entry.key == "location"}


def _check_functions(path: Path, model: onnx.ModelProto) -> None:
    """Checks that no function calls itself. ONNX does not allow it, and TensorRT's parser would expand it forever.

    Raises:
        BundleError: one does; the message has its name.
    """
    calls = {
        _key(each.domain, each.name): {_key(node.domain, node.op_type) for node in _nodes(each.node)}
        for each in model.functions
    }
    try:
        graphlib.TopologicalSorter(calls).prepare()
    except graphlib.CycleError as error:
        problem = f"its function {short(error.args[1][0][1])} calls itself, which ONNX does not allow"
        raise BundleError(f"{path}: {problem}; the file is damaged") from None


def _key(domain: str, name: str) -> tuple[str, str]:
    """The name of a function or operator; "" and "ai.onnx" are the same domain."""
    return ("" if domain == "ai.onnx" else domain, name)


def _nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """The nodes and the nodes in their subgraphs."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from _nodes(graph.node)


def _tensors(message: Message) -> Iterator[onnx.TensorProto]:
    """Every tensor in a model: weights, constants, and those in subgraphs and functions.

    Raises:
        UnicodeError: a text in the model is not UTF-8; protobuf then gives bytes.
    """
    for descriptor, value in message.ListFields():
        if descriptor.type not in (descriptor.TYPE_MESSAGE, descriptor.TYPE_STRING):
            continue
        for inner in [value] if isinstance(value, Message | str | bytes) else value:
            if isinstance(inner, onnx.TensorProto):
                yield inner
            if isinstance(inner, Message):
                yield from _tensors(inner)
            elif isinstance(inner, bytes):
                raise UnicodeError(f"{descriptor.name} is no text")


def _check_external(path: Path, tensor: onnx.TensorProto) -> None:
    """Checks that the external data of a tensor is complete and inside the file's folder.

    Raises:
        BundleError: it is missing, too short, outside of the folder, or its place is unreadable.
    """
    where = {entry.key: entry.value for entry in tensor.external_data}
    location, name = where.get("location", ""), tensor.name[:80]
    data = path.parent / location
    if len(where) != len(tensor.external_data):
        raise BundleError(f"{path}: the place of {name} is given twice; the file is damaged")
    plain = location and "\0" not in location and not Path(location).is_absolute() and ".." not in Path(location).parts
    if not plain or not is_inside(data, path.parent):
        raise BundleError(f"{path}: the data of {name} is at {location[:80]!r}, expected a file in the same folder")
    if not data.is_file():
        raise BundleError(f"{path}: the data of {name} is missing: no {location} beside it; restore it or export again")
    size = data.stat().st_size
    offset, length = _place(path, name, where, "offset", 0), _place(path, name, where, "length", size)
    if size < offset + length:
        problem = f"{location} has {size:,} bytes and {name} ends at {offset + length:,}"
        raise BundleError(f"{path}: {problem}; it was truncated")


def _place(path: Path, name: str, where: dict[str, str], key: str, default: int) -> int:
    """Reads the offset or the length of external data. A missing length means the rest of the file."""
    text = where.get(key)
    if text is None:
        return default if key == "offset" else default - _place(path, name, where, "offset", 0)
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise BundleError(f"{path}: the {key} of {name} is {short(text)}, expected a whole number; the file is damaged")
    return int(text)


def input_axes(model: onnx.ModelProto) -> Axes:
    """The axes of every graph input: numbers, or names of symbols. A dynamic axis without a name is ""."""
    return {
        value.name: tuple(
            dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in value.type.tensor_type.shape.dim
        )
        for value in model.graph.input
    }


def cache_rows(model: onnx.ModelProto) -> dict[str, int]:
    """The rows per sequence of every cache that is updated in place and has a fixed capacity, by input name."""
    axes, rows = input_axes(model), {}
    for node in model.graph.node:
        shape = axes.get(node.input[0], ()) if node.op_type == "TensorScatter" else ()
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), -2)
        size = shape[axis] if -len(shape) <= axis < len(shape) else None
        if isinstance(size, int):
            rows[node.input[0]] = size
    return rows


def check_cache_axes(path: Path, model: onnx.ModelProto) -> None:
    """Checks that every cache has a fixed size on every axis but the batch, as TensorRT's cache update needs it.

    Raises:
        CheckFailed: a cache has another dynamic axis; the message has each such input and its axes.
    """
    axes = input_axes(model)
    scatters = [node.input[0] for node in model.graph.node if node.op_type == "TensorScatter"]
    dynamic = [name for name in scatters if any(isinstance(axis, str) for axis in axes.get(name, ())[1:])]
    if dynamic:
        problem = "TensorRT updates only caches of a fixed capacity, expected a number for every axis but the batch"
        fix = f"name the axis {CAPACITY!r} and give cache_capacity"
        lines = [f"{name}: got axes {list(axes[name])}" for name in dynamic]
        raise CheckFailed("\n  ".join([f"{path}: {problem}; {fix}:", *lines]))


def check_attention_nodes(path: Path, model: onnx.ModelProto) -> None:
    """Checks that TensorRT computes every Attention node as ONNX defines it.

    Raises:
        CheckFailed: TensorRT's parser would refuse a node or compute something else; the message has every such node.
    """
    problems = [
        f"{node.name or node.output[0]}: {reason}"
        for node in model.graph.node
        if node.op_type == "Attention"
        for reason in _attention_problems(node, model.graph)
    ]
    if problems:
        raise CheckFailed(
            f"{path}: TensorRT would compute something else than this graph says:\n  " + "\n  ".join(problems)
        )


def _attention_problems(node: onnx.NodeProto, graph: onnx.GraphProto) -> list[str]:
    """What TensorRT's parser refuses or changes in an Attention node."""
    inputs = list(node.input) + [""] * (7 - len(node.input))
    attributes = {attribute.name: attribute for attribute in node.attribute}
    problems = []
    if inputs[6]:
        problem = "it has nonpad_kv_seqlen, which TensorRT's parser drops; use an explicit mask"
        problems.append(f"{problem}. With is_causal, {_UPPER_LEFT}")
    if inputs[4] or inputs[5]:
        fix = "update the cache with TensorScatter and pass all keys"
        problems.append(f"it has past inputs, which TensorRT's parser refuses; {fix}")
    if len(node.output) > 1:
        fix = "compute present outside of the node"
        problems.append(f"it has {len(node.output)} outputs, TensorRT's parser allows one; {fix}")
    for name in ("softcap", "softmax_precision"):
        if name in attributes and (name != "softcap" or attributes[name].f):
            problems.append(f"it has {name}, which TensorRT's parser refuses")
    if "is_causal" in attributes and attributes["is_causal"].i and not inputs[6] and not _equal_lengths(inputs, graph):
        problem = "it has is_causal, and there may be more keys than queries"
        problems.append(f"{problem}; {_UPPER_LEFT}; use an explicit mask")
    return problems


def _equal_lengths(inputs: list[str], graph: onnx.GraphProto) -> bool:
    """Whether queries and keys surely have the same length. Then upper-left and lower-right masks are equal."""
    lengths = []
    for value in (*graph.input, *graph.value_info):
        dims = value.type.tensor_type.shape.dim
        if value.name in inputs[:2] and len(dims) in (3, 4):
            length = dims[-2]
            lengths.append((value.name, length.dim_param or length.dim_value))
    all_known = len({name for name, _ in lengths}) == len(set(inputs[:2]))
    return all_known and len({length for _, length in lengths}) == 1 and bool(lengths[0][1])
