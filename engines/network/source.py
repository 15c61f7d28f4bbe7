"""The ONNX file that an engine is built from: read without its weights, checked, its cache capacity fixed."""

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

LARGEST_BYTES = 2**31 - 1  # of a protobuf message
Axes = dict[str, tuple[int | str, ...]]  # tensor name → number or symbol of each axis

_UPPER_LEFT = (
    "TensorRT masks causally from the upper left, query t seeing keys 0 … t only: a decode step over a cache would attend to "
    "position 0 alone, without a warning"
)


def load_source(path: Path) -> onnx.ModelProto:
    """Reads an ONNX file without its external data, and checks that the data it refers to is there.

    Raises:
        BundleError: the file is missing or damaged, a function calls itself, or external data is missing, too short or outside the file's folder.
    """
    if not path.is_file() or not is_text(path):
        raise BundleError(f"{path}: no such file, or a path that is not valid UTF-8")
    if path.stat().st_size > LARGEST_BYTES:
        raise BundleError(
            f"{path}: it has {path.stat().st_size:,} bytes, expected less than 2 GiB as of any ONNX file; keep its weights beside it"
        )
    try:
        model = onnx.load(path, load_external_data=False)
    except DecodeError as error:
        raise BundleError(f"{path}: not an ONNX file, or a damaged one ({error})") from None
    if not model.graph.node:
        raise BundleError(f"{path}: not an ONNX file, or a damaged one (it has no nodes)")
    try:
        tensors = list(_tensors(model))
    except UnicodeError as error:
        raise BundleError(f"{path}: not an ONNX file, or a damaged one ({error})") from None
    for node in model.graph.node:
        if not any(node.output) or (node.op_type == "TensorScatter" and not node.input):
            raise BundleError(
                f"{path}: the node {short(node.name)} ({short(node.op_type)}) reads or makes nothing; the file is damaged"
            )
    for tensor in tensors:
        if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
            _check_external(path, tensor)
    _check_functions(path, model)
    return model


def _check_functions(path: Path, model: onnx.ModelProto) -> None:
    """Refuses functions that lead back to themselves: ONNX has no such, and TensorRT's parser unfolds them until its stack is full.

    Raises:
        BundleError: names one.
    """
    calls = {
        _key(each.domain, each.name): {_key(node.domain, node.op_type) for node in _nodes(each.node)}
        for each in model.functions
    }
    try:
        graphlib.TopologicalSorter(calls).prepare()
    except graphlib.CycleError as error:
        raise BundleError(
            f"{path}: its function {short(error.args[1][0][1])} calls itself, which ONNX does not allow; the file is damaged"
        ) from None


def _key(domain: str, name: str) -> tuple[str, str]:
    return ("" if domain == "ai.onnx" else domain, name)


def _nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """The nodes and those in their subgraphs."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from _nodes(graph.node)


def _tensors(message: Message) -> Iterator[onnx.TensorProto]:
    """Every tensor in a model, wherever the format can hold one: weights, constants, subgraphs, functions.

    Raises:
        UnicodeError: a text on the way is not UTF-8; protobuf hands it out as bytes.
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
    where = {entry.key: entry.value for entry in tensor.external_data}
    location, name = where.get("location", ""), tensor.name[:80]
    data = path.parent / location
    if len(where) != len(tensor.external_data):
        raise BundleError(f"{path}: the place of {name} is given twice; the file is damaged")
    if (
        not location
        or "\0" in location
        or Path(location).is_absolute()
        or ".." in Path(location).parts
        or not is_inside(data, path.parent)
    ):
        raise BundleError(f"{path}: the data of {name} is at {location[:80]!r}, expected a file in the same folder")
    if not data.is_file():
        raise BundleError(f"{path}: the data of {name} is missing: no {location} beside it; restore it or export again")
    size = data.stat().st_size
    offset, length = _place(path, name, where, "offset", 0), _place(path, name, where, "length", size)
    if size < offset + length:
        raise BundleError(
            f"{path}: {location} has {size:,} bytes and {name} ends at {offset + length:,}; it was truncated"
        )


