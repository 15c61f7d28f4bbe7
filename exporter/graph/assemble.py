"""Joins traced fragments into the graph of a unit: prologue, one block that is cloned for each layer, epilogue.

Tracing costs the same for one block as for eighty. A test proves that the result equals a graph traced in one piece.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass

from exporter import __version__
from exporter.graph.cache_forms import CACHE_FORMS
from exporter.graph.fragments import Fragment, trace_fragments
from exporter.graph.pieces import (
    block_piece,
    component_piece,
    embedding_piece,
    head_piece,
    prologue_piece,
    zero_pads_piece,
)
from exporter.spec.dtypes import ONNX_NAMES, ONNX_TYPES
from exporter.spec.graph_spec import GraphSpec
from exporter.spec.parameters import ROPE_TABLES, held_weights, name_in_block
from exporter.spec.stored_tensor import StoredTensor
from exporter.spec.tensors import IR_VERSION, OPSET, Contract
from exporter.spec.unit import Bounds
from exporter.spec.weight_formats import WeightFormat, is_quantized


@dataclass(frozen=True)
class StoredWeight:
    """What the graph stores for one parameter of a fragment.

    Attributes:
        name: name of the tensor in the graph.
        weights: canonical names of the weights it holds, several where they are merged.
        transposed: whether the graph has it [in, out], where a weight is [out, in].
    """

    name: str
    weights: tuple[str, ...]
    transposed: bool = False


@dataclass
class AssembledGraph:
    """A graph whose initializers hold no data yet, and the list of the data they need, in file order.

    Attributes:
        spec: the identity of the graph; of the whole unit, where the graph is one part of it.
        contract: the inputs and outputs of this graph.
    """

    spec: GraphSpec
    model: ir.Model
    stored: list[StoredTensor]
    contract: Contract


def assemble(spec: GraphSpec, part: Bounds | None = None) -> AssembledGraph:
    """Builds the ONNX graph of a unit, or of one part of it. No weight is read or allocated."""
    if spec.unit.kind == "component":
        assembly = _Assembly(spec, spec.contract)
        assembly.component()
        return assembly.finish()
    part = part or (0, spec.unit.n_layers)
    assembly = _Assembly(spec, spec.part_contract(part))
    assembly.decoder(part)
    return assembly.finish()


@dataclass
class _Assembly:
    spec: GraphSpec
    contract: Contract
    nodes: list[ir.Node] = field(default_factory=list)
    values: dict[str, ir.Value] = field(default_factory=dict)  # graph inputs by name
    outputs: dict[str, ir.Value] = field(default_factory=dict)  # graph outputs by name
    stored: dict[str, StoredTensor] = field(default_factory=dict)
    initializers: dict[str, ir.Value] = field(default_factory=dict)
    dequantized: dict[str, ir.Value] = field(default_factory=dict)  # weights that a node makes of integers, by name

    def __post_init__(self) -> None:
        for spec in self.contract.inputs:
            self.values[spec.name] = ir.Value(
                name=spec.name, shape=ir.Shape(spec.axes), type=ir.TensorType(ir.DataType(ONNX_TYPES[spec.dtype]))
            )

    def component(self) -> None:
        unit = self.spec.unit
        assert unit.component is not None, "the unit is a component"
        (fragment,) = trace_fragments([component_piece(self.spec)])
        names = {parameter: name_in_block(unit.component, parameter) for parameter in fragment.parameters}
        weights = {parameter: self._block_weight(name, 0) for parameter, name in names.items()}
        results = self.add(fragment, [self.values[spec.name] for spec in self.contract.inputs], "blocks.0.", weights)
        self.outputs = dict(zip((spec.name for spec in self.contract.outputs), results, strict=True))

    def decoder(self, part: Bounds) -> None:
        """Adds a block, stack or model, or some of its layers: prologue, embedding of a model, blocks, epilogue."""
        spec, unit, cache = self.spec, self.spec.unit, CACHE_FORMS[self.spec.unit.cache]
        embeds = unit.kind == "model" and part[0] == 0
        ends = unit.kind == "model" and part[1] == unit.n_layers
        pieces = [prologue_piece(spec), block_piece(spec), head_piece(spec) if ends else zero_pads_piece(spec)]
        if embeds:
            pieces.append(embedding_piece(spec))
        prologue, block, epilogue, *embedding = trace_fragments(pieces)

        tables = {name: StoredWeight(name, (name,)) for name in ROPE_TABLES}
        results = self.add(prologue, [self.values[name] for name in cache.step_inputs], "", tables)
        step = self.values | dict(zip(cache.step_values, results, strict=True))
        shared = [step[name] for name in ("cos", "sin", "visible", *cache.block_inputs)]

        hidden = step["input_ids" if embeds else "hidden_states"]
        for fragment in embedding:
            weight = StoredWeight("embedding.weight", ("embedding.weight",))
            (hidden,) = self.add(fragment, [hidden], "", {"weight": weight})
        for layer in range(*part):
            past = [step[f"past_key_values.{layer}.{kind}"] for kind in ("key", "value")]
            weights = {name: self._block_weight(name, layer) for name in block.parameters}
            hidden, key, value = self.add(block, [hidden, *shared, *past], f"blocks.{layer}.", weights)
            self.outputs |= {f"present.{layer}.key": key, f"present.{layer}.value": value}
        if ends:
            self._head(epilogue, [hidden, step["real"]] if unit.logits == "last" else [hidden])
        else:
            (self.outputs["hidden_states_out"],) = self.add(epilogue, [hidden, step["real"]], "", {})

    def _block_weight(self, name: str, layer: int) -> StoredWeight:
        """Returns what is stored under a name inside a block; the graph numbers its layers from 0."""
        held = held_weights(name)
        assert held, f"{name} is not in the table of a block's weights"
        block = f"blocks.{layer + self.spec.unit.first_layer}"
        weights = tuple(f"{block}.{weight.name}" for weight in held)
        return StoredWeight(f"blocks.{layer}.{name}", weights, transposed=len(held[0].axes) == 2)

    def _head(self, head: Fragment, arguments: list[ir.Value]) -> None:
        matrix = "embedding.weight" if self.spec.config.tie_word_embeddings else "lm_head.weight"
        weight = StoredWeight(matrix, (matrix,))
        if self.spec.weight_format is not None:  # its integers are its own, also where it is tied to the embedding
            weight = StoredWeight("lm_head.weight", (matrix,), transposed=True)
        weights = {"weight": weight, "norm.weight": StoredWeight("norm.weight", ("norm.weight",))}
        (self.outputs["logits"],) = self.add(head, arguments, "", weights)

    def add(
        self, fragment: Fragment, arguments: list[ir.Value], prefix: str, weights: dict[str, StoredWeight]
    ) -> list[ir.Value]:
        """Clones the nodes of a fragment and returns its outputs.

        Args:
            fragment: the fragment.
            arguments: values that take the place of its inputs.
            prefix: prefix of the names of its nodes and values.
            weights: parameter name → what the graph stores for it.
        """
        mapping: dict[ir.Value | None, ir.Value] = dict(zip(fragment.graph.inputs, arguments, strict=True))
        for name, parameter in fragment.parameters.items():
            mapping[parameter] = self._weight(parameter, weights[name])
        for constant in fragment.constants:
            mapping[constant] = self._constant(constant)
        for node in fragment.graph:
            inputs = [value and mapping[value] for value in node.inputs]
            attributes, name = list(node.attributes.values()), f"{prefix}{node.name}"
            clone = ir.Node(node.domain, node.op_type, inputs, attributes, name=name, num_outputs=len(node.outputs))
            for old, new in zip(node.outputs, clone.outputs, strict=True):
                new.name, new.shape, new.type = f"{prefix}{old.name}", old.shape and old.shape.copy(), old.type
                mapping[old] = new
            self.nodes.append(clone)
        return [mapping[value] for value in fragment.graph.outputs]

    def _weight(self, parameter: ir.Value, weight: StoredWeight) -> ir.Value:
        assert parameter.shape is not None and parameter.dtype is not None, "weights have shapes and dtypes"
        shape = tuple(parameter.shape.numpy())
        weight_format = self.spec.weight_format
        if weight_format is not None and is_quantized(weight.name):
            return self._dequantized(weight, shape, weight_format.of(weight.name))
        dtype = ONNX_NAMES[parameter.dtype]
        return self._initializer(StoredTensor(weight.name, weight.weights, dtype, shape, weight.transposed))

    def _dequantized(self, weight: StoredWeight, shape: tuple[int, ...], weight_format: WeightFormat) -> ir.Value:
        """Returns the weight as DequantizeLinear makes it from integers; onnxruntime and TensorRT read them packed."""
        name, dtype = weight.name, self.spec.dtype
        if name not in self.dequantized:
            tensors = weight_format.tensors((shape[0], shape[1]), dtype)
            inputs = [
                self._initializer(StoredTensor(f"{name}.{role}", weight.weights, *tensor, True, role))
                for role, tensor in tensors.items()
            ]
            blocks = {"axis": 0, "block_size": weight_format.block_size}
            node = ir.node("DequantizeLinear", inputs, blocks, name=name)
            result = node.outputs[0]
            result.name, result.shape = name, ir.Shape(shape)
            result.type = ir.TensorType(ir.DataType(ONNX_TYPES[dtype]))
            self.nodes.append(node)
            self.dequantized[name] = result
        return self.dequantized[name]

    def _initializer(self, stored: StoredTensor) -> ir.Value:
        if stored.name not in self.initializers:
            self.stored[stored.name] = stored
            kind = ir.TensorType(ir.DataType(ONNX_TYPES[stored.dtype]))
            self.initializers[stored.name] = ir.Value(name=stored.name, shape=ir.Shape(stored.shape), type=kind)
        return self.initializers[stored.name]

    def _constant(self, constant: ir.Value) -> ir.Value:
        """Returns one initializer for equal constants of all fragments, named by its content."""
        tensor = constant.const_value
        assert tensor is not None, "it is a constant"
        array = tensor.numpy()
        shape = "x".join(map(str, array.shape)) or "scalar"
        name = f"constant.{tensor.dtype.name.lower()}.{shape}.{'_'.join(map(str, array.flatten().tolist()))}"
        if name not in self.initializers:
            held = ir.tensor(array, dtype=tensor.dtype, name=name)
            self.initializers[name] = ir.Value(
                name=name, shape=ir.Shape(array.shape), type=ir.TensorType(held.dtype), const_value=held
            )
        return self.initializers[name]

    def finish(self) -> AssembledGraph:
        """Names the outputs as in the contract and closes the graph; nothing can be added afterwards."""
        ordered = []
        for spec in self.contract.outputs:
            value = self.outputs[spec.name]
            value.name, value.shape = spec.name, ir.Shape(spec.axes)
            value.type = ir.TensorType(ir.DataType(ONNX_TYPES[spec.dtype]))
            ordered.append(value)
        graph = ir.Graph(
            [self.values[spec.name] for spec in self.contract.inputs],
            ordered,
            nodes=self.nodes,
            initializers=list(self.initializers.values()),
            opset_imports={"": OPSET},
            name="blockline",
        )
        model = ir.Model(graph, ir_version=IR_VERSION, producer_name="blockline", producer_version=__version__)
        CommonSubexpressionEliminationPass()(model)  # prologue and head read the same sizes
        return AssembledGraph(self.spec, model, list(self.stored.values()), self.contract)
