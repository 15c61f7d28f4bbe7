"""Faults of the network that TensorRT parses: each layer's inputs and properties changed, as a faulty parser would."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from engines.network.parsed import ParsedNetwork

OTHER_OPERATIONS = {"SUM": ("SUB", "PROD"), "PROD": ("SUM",), "SUB": ("SUM",), "AND": ("OR",), "OR": ("AND",)}
OTHER_OPERATIONS |= {"LESS": ("GREATER",), "GREATER": ("LESS",), "EQUAL": ("LESS",), "MAX": ("MIN",), "MIN": ("MAX",)}
EPSILONS = (0.0, 1e-2, 1.0)
Change = Callable[[ParsedNetwork, Any], None]  # changes one layer of a network


@dataclass(frozen=True)
class NetworkMutation:
    """One change of one layer.

    Attributes:
        kind: the kind of fault, for counts.
        site: where it is, for reports.
        layer: kind and name of the layer, without the parser's numbers, and its place among the layers of that name.
        n_alike: number of the layers of that name.
        apply: makes the change.
    """

    kind: str
    site: str
    layer: tuple[str, str, int]
    n_alike: int
    apply: Change

    def plant(self, parsed: ParsedNetwork) -> bool:
        """Makes the change in a network; returns whether the network has this layer, and no other one in its place."""
        layers = named_layers(parsed)
        alike = [key for key in layers if key[:2] == self.layer[:2]]
        if len(alike) != self.n_alike:
            return False
        self.apply(parsed, layers[self.layer])
        return True


def typed_layers(parsed: ParsedNetwork) -> Iterator[Any]:
    """Yields the layers of a network, each with the class that has its properties."""
    trt = parsed.backend.trt
    classes = {
        name.lower(): kind for name, kind in vars(trt).items() if name.startswith("I") and name.endswith("Layer")
    }
    for number in range(parsed.network.num_layers):
        layer = parsed.network.get_layer(number)
        name = f"i{layer.type.name.replace('_', '').lower()}layer"
        if name in classes:
            layer.__class__ = classes[name]
            yield layer


def named_layers(parsed: ParsedNetwork) -> dict[tuple[str, str, int], Any]:
    """Returns the layers by kind, name and place. The parser numbers its layers, in each network in another way."""
    named: dict[tuple[str, str, int], Any] = {}
    for layer in typed_layers(parsed):
        kind, name = layer.type.name, re.sub(r"_\d+$| \d+\)", "", layer.name)
        named[kind, name, sum(key[:2] == (kind, name) for key in named)] = layer
    return named


def network_faults(parsed: ParsedNetwork) -> Iterator[NetworkMutation]:
    """Yields every mutation of a network's layers, in the order of the layers."""
    layers = named_layers(parsed)
    for key, layer in layers.items():
        n_alike = sum(other[:2] == key[:2] for other in layers)
        for kind, what, apply in (*_inputs(layer), *_properties(layer)):
            yield NetworkMutation(kind, f"{layer.type.name} {layer.name}: {what}", key, n_alike, apply)


Found = tuple[str, str, Change]


def _inputs(layer: Any) -> Iterator[Found]:
    tensors = [layer.get_input(number) for number in range(layer.num_inputs)]
    for second in range(1, len(tensors)):
        for first in range(second):
            if _alike(tensors[first], tensors[second]) and tensors[first].name != tensors[second].name:
                change = partial(_swap, first=first, second=second)
                yield "network: inputs swapped", f"{first} and {second}", change
    output = layer.get_output(0)
    if not output.is_network_output and layer.type.name not in ("ATTENTION_INPUT", "ATTENTION_OUTPUT"):
        for number, tensor in enumerate(tensors):
            if _alike(tensor, output):
                yield "network: a layer removed", f"{tensor.name} passed on", partial(_bypass, number=number)


def _alike(first: Any, second: Any) -> bool:
    if first is None or second is None or first.dtype != second.dtype or len(first.shape) != len(second.shape):
        return False
    return all(a == b or -1 in (a, b) for a, b in zip(first.shape, second.shape, strict=True))


def _swap(parsed: ParsedNetwork, layer: Any, first: int, second: int) -> None:
    one, two = layer.get_input(first), layer.get_input(second)
    layer.set_input(first, two)
    layer.set_input(second, one)


