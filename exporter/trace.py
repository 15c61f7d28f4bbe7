"""Traces one fragment of the decoder with torch.onnx.export, without allocating a weight, into a clean named graph."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import onnx_ir as ir
import torch
from onnxscript import optimizer
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from exporter.contract import BATCH, CAPACITY, OPSET, PAST, SEQUENCE, TOTAL, TensorSpec
from exporter.traced import MARKER_DOMAIN
from exporter.weights import TORCH_DTYPES

# Distinct example sizes, so that no two axes can merge; none is 0 or 1, which torch.export would freeze.
EXAMPLE_SIZES = {BATCH: 2, SEQUENCE: 3, PAST: 4, TOTAL: 7, CAPACITY: 11}


@dataclass
class Fragment:
    """A traced piece of a graph.

    Attributes:
        graph: nodes in topological order; values carry their names, markers and dead nodes are gone.
        parameters: initializers that stand for weights, by the module's parameter name; they hold no data.
        constants: small initializers that hold their data.
    """

    graph: ir.Graph
    parameters: dict[str, ir.Value] = field(default_factory=dict)
    constants: list[ir.Value] = field(default_factory=list)


def trace_fragment(build: Callable[[], nn.Module], dtype: str, inputs: list[TensorSpec], outputs: list[str]) -> Fragment:
    """Traces the module that `build` makes, its parameters in `dtype`.

    Args:
        build: makes the module; called with fake tensors, so no weight is allocated.
        dtype: the parameters' dtype name.
        inputs: the module's arguments in order, with their symbolic axes.
        outputs: names for its results in order.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = _build_in(dtype, build).eval()
        with _quiet_exporter():
            program = torch.onnx.export(
                module,
                tuple(_example(spec) for spec in inputs),
                dynamo=True,
                opset_version=OPSET,
                optimize=False,
                verbose=False,
                input_names=[spec.name for spec in inputs],
                output_names=outputs,
                dynamic_shapes=_dynamic_shapes(inputs),
            )
    assert program is not None, "torch gives no program only where none is asked for"
    return _clean(program.model, [name for name, _ in module.named_parameters()])


@contextlib.contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Hides what torch.export says of its own internals and of torchvision; the graph check judges the result."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(level)


def _build_in(dtype: str, build: Callable[[], nn.Module]) -> nn.Module:
    """Makes a module whose parameters are created in `dtype`; fake parameters cannot be converted afterwards."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(TORCH_DTYPES[dtype])
    try:
        return build()
    finally:
        torch.set_default_dtype(default)


def _example(spec: TensorSpec) -> torch.Tensor:
    return torch.empty(spec.shape(EXAMPLE_SIZES), dtype=TORCH_DTYPES.get(spec.dtype) or getattr(torch, spec.dtype))


def _dynamic_shapes(inputs: list[TensorSpec]) -> tuple:
    dims = {name: torch.export.Dim(name) for name in EXAMPLE_SIZES}
    return tuple({i: dims[axis] for i, axis in enumerate(spec.axes) if isinstance(axis, str)} or None for spec in inputs)


def _clean(model: ir.Model, parameters: list[str]) -> Fragment:
    graph = model.graph
    weights = {name: graph.initializers.pop(name) for name in parameters if name in graph.initializers}
    for value in weights.values():
        value.const_value = None  # a fake tensor: as a plain input, nothing reads or folds it
    graph.inputs.extend(weights.values())
    optimizer.optimize_ir(model, num_iterations=2, onnx_shape_inference=False)
    del graph.inputs[len(graph.inputs) - len(weights) :]
    named = _apply_markers(graph) | {value.name for value in graph.outputs}
    _name_nodes(graph, named)
    for node in graph:
        node.metadata_props.clear()  # torch leaves stack traces and the exporting machine's paths here
        node.doc_string = None
    constants = [value for value in graph.initializers.values() if value.uses()]
    for node in list(graph):
        if node.op_type == "Constant":
            value = node.outputs[0]
            value.const_value = _constant_tensor(node)
            constants.append(value)
            graph.remove(node)
    return Fragment(graph, weights, constants)


def _constant_tensor(node: ir.Node) -> ir.TensorProtocol:
    (attribute,) = node.attributes.values()
    if attribute.type == ir.AttributeType.TENSOR:
        return attribute.value
    return ir.tensor(list(attribute.value) if isinstance(attribute.value, tuple) else attribute.value)


def _apply_markers(graph: ir.Graph) -> set[str | None]:
    """Moves each marker's name onto the value it marks, and takes the marker out; returns the names."""
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
    """A node that makes a named value takes that name; one on the way to it is NAME/OpType. Values follow their nodes."""
    taken: Counter[str] = Counter()
    for node in reversed(list(graph)):
        value = node.outputs[0]
        if value.name in named:
            name = str(value.name)
        else:
            target = str(next(iter(value.uses())).node.name).split("/")[0]
            name = f"{target}/{node.op_type}"
        taken[name] += 1
        node.name = name if taken[name] == 1 else f"{name}_{taken[name]}"
        value.name = node.name
        assert len(node.outputs) == 1, f"{node.op_type} has several outputs: naming them needs a rule"
