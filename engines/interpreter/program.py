"""Reads a parsed network as a list of operations, sorts them, and runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engines.interpreter.attention import AttentionOperation, read_attention
from engines.interpreter.layers import LAYERS, Compute, torch_dtype
from engines.interpreter.reading import Unsupported, optional_dims
from engines.network.parsed import ParsedNetwork
from exporter.model.observe import See
from exporter.steppers.eager_stepper import to_torch

KINDS = ("CONSTANT", "ATTENTION_INPUT", "ATTENTION_OUTPUT", *LAYERS)  # kinds of layers that are known


@dataclass(frozen=True)
class Operation:
    """One layer.

    Attributes:
        name: name of the layer.
        inputs: names of its input tensors; None where an optional input is missing.
        output, dtype: name and dtype of its output tensor.
        compute: function of the inputs in order, or an attention.
    """

    name: str
    inputs: tuple[str | None, ...]
    output: str
    dtype: torch.dtype
    compute: Compute | AttentionOperation


@dataclass(frozen=True)
class Program:
    """A network that can run.

    Attributes:
        constants: constant tensors by name; weights stay in the memory of the network.
        operations: operations in an order in which every input is ready.
    """

    constants: dict[str, Tensor]
    operations: tuple[Operation, ...]

    def run(self, inputs: Mapping[str, Tensor], see: See) -> dict[str, Tensor]:
        """Computes every tensor of the network.

        Args:
            inputs: inputs of the network by name; the cache tensors are updated in place.
            see: called with the name and value of each computed tensor; its result is used instead of the value.

        Returns:
            Every tensor by name.
        """
        tensors = {**self.constants, **inputs}
        with torch.inference_mode():
            for operation in self.operations:
                arguments: list[Any] = [None if name is None else tensors[name] for name in operation.inputs]
                if isinstance(operation.compute, AttentionOperation):
                    queries, keys, values = arguments[:3]
                    result = operation.compute.compute(queries, keys, values, tensors, see)
                else:
                    result = operation.compute(*arguments)
                problem = f"{operation.name}: computed {result.dtype}, the network has {operation.dtype}"
                assert result.dtype == operation.dtype, problem
                tensors[operation.output] = see(operation.output, result)
        return tensors


def read_program(parsed: ParsedNetwork, initializer: Callable[[str], np.ndarray]) -> Program:
    """Reads a network's layers.

    Args:
        parsed: the network. It must live as long as the program, because the constants are views of its memory.
        initializer: function that reads an initializer of the ONNX file by name. TensorRT's Python API has no access to
            bfloat16 constants. The parser gives a constant the name of its initializer, so the initializer is read.

    Raises:
        Unsupported: the interpreter does not know a layer; the message has its name and kind.
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
            raise _unknown(layer, kind)
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
    compute: Compute | AttentionOperation
    if kind == "ATTENTION_INPUT":
        compute = attention = read_attention(layer, _attention_result(output.name))
        names = (*names[:3], *(name for name in (attention.mask, attention.key_lengths) if name is not None))
    elif kind == "ATTENTION_OUTPUT":
        compute = lambda x: x  # noqa: E731 - the input layer has computed the result
    elif kind in LAYERS:
        compute = LAYERS[kind](layer)
    else:
        raise _unknown(layer, kind)
    return Operation(layer.name, names, output.name, torch_dtype(output.dtype), compute)


def _unknown(layer: Any, kind: str) -> Unsupported:
    return Unsupported(f"interpreter: {layer.name} is a {kind} layer, expected one of {', '.join(KINDS)}")


def _attention_result(boundary: str) -> str:
    """The name of an attention's result. For a result X, the parser names the boundary "X_AttentionInput_output"."""
    return boundary.partition("_AttentionInput")[0]


def _constant(layer: Any, output: Any, initializer: Callable[[str], np.ndarray]) -> Tensor:
    weights = layer.weights
    array = weights if isinstance(weights, np.ndarray) else initializer(layer.name)
    tensor = to_torch(array).reshape(optional_dims(layer.shape) or [])
    problem = f"{layer.name}: the constant is {tensor.dtype}, the network has {output.dtype.name}"
    assert tensor.dtype == torch_dtype(output.dtype), problem
    return tensor


def _in_order(operations: list[Operation], ready: set[str]) -> tuple[Operation, ...]:
    """Sorts the operations, so that each comes after its inputs. TensorRT lists some before their inputs."""
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