def _bypass(parsed: ParsedNetwork, layer: Any, number: int) -> None:
    """Lets every reader of a layer's output read one of its inputs."""
    source, output = layer.get_input(number), layer.get_output(0).name
    for reader in typed_layers(parsed):
        for place in range(reader.num_inputs):
            tensor = reader.get_input(place)
            if tensor is not None and tensor.name == output:
                reader.set_input(place, source)


# --- properties -------------------------------------------------------------------------------------------------------


def _properties(layer: Any) -> Iterator[Found]:
    kind = layer.type.name
    if kind == "ELEMENTWISE":
        for name in OTHER_OPERATIONS.get(layer.op.name, ()):
            yield "network: another operation", f"{name} for {layer.op.name}", partial(_set_member, "op", name)
    elif kind == "UNARY" and layer.op.name == "NOT":
        return
    elif kind == "ACTIVATION":
        yield "network: another operation", "TANH", partial(_set_member, "type", "TANH")
    elif kind == "REDUCE":
        yield "network: another operation", "MIN", partial(_set_member, "op", "MIN")
        yield "network: another axis", "axes", partial(_set, "axes", layer.axes << 1)
    elif kind == "ROTARY_EMBEDDING":
        yield "network: RoPE pairs halves", "interleaved", partial(_set, "interleaved", not layer.interleaved)
    elif kind == "NORMALIZATION":
        for value in EPSILONS:
            yield "network: eps changed", f"{value}", partial(_set, "epsilon", value)
    elif kind == "ATTENTION_INPUT":
        for name in ("UPPER_LEFT", "LOWER_RIGHT"):
            yield "network: a causal mask", name, partial(_set_causal, name=name)
    elif kind == "SHUFFLE":
        for place in ("first_transpose", "second_transpose"):
            order = list(getattr(layer, place))[: len(layer.get_input(0).shape)]
            if len(order) == 4:
                swapped = [order[0], order[2], order[1], order[3]]
                yield "network: another order of axes", place, partial(_set, place, swapped)
    elif kind in ("GATHER", "CONCATENATION") and layer.axis in (0, 1):
        yield "network: another axis", f"{1 - layer.axis}", partial(_set, "axis", 1 - layer.axis)
    elif kind == "MATRIX_MULTIPLY":
        yield "network: a matrix transposed", "second", _transpose
    elif kind == "CONSTANT" and isinstance(layer.weights, np.ndarray):
        yield from _constants(layer.weights)


def _set(name: str, value: object, parsed: ParsedNetwork, layer: Any) -> None:
    setattr(layer, name, value)


def _set_member(name: str, member: str, parsed: ParsedNetwork, layer: Any) -> None:
    setattr(layer, name, getattr(type(getattr(layer, name)), member))


def _set_causal(parsed: ParsedNetwork, layer: Any, name: str) -> None:
    attention = layer.attention
    attention.causal_kind = getattr(type(attention.causal_kind), name)


def _transpose(parsed: ParsedNetwork, layer: Any) -> None:
    operations = type(layer.op1)
    layer.op1 = operations.NONE if layer.op1 == operations.TRANSPOSE else operations.TRANSPOSE


def _constants(array: np.ndarray) -> Iterator[Found]:
    if array.dtype.kind == "i" and array.size <= 4:
        for step in (1, -1):
            yield "network: a constant changed", f"{step:+d}", partial(_add, step=step)
    elif array.dtype.kind == "f":
        yield "network: a constant × 1.01", f"{array.shape}", partial(_times, factor=1.01)
        yield "network: a constant negated", f"{array.shape}", partial(_times, factor=-1.0)
        if array.size > 1:
            yield "network: a constant moved by one", f"{array.shape}", _roll


def _set_weights(parsed: ParsedNetwork, layer: Any, array: np.ndarray) -> None:
    array = np.ascontiguousarray(array)
    layer.weights = array
    parsed.logger.planted = [*getattr(parsed.logger, "planted", []), array]  # TensorRT keeps no copy


def _add(parsed: ParsedNetwork, layer: Any, step: int) -> None:
    _set_weights(parsed, layer, layer.weights + layer.weights.dtype.type(step))


def _times(parsed: ParsedNetwork, layer: Any, factor: float) -> None:
    _set_weights(parsed, layer, (layer.weights.astype(np.float64) * factor).astype(layer.weights.dtype))


def _roll(parsed: ParsedNetwork, layer: Any) -> None:
    _set_weights(parsed, layer, np.roll(layer.weights, 1))