def _place(path: Path, name: str, where: dict[str, str], key: str, default: int) -> int:
    text = where.get(key)
    if text is None:
        return default if key == "offset" else default - _place(path, name, where, "offset", 0)
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise BundleError(f"{path}: the {key} of {name} is {short(text)}, expected a whole number; the file is damaged")
    return int(text)


def input_axes(model: onnx.ModelProto) -> Axes:
    """The axes of every graph input: numbers, and symbols by name ("" where an axis is dynamic and has none)."""
    return {
        value.name: tuple(
            dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in value.type.tensor_type.shape.dim
        )
        for value in model.graph.input
    }


def check_cache_axes(path: Path, model: onnx.ModelProto) -> None:
    """Refuses cache updates of inputs that still have a dynamic axis beside the batch; TensorRT's cache update has none.

    Raises:
        CheckFailed: names each such input and its axes.
    """
    axes = input_axes(model)
    caches = [node.input[0] for node in model.graph.node if node.op_type == "TensorScatter" and node.input[0] in axes]
    problems = [
        f"{name}: got axes {list(axes[name])}"
        for name in caches
        if any(isinstance(axis, str) for axis in axes[name][1:])
    ]
    if problems:
        raise CheckFailed(
            f"{path}: TensorRT updates only caches of a fixed capacity, expected a number at every axis but the batch; name the axis "
            f"{CAPACITY} and give --cache-capacity:\n  " + "\n  ".join(problems)
        )


def check_attention_nodes(path: Path, model: onnx.ModelProto) -> None:
    """Refuses Attention nodes that TensorRT's parser rejects, or accepts and computes differently from the standard.

    Raises:
        CheckFailed: lists every such node with what TensorRT would have done.
    """
    problems = [
        f"{node.name or node.output[0]}: {reason}"
        for node in model.graph.node
        if node.op_type == "Attention"
        for reason in _misread(node, model.graph)
    ]
    if problems:
        raise CheckFailed(f"{path}: TensorRT would not compute what this graph says:\n  " + "\n  ".join(problems))


def _misread(node: onnx.NodeProto, graph: onnx.GraphProto) -> list[str]:
    inputs = list(node.input) + [""] * (7 - len(node.input))
    attributes = {attribute.name: attribute for attribute in node.attribute}
    problems = []
    if inputs[6]:
        problems.append(
            f"it has nonpad_kv_seqlen, which TensorRT's parser drops; use an explicit mask. With is_causal, {_UPPER_LEFT}"
        )
    if inputs[4] or inputs[5]:
        problems.append(
            "it has past inputs, which TensorRT's parser refuses; update the cache with TensorScatter and pass all keys"
        )
    if len(node.output) > 1:
        problems.append(
            f"it has {len(node.output)} outputs, of which TensorRT's parser allows one; compute present outside"
        )
    for name in ("softcap", "softmax_precision"):
        if name in attributes and (name != "softcap" or attributes[name].f):
            problems.append(f"it has {name}, which TensorRT's parser refuses")
    if "is_causal" in attributes and attributes["is_causal"].i and not inputs[6] and not _equal_lengths(inputs, graph):
        problems.append(
            f"it has is_causal over keys that may be longer than the queries; {_UPPER_LEFT}; use an explicit mask"
        )
    return problems


def _equal_lengths(inputs: list[str], graph: onnx.GraphProto) -> bool:
    """Whether queries and keys are known to have the same length, where upper-left and lower-right masks agree."""
    lengths = []
    for value in (*graph.input, *graph.value_info):
        dims = value.type.tensor_type.shape.dim
        if value.name in inputs[:2] and len(dims) in (3, 4):
            length = dims[-2]
            lengths.append((value.name, length.dim_param or length.dim_value))
    return (
        len({name for name, _ in lengths}) == len(set(inputs[:2]))
        and len({length for _, length in lengths}) == 1
        and bool(lengths[0][1])
    )
