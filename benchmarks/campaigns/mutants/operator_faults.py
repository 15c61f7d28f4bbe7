"""Faults of single operators: every node, input, attribute and constant of a graph, changed without its meaning."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from onnx import AttributeProto, NodeProto, helper, numpy_helper

from benchmarks.campaigns.mutants.drafts import Draft, Mutation

OTHER_OPERATORS = {
    "LessOrEqual": ("Less",),
    "Less": ("LessOrEqual",),
    "And": ("Or",),
    "Or": ("And",),
    "Equal": ("LessOrEqual",),
    "Add": ("Sub", "Mul"),
    "Sub": ("Add",),
    "Mul": ("Add", "Sub"),
    "Sigmoid": ("Tanh",),
}
_Type = tuple[int, tuple[int | str, ...]]


def operator_faults(draft: Draft) -> Iterator[Mutation]:
    """Yields every mutation of these kinds, in the order of the nodes."""
    types = value_types(draft)
    known = [*(value.name for value in draft.model.graph.input), *_initializers(draft)]
    for index, node in enumerate(draft.nodes):
        yield from _swapped_inputs(index, node, types)
        yield from _bypassed(index, node, types)
        yield from _rewired(index, node, types, known)
        yield from _other_constants(draft, index, node)
        yield from _other_attributes(index, node)
        for operator in OTHER_OPERATORS.get(node.op_type, ()):
            change = partial(_set_operator, index=index, operator=operator)
            yield Mutation("another operator", f"{node.output[0]}: {operator} for {node.op_type}", change)
        known.extend(node.output)


def value_types(draft: Draft) -> dict[str, _Type]:
    """Returns the ONNX type and the axes of each value that the file gives a type."""
    graph = draft.model.graph
    types = {
        value.name: (
            value.type.tensor_type.elem_type,
            tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim),
        )
        for value in (*graph.input, *graph.output, *graph.value_info)
    }
    return types | {tensor.name: (tensor.data_type, tuple(tensor.dims)) for tensor in graph.initializer}


def _initializers(draft: Draft) -> list[str]:
    return [tensor.name for tensor in draft.model.graph.initializer]


def _alike(first: str, second: str, types: dict[str, _Type]) -> bool:
    """Whether two values have one dtype, one rank, and equal numbers where both have a number."""
    if first not in types or second not in types or types[first][0] != types[second][0]:
        return False
    axes = types[first][1], types[second][1]
    return len(axes[0]) == len(axes[1]) and all(
        a == b or isinstance(a, str) or isinstance(b, str) for a, b in zip(*axes, strict=True)
    )


# --- inputs -----------------------------------------------------------------------------------------------------------


def _swapped_inputs(index: int, node: NodeProto, types: dict[str, _Type]) -> Iterator[Mutation]:
    for second in range(1, len(node.input)):
        for first in range(second):
            if node.input[first] != node.input[second] and _alike(node.input[first], node.input[second], types):
                change = partial(_swap, index=index, first=first, second=second)
                yield Mutation("inputs swapped", f"{node.op_type} {node.output[0]}: {first} and {second}", change)


def _swap(draft: Draft, index: int, first: int, second: int) -> None:
    inputs = draft.model.graph.node[index].input
    inputs[first], inputs[second] = inputs[second], inputs[first]


def _rewired(index: int, node: NodeProto, types: dict[str, _Type], known: list[str]) -> Iterator[Mutation]:
    for number, name in enumerate(node.input):
        for other in known:
            if other != name and _alike(name, other, types):
                change = partial(_set_input, index=index, number=number, name=other)
                yield Mutation("another value read", f"{node.output[0]}: {other} for {name}", change)


def _set_input(draft: Draft, index: int, number: int, name: str) -> None:
    draft.model.graph.node[index].input[number] = name


def _bypassed(index: int, node: NodeProto, types: dict[str, _Type]) -> Iterator[Mutation]:
    for number, name in enumerate(node.input):
        if node.output[0] != name and _alike(name, node.output[0], types):
            change = partial(_bypass, index=index, number=number)
            yield Mutation("a node removed", f"{node.op_type} {node.output[0]}: {name} passed on", change)


def _bypass(draft: Draft, index: int, number: int) -> None:
    """Removes a node; what read its output reads one of its inputs."""
    graph = draft.model.graph
    node = graph.node[index]
    source, result = node.input[number], node.output[0]
    del graph.node[index]
    if result in {value.name for value in graph.output}:
        makers = [other for other in graph.node if source in other.output]
        if not makers:  # an input of the graph, or a weight
            graph.node.append(helper.make_node("Identity", [source], [result], name=result))
            return
        makers[0].output[list(makers[0].output).index(source)] = result
        source, result = result, source
    for other in graph.node:
        for place, name in enumerate(other.input):
            if name == result:
                other.input[place] = source


# --- operators, attributes and constants ------------------------------------------------------------------------------


def _set_operator(draft: Draft, index: int, operator: str) -> None:
    draft.model.graph.node[index].op_type = operator


def _other_attributes(index: int, node: NodeProto) -> Iterator[Mutation]:
    for attribute in node.attribute:
        value = helper.get_attribute_value(attribute)
        for other in _other_values(value, attribute):
            change = partial(_set_attribute, index=index, name=attribute.name, value=other)
            kind = "eps changed" if attribute.name == "epsilon" else "another attribute"
            yield Mutation(kind, f"{node.output[0]}: {attribute.name} {other} for {value}", change)
        change = partial(_set_attribute, index=index, name=attribute.name, value=None)
        yield Mutation("an attribute missing", f"{node.output[0]}: {attribute.name} {value}", change)


def _other_values(value: object, attribute: AttributeProto) -> list:
    if isinstance(value, float):
        return [value * factor for factor in (1.01, 0.0, 10.0, 1e3, 1e5)]
    if isinstance(value, int):
        return [1 - value] if value in (0, 1) else [value + 1, value - 1]
    if isinstance(value, list):
        places = range(len(value) - 1)
        return [[*value[:i], value[i + 1], value[i], *value[i + 2 :]] for i in places if value[i] != value[i + 1]]
    return []


def _set_attribute(draft: Draft, index: int, name: str, value: object) -> None:
    node = draft.model.graph.node[index]
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend(kept)
    if value is not None:
        node.attribute.append(helper.make_attribute(name, value))


def _other_constants(draft: Draft, index: int, node: NodeProto) -> Iterator[Mutation]:
    held = {tensor.name: tensor for tensor in draft.model.graph.initializer if not tensor.external_data}
    for number, name in enumerate(node.input):
        if name in held:
            array = numpy_helper.to_array(held[name])
            for what, other in _other_arrays(array):
                change = partial(_set_constant, index=index, number=number, array=other)
                yield Mutation("a constant changed", f"{node.op_type} {node.output[0]}: {what}", change)


def _other_arrays(array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    for place in np.ndindex(array.shape):
        is_integer = array.dtype == np.int64
        for step in (1, -1) if is_integer else (0.01, 1.0):
            other = array.copy()
            other[place] = array[place] + (step if is_integer or array[place] == 0 else array[place] * step)
            yield f"{other.tolist()} for {array.tolist()}", other


def _set_constant(draft: Draft, index: int, number: int, array: np.ndarray) -> None:
    draft.model.graph.node[index].input[number] = draft.constant(array)
