"""Traces fragments of the decoder with torch.onnx.export into clean named graphs, without allocating a weight."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

import onnx_ir as ir
import torch
from onnxscript import optimizer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from exporter.graph.fused_decoder import MARKER_DOMAIN
from exporter.model.weights import TORCH_DTYPES
from exporter.spec.tensors import BATCH, CAPACITY, OPSET, PAST, SEQUENCE, TOTAL, TensorSpec

# Example sizes differ, so that no two axes can merge. None is 0 or 1, because torch.export would freeze them.
EXAMPLE_SIZES = {BATCH: 2, SEQUENCE: 3, PAST: 4, TOTAL: 7, CAPACITY: 11}


@dataclass(frozen=True)
class Piece:
    """A module to be traced. Equal pieces are traced once per process: bundles of slices and parts share them.

    Attributes:
        module: makes the module from `arguments`. It is called with fake tensors, so no weight is allocated.
        dtype: dtype name of the parameters.
        inputs: the module's arguments in order, with their symbolic axes.
        outputs: names for its results in order.
    """

    module: Callable[..., nn.Module]
    arguments: tuple
    dtype: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[str, ...]


@dataclass
class Fragment:
    """A traced piece of a graph.

    Attributes:
        graph: nodes in topological order. Values have their names; markers and dead nodes are removed.
        parameters: parameter name in the module → the initializer for it, which holds no data.
        constants: small initializers that hold their data.
    """

    graph: ir.Graph
    parameters: dict[str, ir.Value] = field(default_factory=dict)
    constants: list[ir.Value] = field(default_factory=list)


_traced: dict[Piece, Fragment] = {}


def trace_fragments(pieces: Sequence[Piece]) -> list[Fragment]:
    """Returns the fragments of `pieces`, in order; new pieces share one call of the exporter."""
    missing = [piece for piece in dict.fromkeys(pieces) if piece not in _traced]
    if missing:
        _traced.update(zip(missing, _trace(missing), strict=True))
    return [_traced[piece] for piece in pieces]


def _trace(pieces: Sequence[Piece]) -> list[Fragment]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        modules = nn.ModuleList(_build(piece) for piece in pieces).eval()
        counts = [len(piece.inputs) for piece in pieces]
        with _quiet_exporter():
            program = torch.onnx.export(
                _SideBySide(modules, counts),
                tuple(_example(spec, index) for index, piece in enumerate(pieces) for spec in piece.inputs),
                dynamo=True,
                opset_version=OPSET,
                optimize=False,
                verbose=False,
                dynamic_shapes=(_dynamic_shapes(pieces),),
            )
    assert program is not None, "torch gives no program only where none is asked for"
    return _split(program.model, pieces, [[name for name, _ in module.named_parameters()] for module in modules])


class _SideBySide(nn.Module):
    """Several modules as one. Each has its own arguments, and the results of all come in order."""

    def __init__(self, modules: nn.ModuleList, counts: list[int]) -> None:
        super().__init__()
        self.pieces = modules
        self.counts = counts

    def forward(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        rest, results = list(arguments), list[Tensor]()
        for module, count in zip(self.pieces, self.counts, strict=True):
            result = module(*rest[:count])
            results += result if isinstance(result, tuple) else (result,)
            del rest[:count]
        return tuple(results)


@contextlib.contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Hides the messages of torch.export about its internals and torchvision; the graph check judges the result."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(level)


def _build(piece: Piece) -> nn.Module:
    """Makes a module with parameters in the dtype of the piece; fake parameters cannot be converted afterwards."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(TORCH_DTYPES[piece.dtype])
    try:
        return piece.module(*piece.arguments)
    finally:
        torch.set_default_dtype(default)


def _example(spec: TensorSpec, index: int) -> Tensor:
    """Makes an argument of a piece. Its sizes differ from those of all other pieces, so that no two axes can merge."""
    sizes = {axis: size + index * (max(EXAMPLE_SIZES.values()) + 1) for axis, size in EXAMPLE_SIZES.items()}
    return torch.empty(spec.shape(sizes), dtype=TORCH_DTYPES.get(spec.dtype) or getattr(torch, spec.dtype))


def _dynamic_shapes(pieces: Sequence[Piece]) -> tuple:
    """Makes separate symbols for each piece: a size then never comes from an argument of another piece."""
    shapes: list[dict[int, torch.export.Dim] | None] = []
    for index, piece in enumerate(pieces):
        dims = {axis: torch.export.Dim(axis + _suffix(index)) for axis in EXAMPLE_SIZES}
        shapes += [
            {i: dims[axis] for i, axis in enumerate(spec.axes) if isinstance(axis, str)} or None
            for spec in piece.inputs
        ]
    return tuple(shapes)


def _suffix(index: int) -> str:
    return f"_of_piece_{index}"


