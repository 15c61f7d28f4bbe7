"""A parsed network as a list of operations in an order in which they can run, and the loop that runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engines.interpreter.attention import Attention, read_attention
from engines.interpreter.layers import LAYERS, Compute, torch_dtype
from engines.interpreter.reading import Unsupported, optional_dims
from engines.network.parsed import ParsedNetwork
from exporter.model.observe import See
from exporter.steppers.eager_stepper import to_torch


@dataclass(frozen=True)
class Operation:
    """One layer: what it reads, what it writes, what it computes.

    Attributes:
        inputs: tensor names; None where an optional input is missing.
        output: the tensor's name and the dtype that the network gives it.
        compute: of the inputs in order, or an `Attention`, which also sees its inner values.
    """

    name: str
    inputs: tuple[str | None, ...]
    output: str
    dtype: torch.dtype
    compute: Compute | Attention


@dataclass(frozen=True)
class Program:
    """A network ready to run.

    Attributes:
        constants: tensors that never change, by name; weights stay in the network's own memory.
        operations: in an order in which every input is ready.
    """

    constants: dict[str, Tensor]
    operations: tuple[Operation, ...]

    def run(self, inputs: Mapping[str, Tensor], see: See) -> dict[str, Tensor]:
        """Computes every tensor of the network.

        Args:
            inputs: the network's inputs by name; cache tensors among them are updated in place.
            see: called with each tensor's name and value as it is computed; what it returns is used from there on.

        Returns:
            Every tensor by name.
        """
        tensors = {**self.constants, **inputs}
        with torch.inference_mode():
            for operation in self.operations:
                arguments: list[Any] = [None if name is None else tensors[name] for name in operation.inputs]
                if isinstance(operation.compute, Attention):
                    queries, keys, values = arguments[:3]
                    result = operation.compute.compute(queries, keys, values, tensors, see)
                else:
                    result = operation.compute(*arguments)
                assert result.dtype == operation.dtype, (
                    f"{operation.name}: computed {result.dtype}, the network says {operation.dtype}"
                )
                tensors[operation.output] = see(operation.output, result)
        return tensors


def read_program(parsed: ParsedNetwork, initializer: Callable[[str], np.ndarray]) -> Program:
    """Reads a network's layers.

    Args:
        parsed: the network; it must outlive the program, whose constants are views of its memory.
        initializer: an initializer of the ONNX file by name. TensorRT's Python API does not give out bfloat16 constants;
            the parser names a constant after its initializer, which is read instead.

    Raises:
        Unsupported: a layer of a kind or form that the interpreter does not know; names it.
    """
    classes = {
        name.lower(): member
        for name, member in vars(parsed.backend.trt).items()
        if name.startswith("I") and name.endswith("Layer")
    }
    constants: dict[str, Tensor] = {}
    operations: list[Operation] = []
    for index in range(parsed.network.num_layers):
        layer = parsed.network.get_layer(index)
        kind = layer.type.name
        class_name = f"i{kind.replace('_', '').lower()}layer"
        if class_name not in classes:
            raise Unsupported(f"interpreter: {layer.name} is a {kind} layer, expected one of {', '.join(LAYERS)}")
        layer.__class__ = classes[class_name]
        output = layer.get_output(0)
        if kind == "CONSTANT":
            constants[output.name] = _constant(layer, output, initializer)
        else:
            operations.append(_operation(layer, kind, output))
    return Program(constants, _in_order(operations, {*constants, *(tensor.name for tensor in parsed.inputs)}))


def _operation(layer: Any, kind: str, output: Any) -> Operation:
    inputs = [layer.get_input(index) for index in range(layer.num_inputs)]
    names = tuple(None if tensor is None else tensor.name for tensor in inputs)
    compute: Compute | Attention
    if kind == "ATTENTION_INPUT":
        compute = attention = read_attention(layer, _attention_result(output.name))
        names = (*names[:3], *(name for name in (attention.mask, attention.key_lengths) if name is not None))
    elif kind == "ATTENTION_OUTPUT":
        compute = lambda x: x  # noqa: E731 - the boundary of what the input layer has computed
    elif kind in LAYERS:
        compute = LAYERS[kind](layer)
    else:
        raise Unsupported(f"interpreter: {layer.name} is a {kind} layer, expected one of {', '.join(LAYERS)}")
    return Operation(layer.name, names, output.name, torch_dtype(output.dtype), compute)


def _attention_result(boundary: str) -> str:
    """The parser calls the boundary of an attention that makes X "X_AttentionInput_output"."""
    return boundary.partition("_AttentionInput")[0]


def _constant(layer: Any, output: Any, initializer: Callable[[str], np.ndarray]) -> Tensor:
    weights = layer.weights
    array = weights if isinstance(weights, np.ndarray) else initializer(layer.name)
    tensor = to_torch(array).reshape(optional_dims(layer.shape) or [])
    assert tensor.dtype == torch_dtype(output.dtype), (
        f"{layer.name}: holds {tensor.dtype}, the network says {output.dtype.name}"
    )
    return tensor


def _in_order(operations: list[Operation], ready: set[str]) -> tuple[Operation, ...]:
    """Operations sorted so that each comes after what it reads; TensorRT lists some before their inputs."""
    ordered: list[Operation] = []
    waiting = operations
    while waiting:
        later = []
        for operation in waiting:
            if all(name is None or name in ready for name in operation.inputs):
                ordered.append(operation)
                ready.add(operation.output)
            else:
                later.append(operation)
        if len(later) == len(waiting):
            raise Unsupported(f"interpreter: {later[0].name} reads {later[0].inputs}, which nothing computes")
        waiting = later
    return tuple(ordered)
