"""Reads the messages of an untrusted ONNX file into plain objects, with neither onnx nor protobuf.

An export uses a small part of the format. The reader refuses every field, operator and attribute outside of that part.
`exporter.bundle.graph_form` checks what the messages say together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from exporter.common.wire import BYTES, FIXED32, VARINT, Field, fields, int64s, signed, text
from exporter.spec.dtypes import DTYPES, ONNX_NAMES, ONNX_TYPES, stored_bytes
from exporter.spec.tensors import OPSET, TensorSpec
from exporter.spec.weight_formats import WEIGHT_FORMATS

# Every operator of an export. None of them runs code, holds a graph, or reads anything except its inputs.
OPERATORS = {
    *("Add", "And", "Attention", "Cast", "Clip", "Concat", "DequantizeLinear", "Equal", "Expand", "Gather"),
    *("GatherElements", "GatherND", "Gemm", "Less", "LessOrEqual", "MatMul", "Mul", "Not", "Or", "Range", "ReduceMax"),
    *("Reshape", "RMSNormalization", "RotaryEmbedding", "Shape", "Sigmoid", "Slice", "Split", "Squeeze", "Sub"),
    *("TensorScatter", "Transpose", "Unsqueeze", "Where"),
}
INT64 = ONNX_TYPES["int64"]
LARGEST_RANK, LARGEST_DIM = 8, 2**40  # bounds of an initializer's dims
_ATTRIBUTE_FIELDS = {1: 2, 2: 3, 7: 8}  # attribute type → the field of its value: a float, an integer, integers
_INITIALIZER_TYPES = {INT64, *(ONNX_TYPES[name] for name in (*DTYPES, *WEIGHT_FORMATS))}


@dataclass
class Initializer:
    """One tensor that the graph stores.

    Attributes:
        name: its name.
        kind: number of its ONNX type.
        dims: its dimensions.
        raw: its bytes where they are in the graph file.
        external: the place of its bytes where they are in the data file: location, offset and length as text.
    """

    name: str = ""
    kind: int = 0
    dims: list[int] = field(default_factory=list)
    raw: memoryview | None = None
    external: dict[str, str] = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        """The bytes that its dims and type need."""
        return stored_bytes(ONNX_NAMES[self.kind], self.dims)


@dataclass
class Node:
    """One node: its operator, inputs and outputs, and its attributes.

    Only an attribute of one integer has a value here.
    """

    operator: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    attributes: dict[str, int | None] = field(default_factory=dict)


@dataclass
class Graph:
    """One graph: its nodes, initializers, inputs, outputs, and the number of values between nodes that have a type."""

    nodes: list[Node] = field(default_factory=list)
    initializers: list[Initializer] = field(default_factory=list)
    inputs: list[TensorSpec] = field(default_factory=list)
    outputs: list[TensorSpec] = field(default_factory=list)
    n_typed_values: int = 0


def read_model(data: memoryview, most_entries: int) -> Graph:
    """Returns the one graph of a model.

    Args:
        data: the content of the file.
        most_entries: bound of the nodes, of the initializers and of the typed values.

    Raises:
        ValueError: the file is no ONNX model, or has what no export writes; the message says what was found.
    """
    graphs, opsets = [], []
    for number, kind, value in _allowed("model", data, {1, 2, 3, 7, 8}):
        if number == 7:
            graphs.append(_message(kind, value))
        elif number == 8:
            opset = _allowed("opset", _message(kind, value), {1, 2})
            opsets.append({n: text(k, v) if n == 1 else _number(k, v) for n, k, v in opset})
    if len(graphs) != 1 or [(o.get(1, ""), o.get(2)) for o in opsets] != [("", OPSET)]:
        raise ValueError(
            f"{len(graphs)} graphs and operator sets {opsets}, expected one graph at the default domain's {OPSET}"
        )
    return _graph(graphs[0], most_entries)


def decimal(digits: str) -> int:
    """Returns a decimal number of at most 18 digits.

    Raises:
        ValueError: the text is another one.
    """
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 18):
        raise ValueError(f"{digits[:40]!r}, expected a decimal number")
    return int(digits)


def _graph(data: memoryview, most_entries: int) -> Graph:
    graph = Graph()
    for number, kind, value in _allowed("graph", data, {1, 2, 5, 11, 12, 13}):
        if number == 1:
            graph.nodes.append(_node(_message(kind, value)))
        elif number == 5:
            graph.initializers.append(_initializer(_message(kind, value)))
        elif number == 11:
            graph.inputs.append(_value(_message(kind, value)))
        elif number == 12:
            graph.outputs.append(_value(_message(kind, value)))
        elif number == 13:
            _value(_message(kind, value))
            graph.n_typed_values += 1
        if max(len(graph.nodes), len(graph.initializers), graph.n_typed_values) > most_entries:
            raise ValueError(f"over {most_entries} nodes, weights or values, more than a graph of these inputs has")
    return graph


def _allowed(what: str, data: memoryview, numbers: set[int]) -> Iterator[Field]:
    """Yields the fields of a message and refuses a field whose number is not in `numbers`."""
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


def _initializer(data: memoryview) -> Initializer:
    tensor = Initializer()
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
            raise ValueError("a weight whose data are neither in the graph nor in a file")
    wrong_dims = len(tensor.dims) > LARGEST_RANK or any(not 0 < dim <= LARGEST_DIM for dim in tensor.dims)
    if tensor.kind not in _INITIALIZER_TYPES or wrong_dims:
        raise ValueError(f"{tensor.name[:80]}: type {tensor.kind} and dims {tensor.dims[:8]}")
    return tensor


def _node(data: memoryview) -> Node:
    node = Node()
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
    """Returns the name of an attribute, and its value where that is one integer.

    It refuses attributes that hold tensors, graphs or texts, because no export writes them.
    """
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
    """Returns the name, dtype and axes of an input, output or typed value, as the contract writes them."""
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
    message = _message(BYTES if isinstance(data, memoryview) else VARINT, data)
    for number, kind, value in _allowed("axis", message, {1, 2}):
        axis = _number(kind, value) if number == 1 else text(kind, value)
    return axis
