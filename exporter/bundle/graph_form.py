"""Holds a bundle's graph file against the form of this project's exports, before any library parses it.

A bundle may come from a stranger, and ONNX can say a great deal: data read from any path, code of other domains, loops, tensors
larger than their data. Runtimes written in C++ meet such files with anything from an error to a crash. An export uses a
small part of the format, so everything outside of that part is refused here, by a reader that needs neither onnx nor protobuf.

What this does not bound is the memory of a graph that was made by hand out of allowed operators: a chain of outer products
grows without a large number in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from exporter.bundle.manifest import DATA_FILE, Manifest
from exporter.common.wire import BYTES, FIXED32, VARINT, Field, fields, int64s, signed, text
from exporter.spec.dtypes import DTYPES, ONNX_NAMES, ONNX_TYPES, stored_bytes
from exporter.spec.tensors import OPSET, TensorSpec
from exporter.spec.weight_formats import QUANTIZED_TENSORS, WEIGHT_FORMATS

# Every operator that an export consists of. None of them runs code, holds a graph, or reads anything but its inputs.
OPERATORS = {
    "Add", "And", "Attention", "Cast", "Clip", "Concat", "DequantizeLinear", "Equal", "Expand", "Gather", "GatherElements", "GatherND", "Gemm",
    "Less", "LessOrEqual", "MatMul", "Mul", "Not", "Or", "Range", "ReduceMax", "Reshape", "RMSNormalization", "RotaryEmbedding", "Shape", "Sigmoid",
    "Slice", "Split", "Squeeze", "Sub", "TensorScatter", "Transpose", "Unsqueeze", "Where",
}  # fmt: skip
BYTES_PER_LAYER = 64 * 1024  # an export has about 9 kB a layer
NODES_PER_LAYER = 128  # an export has about 35
EDGE_LAYERS = 8  # what comes before and after the layers counts as so many
INT64 = ONNX_TYPES["int64"]
_ATTRIBUTE_FIELDS = {1: 2, 2: 3, 7: 8}  # type → the field that holds it: a float, a whole number, whole numbers
_HELD = {INT64, *(ONNX_TYPES[name] for name in (*DTYPES, *WEIGHT_FORMATS))}  # what an initializer may be of


@dataclass
class _Tensor:
    """One initializer: where its bytes lie, and whether they are as many as its dims and type say."""

    name: str = ""
    kind: int = 0
    dims: list[int] = field(default_factory=list)
    raw: memoryview | None = None
    external: dict[str, str] = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        return stored_bytes(ONNX_NAMES[self.kind], self.dims)


@dataclass
class _Node:
    """One node: what it reads and makes, and its attributes, of which only whole numbers have a value here."""

    operator: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    attributes: dict[str, int | None] = field(default_factory=dict)


def check_graph_form(path: Path, manifest: Manifest) -> None:
    """Refuses a graph file that is not of the form that exports have; nothing but it and its data file's size is looked at.

    Args:
        path: of the graph; its weights lie in the data file beside it.
        manifest: of the bundle, or of the part that the graph is: the tensors it must have, its weight format, and the bound of all
            whole numbers that shapes are made of.

    Raises:
        ValueError: says what was found.
    """
    n_layers = len(manifest.contract.inputs) // 2 + EDGE_LAYERS
    size = path.stat().st_size
    if size > BYTES_PER_LAYER * n_layers:
        raise ValueError(
            f"it has {size:,} bytes, expected at most {BYTES_PER_LAYER * n_layers:,} for a graph of these inputs"
        )
    try:
        _Form(manifest, (path.parent / DATA_FILE).stat().st_size, NODES_PER_LAYER * n_layers).model(
            memoryview(path.read_bytes())
        )
    except ValueError as error:
        raise ValueError(f"it is not a graph as an export writes it ({str(error)[:300]})") from None


class _Form:
    """The form, one method a message of the format; each raises ValueError with what is wrong."""

    def __init__(self, manifest: Manifest, data_bytes: int, most_nodes: int) -> None:
        self._manifest, self._contract, self._largest = manifest, manifest.contract, manifest.largest_number
        self._data_bytes, self._most_nodes = data_bytes, most_nodes

    def model(self, data: memoryview) -> None:
        graphs, opsets = [], []
        for number, kind, value in _allowed("model", data, {1, 2, 3, 7, 8}):
            if number == 7:
                graphs.append(_message(kind, value))
            elif number == 8:
                opsets.append(
                    {
                        n: text(k, v) if n == 1 else _number(k, v)
                        for n, k, v in _allowed("opset", _message(kind, value), {1, 2})
                    }
                )
        if len(graphs) != 1 or [(o.get(1, ""), o.get(2)) for o in opsets] != [("", OPSET)]:
            raise ValueError(
                f"{len(graphs)} graphs and operator sets {opsets}, expected one graph at the default domain's {OPSET}"
            )
        self._graph(graphs[0])

    def _graph(self, data: memoryview) -> None:
        nodes, tensors = list[_Node](), list[_Tensor]()
        values: dict[int, list[TensorSpec]] = {11: [], 12: [], 13: []}
        for number, kind, value in _allowed("graph", data, {1, 2, 5, 11, 12, 13}):
            if number == 1:
                nodes.append(_node(_message(kind, value)))
            elif number == 5:
                tensors.append(self._tensor(_message(kind, value)))
            elif number in values:
                values[number].append(_value(_message(kind, value)))
            if max(len(nodes), len(tensors), len(values[13])) > self._most_nodes:
                raise ValueError(
                    f"over {self._most_nodes} nodes, weights or values, more than a graph of these inputs has"
                )
        ends = [_decimal(tensor.external["offset"]) + tensor.n_bytes for tensor in tensors if tensor.external]
        if max(ends, default=0) != self._data_bytes:
            raise ValueError(
                f"its weights end at {max(ends, default=0):,}, expected {self._data_bytes:,}, the end of {DATA_FILE}"
            )
        for what, number, specs in (("inputs", 11, self._contract.inputs), ("outputs", 12, self._contract.outputs)):
            if values[number] != list(specs):
                raise ValueError(f"its {what} are not those of the manifest")
        self._check_numbers(nodes, tensors)
        self._wiring(nodes, [spec.name for spec in self._contract.inputs] + [tensor.name for tensor in tensors])
        self._weights_in_integers(nodes, {tensor.name: tensor for tensor in tensors})

    def _weights_in_integers(self, nodes: list[_Node], tensors: dict[str, _Tensor]) -> None:
        """Each is made by one DequantizeLinear of tensors that nothing else reads, and there are no such tensors besides."""
        own = {part for node in nodes if node.operator == "DequantizeLinear" for part in self._parts(node, tensors)}
        read_elsewhere = own.intersection(
            name for node in nodes if node.operator != "DequantizeLinear" for name in node.inputs
        )
        if read_elsewhere:
            raise ValueError(
                f"{min(read_elsewhere)[:80]} is read by another node than the DequantizeLinear that it belongs to"
            )
        for name in tensors.keys() - own:
            if ONNX_NAMES[tensors[name].kind] in WEIGHT_FORMATS or name.rpartition(".")[2] in QUANTIZED_TENSORS:
                raise ValueError(f"{name[:80]} is part of a weight in integers, and no DequantizeLinear reads it")

    def _parts(self, node: _Node, tensors: dict[str, _Tensor]) -> list[str]:
        """The names of the tensors that a DequantizeLinear makes a weight of: those of its own name, as the weight format has them."""
        name, weight_format = node.outputs[0], self._manifest.weight_format
        if weight_format is None:
            raise ValueError(f"{name[:80]} is made of integers, and the manifest has no weight_format")
        weight_format = weight_format.of(name)
        integers = tensors.get(f"{name}.integers", _Tensor()).dims
        if len(integers) != 2 or integers[0] % weight_format.block_size:
            raise ValueError(
                f"{name[:80]}.integers: dims {integers[:8]}, expected a matrix of whole blocks of {weight_format.block_size}"
            )
        expected = {
            f"{name}.{part}": tensor
            for part, tensor in weight_format.tensors((integers[0], integers[1]), self._manifest.dtype).items()
        }
        if node.inputs != list(expected) or len(node.outputs) != 1:
            raise ValueError(f"{name[:80]} is made of {node.inputs[:4]}, expected {list(expected)}")
        attributes = {"axis": 0, "block_size": weight_format.block_size}
        if node.attributes != attributes:
            raise ValueError(f"{name[:80]} is made with {node.attributes}, expected {attributes}")
        for part, (dtype, shape) in expected.items():
            tensor = tensors.get(part, _Tensor())
            if (ONNX_NAMES.get(tensor.kind), tuple(tensor.dims)) != (dtype, shape) or not tensor.external:
                got = f"{ONNX_NAMES.get(tensor.kind, 'nothing')} {tensor.dims[:8]}{'' if tensor.external else ' in the graph'}"
                raise ValueError(f"{part[:80]}: {got}, expected {dtype} {list(shape)} in {DATA_FILE}")
        return list(expected)

    def _wiring(self, nodes: list[_Node], given: list[str]) -> None:
        """Every name is made once, before it is read, so that the graph has no cycle."""
        known = set(given)
        if len(known) != len(given) or "" in known:
            raise ValueError("two inputs or weights of one name")
        for node in nodes:
            missing = [name for name in node.inputs if name and name not in known]
            if missing or known.intersection(node.outputs) or "" in node.outputs or not node.outputs:
                raise ValueError(
                    f"a node reads {missing[:3]} and makes {node.outputs[:3]}: each value is made once and then read"
                )
            known.update(node.outputs)
        if not known.issuperset(spec.name for spec in self._contract.outputs):
            raise ValueError("no node makes some of its outputs")

    def _tensor(self, data: memoryview) -> _Tensor:
        tensor = _Tensor()
        for number, kind, value in _allowed("weight", data, {1, 2, 8, 9, 13, 14}):
            if number == 1:
                tensor.dims += int64s(kind, value)
            elif number == 2:
                tensor.kind = _number(kind, value)
            elif number == 8:
                tensor.name = text(kind, value)
            elif number == 9:
                tensor.raw = _message(kind, value)
            elif number == 13:
                entry = {n: text(k, v) for n, k, v in _allowed("place of a weight", _message(kind, value), {1, 2})}
                if entry.get(1) in tensor.external:
                    raise ValueError(f"{tensor.name}: its place is given twice")
                tensor.external[entry.get(1, "")] = entry.get(2, "")
            elif _number(kind, value) not in (0, 1):
                raise ValueError("data that lies nowhere")
        if tensor.kind not in _HELD or len(tensor.dims) > 8 or any(not 0 < dim <= 2**40 for dim in tensor.dims):
            raise ValueError(f"{tensor.name[:80]}: type {tensor.kind} and dims {tensor.dims[:8]}")
        self._check_bytes(tensor)
        return tensor

    def _check_bytes(self, tensor: _Tensor) -> None:
        if bool(tensor.external) == (tensor.raw is not None):
            raise ValueError(f"{tensor.name[:80]}: expected its data in the graph or beside it, and not both")
        if tensor.raw is not None:
            if len(tensor.raw) != tensor.n_bytes:
                raise ValueError(f"{tensor.name[:80]}: {len(tensor.raw)} bytes, expected {tensor.n_bytes}")
            return
        where = tensor.external
        if set(where) != {"location", "offset", "length"} or where["location"] != DATA_FILE:
            raise ValueError(f"{tensor.name[:80]}: its data is at {str(where)[:200]}, expected a place in {DATA_FILE}")
        offset, length = _decimal(where["offset"]), _decimal(where["length"])
        aligned = offset % stored_bytes(ONNX_NAMES[tensor.kind], ()) == 0
        if tensor.kind == INT64 or length != tensor.n_bytes or not aligned or offset + length > self._data_bytes:
            raise ValueError(
                f"{tensor.name[:80]}: {length} bytes at {offset} for dims {tensor.dims} of type {tensor.kind}, in a file of {self._data_bytes}"
            )

    def _check_numbers(self, nodes: list[_Node], tensors: list[_Tensor]) -> None:
        """Whole numbers are shapes, bounds and indices: none of them, nor what a shape of them holds, is beyond the model's own sizes.

        Where they are read as the widths of a Split alone, they are no shape.
        """
        widths = {node.inputs[1] for node in nodes if node.operator == "Split" and len(node.inputs) == 2}
        widths -= {name for node in nodes for i, name in enumerate(node.inputs) if (node.operator, i) != ("Split", 1)}
        for tensor in (tensor for tensor in tensors if tensor.kind == INT64):
            numbers = list(memoryview(bytes(tensor.raw or b"")).cast("q"))
            held = 1 if tensor.name in widths else math.prod(n for n in numbers if n > 0)
            if held > self._largest or any(abs(n) > self._largest for n in numbers):
                raise ValueError(f"{tensor.name[:80]}: numbers {numbers[:8]}, expected none beyond {self._largest}")


# --- messages that need no context ------------------------------------------------------------------------------------


def _allowed(what: str, data: memoryview, numbers: set[int]) -> Iterator[Field]:
    """The fields of a message of which only these may occur."""
    for number, kind, value in fields(data):
        if number not in numbers:
            raise ValueError(f"a {what} has field {number}, which no export writes")
        yield number, kind, value


def _message(kind: int, value: int | memoryview) -> memoryview:
    if kind != BYTES or isinstance(value, int):
        raise ValueError("a number, expected a message")
    return value


def _number(kind: int, value: int | memoryview) -> int:
    if kind != VARINT or not isinstance(value, int):
        raise ValueError("a message, expected a number")
    return signed(value)


def _decimal(digits: str) -> int:
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 18):
        raise ValueError(f"{digits[:40]!r}, expected a decimal number")
    return int(digits)


def _node(data: memoryview) -> _Node:
    """A node, its operator and attributes checked."""
    node = _Node()
    for number, kind, value in _allowed("node", data, {1, 2, 3, 4, 5, 7}):
        if number == 5:
            name, whole_number = _attribute(_message(kind, value))
            if name in node.attributes:
                raise ValueError(f"the attribute {name[:80]!r} is given twice")
            node.attributes[name] = whole_number
            continue
        word = text(kind, value)
        if number in (1, 2):
            (node.inputs if number == 1 else node.outputs).append(word)
        elif number == 4:
            node.operator = word
        elif number == 7 and word:
            raise ValueError(f"an operator of {word[:80]!r}, expected the default domain")
    if node.operator not in OPERATORS:
        raise ValueError(f"operator {node.operator[:80]!r}, expected one that exports consist of")
    return node


def _attribute(data: memoryview) -> tuple[str, int | None]:
    """A name, and the value where that is one whole number; attributes that hold tensors, graphs or texts are none of ours."""
    name, attribute_type, whole_number, held = "", 0, None, set()
    for number, kind, value in _allowed("attribute", data, {1, 2, 3, 8, 20}):
        if number == 1:
            name = text(kind, value)
        elif number == 20:
            attribute_type = _number(kind, value)
        else:
            held.add(number)
            if number == 8:
                list(int64s(kind, value))
            elif kind != (FIXED32 if number == 2 else VARINT):
                raise ValueError("an attribute of another type than it says")
            elif number == 3:
                whole_number = _number(kind, value)
    if attribute_type not in _ATTRIBUTE_FIELDS or not held <= {_ATTRIBUTE_FIELDS[attribute_type]}:
        raise ValueError("an attribute of another type than it says")
    return name, whole_number


def _value(data: memoryview) -> TensorSpec:
    """A named tensor with its dtype and axes, in the contract's terms."""
    name, kind_of_element, axes = "", 0, None
    for number, kind, value in _allowed("value", data, {1, 2}):
        if number == 1:
            name = text(kind, value)
            continue
        for _, tensor_kind, tensor in _allowed("type", _message(kind, value), {1}):
            for n, k, v in _allowed("tensor type", _message(tensor_kind, tensor), {1, 2}):
                if n == 1:
                    kind_of_element = _number(k, v)
                else:
                    axes = tuple(_axis(dim) for _, _, dim in _allowed("shape", _message(k, v), {1}))
    dtype = ONNX_NAMES.get(kind_of_element, f"type {kind_of_element}")
    return TensorSpec(name, dtype, axes if axes is not None else ("unknown",))


def _axis(data: int | memoryview) -> int | str:
    axis: int | str = ""
    for number, kind, value in _allowed(
        "axis", _message(BYTES if isinstance(data, memoryview) else VARINT, data), {1, 2}
    ):
        axis = _number(kind, value) if number == 1 else text(kind, value)
    return axis