def _split(model: ir.Model, pieces: Sequence[Piece], parameters: list[list[str]]) -> list[Fragment]:
    """Optimizes the joint graph, then cuts it into one fragment a piece. Pieces share only constants."""
    joint = model.graph
    prefixed = [[f"pieces.{i}.{name}" for name in names] for i, names in enumerate(parameters)]
    weights = {name: joint.initializers.pop(name) for names in prefixed for name in names if name in joint.initializers}
    for value in weights.values():
        value.const_value = None  # it is a fake tensor; nothing reads or folds a plain input
    joint.inputs.extend(weights.values())
    optimizer.optimize_ir(model, num_iterations=2, onnx_shape_inference=False)
    nodes, inputs, outputs = list(joint), iter(list(joint.inputs)), iter(list(joint.outputs))
    joint.remove(nodes)
    joint.inputs.clear()
    joint.outputs.clear()
    fragments = []
    for index, (piece, names, full_names) in enumerate(zip(pieces, parameters, prefixed, strict=True)):
        its_inputs = list(islice(inputs, len(piece.inputs)))
        its_outputs = list(islice(outputs, len(piece.outputs)))
        its_weights = {name: weights[full] for name, full in zip(names, full_names, strict=True) if full in weights}
        for value, name in zip(its_outputs, piece.outputs, strict=True):
            value.name = name
        its_nodes = _leading_to(its_outputs, nodes)
        for value in chain(its_inputs, *(node.outputs for node in its_nodes)):
            value.shape = value.shape and ir.Shape([_own_symbol(dim, index) for dim in value.shape])
        fragments.append(_clean(its_inputs, its_outputs, its_nodes, its_weights))
    return fragments


def _own_symbol(dim: int | ir.SymbolicDim, index: int) -> int | str | None:
    """Returns a dimension in the contract's symbols; factors are sorted: torch's order depends on other pieces."""
    if isinstance(dim, int) or dim.value is None:
        return dim if isinstance(dim, int) else None
    return "*".join(sorted(dim.value.replace(_suffix(index), "").split("*")))


def _leading_to(outputs: list[ir.Value], nodes: list[ir.Node]) -> list[ir.Node]:
    """Returns the nodes that compute `outputs`, in order."""
    wanted: set[ir.Value | None] = set(outputs)
    chosen = []
    for node in reversed(nodes):
        if wanted.intersection(node.outputs):
            chosen.append(node)
            wanted.update(node.inputs)
    return chosen[::-1]


def _clean(
    inputs: list[ir.Value], outputs: list[ir.Value], nodes: list[ir.Node], weights: dict[str, ir.Value]
) -> Fragment:
    constants: dict[ir.Value, None] = {}  # a set that keeps its order
    for node in [node for node in nodes if node.op_type == "Constant"]:
        node.outputs[0].const_value = _constant_tensor(node)
        constants[node.outputs[0]] = None
    nodes = [node for node in nodes if node.op_type != "Constant"]
    graph = ir.Graph(inputs, outputs, nodes=nodes)
    named = _apply_markers(graph) | {value.name for value in graph.outputs}
    _name_nodes(graph, named)
    for node in graph:
        node.metadata_props.clear()  # torch writes stack traces and paths of the exporting machine here
        node.doc_string = None
        constants |= {value: None for value in node.inputs if value is not None and value.const_value is not None}
    return Fragment(graph, weights, list(constants))


def _constant_tensor(node: ir.Node) -> ir.TensorProtocol:
    (attribute,) = node.attributes.values()
    if attribute.type == ir.AttributeType.TENSOR:
        return attribute.value
    return ir.tensor(list(attribute.value) if isinstance(attribute.value, tuple) else attribute.value)


def _apply_markers(graph: ir.Graph) -> set[str | None]:
    """Moves the name of each marker to the value it marks, removes the marker, and returns the names."""
    names: set[str | None] = set()
    for node in list(graph):
        if node.domain != MARKER_DOMAIN:
            continue
        value, marked = node.inputs[0], node.outputs[0]
        assert value is not None, "a marker marks a value"
        value.name = node.attributes["name"].value
        names.add(value.name)
        value.shape = value.shape or marked.shape
        value.type = value.type if value.dtype else marked.type
        ir.convenience.replace_all_uses_with(marked, value, replace_graph_outputs=True)
        graph.remove(node, safe=True)
    return names


def _name_nodes(graph: ir.Graph, named: set[str | None]) -> None:
    """Names nodes. A node that computes a named value has that name, and a node before it is NAME/OpType.

    A node with several outputs is NAME/OpType after the value it splits; its outputs have their own names. The value
    of a node with one output has the name of the node.
    """
    taken: Counter[str] = Counter()
    for node in reversed(list(graph)):
        value = node.outputs[0]
        if len(node.outputs) > 1:
            whole = node.inputs[0]
            assert whole is not None and {whole.name, *(output.name for output in node.outputs)} <= named, (
                f"{node.op_type} of values without names"
            )
            name = f"{whole.name}/{node.op_type}"
        elif value.name in named:
            name = str(value.name)
        else:
            target = str(next(iter(value.uses())).node.name).split("/")[0]
            name = f"{target}/{node.op_type}"
        taken[name] += 1
        node.name = name if taken[name] == 1 else f"{name}_{taken[name]}"
        if len(node.outputs) == 1:
            value.name = node.name
