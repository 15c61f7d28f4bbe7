"""Joins traced fragments into the whole graph of a unit: prologue, one block traced and cloned a layer, epilogue.

Tracing costs the same for one block as for eighty; a test proves the result equal to a graph traced in one piece.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass

from exporter import __version__
from exporter.graph.fragments import Fragment, trace_fragments
from exporter.graph.pieces import (
    block_piece,
    component_piece,
    embedding_piece,
    head_piece,
    prologue_piece,
    zero_pads_piece,
)
from exporter.graph.stored_tensor import StoredTensor
from exporter.spec.dtypes import ONNX_NAMES, ONNX_TYPES
from exporter.spec.graph_spec import GraphSpec
from exporter.spec.parameters import MERGED_WEIGHTS, ROPE_TABLES
from exporter.spec.tensors import IR_VERSION, OPSET, Contract
from exporter.spec.unit import Bounds
from exporter.spec.weight_formats import WeightFormat, is_quantized

Stored = tuple[
    str, tuple[str, ...], bool
]  # the graph's name, canonical names of the weights (several where merged), whether transposed


@dataclass
class AssembledGraph:
    """A whole graph whose initializers hold no data yet, and the list of what they must hold, in file order.

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
    dequantized: dict[str, ir.Value] = field(default_factory=dict)  # weights that a node makes of their parts, by name

    def __post_init__(self) -> None:
        for spec in self.contract.inputs:
            self.values[spec.name] = ir.Value(
                name=spec.name, shape=ir.Shape(spec.axes), type=ir.TensorType(ir.DataType(ONNX_TYPES[spec.dtype]))
            )

    def component(self) -> None:
        unit = self.spec.unit
        (fragment,) = trace_fragments([component_piece(self.spec)])
        weights = {
            name: _block_weight(_name_in_block(f"{unit.component}.{name}"), 0, unit.first_layer)
            for name in fragment.parameters
        }
        results = self.add(fragment, [self.values[spec.name] for spec in self.contract.inputs], "blocks.0.", weights)
        self.outputs = dict(zip((spec.name for spec in self.contract.outputs), results, strict=True))

    def decoder(self, part: Bounds) -> None:
        """Adds a block, stack or model, or some of its layers: prologue, embedding where there is one, blocks, epilogue."""
        step, spec, unit = self.values, self.spec, self.spec.unit
        growing = unit.cache == "growing"
        embeds = unit.kind == "model" and part[0] == 0
        ends = unit.kind == "model" and part[1] == unit.n_layers
        pieces = [prologue_piece(spec), block_piece(spec), head_piece(spec) if ends else zero_pads_piece(spec)]
        if embeds:
            pieces.append(embedding_piece(spec))
        prologue, block, epilogue, *embedding = trace_fragments(pieces)
        shared, real = self._prologue(prologue, growing)
        hidden = step["input_ids" if embeds else "hidden_states"]
        for fragment in embedding:
            (hidden,) = self.add(fragment, [hidden], "", {"weight": ("embedding.weight", ("embedding.weight",), False)})
        for layer in range(*part):
            cache = [step[f"past_key_values.{layer}.{kind}"] for kind in ("key", "value")]
            weights = {name: _block_weight(_name_in_block(name), layer, unit.first_layer) for name in block.parameters}
            hidden, key, value = self.add(block, [hidden, *shared, *cache], f"blocks.{layer}.", weights)
            self.outputs |= {f"present.{layer}.key": key, f"present.{layer}.value": value}
        if ends:
            self._head(epilogue, hidden)
        else:
            assert real is not None, "only a whole model's cache grows"
            (self.outputs["hidden_states_out"],) = self.add(epilogue, [hidden, real], "", {})

    def _prologue(self, prologue: Fragment, growing: bool) -> tuple[list[ir.Value], ir.Value | None]:
        """What every block reads beside its hidden states and cache, and which tokens are real where the epilogue asks for it."""
        tables: dict[str, Stored] = dict(
            zip(("rope_cos", "rope_sin"), ((name, (name,), False) for name in ROPE_TABLES), strict=True)
        )
        names = ("position_ids", "attention_mask") if growing else ("position_ids", "write_indices", "attention_mask")
        results = self.add(prologue, [self.values[name] for name in names], "", tables)
        if growing:
            return results, None
        *shared, real = results
        return [*shared, self.values["write_indices"]], real

    def _head(self, head: Fragment, hidden: ir.Value) -> None:
        matrix = "embedding.weight" if self.spec.config.tie_word_embeddings else "lm_head.weight"
        weights: dict[str, Stored] = {
            "weight": (matrix, (matrix,), False),
            "norm.weight": ("norm.weight", ("norm.weight",), False),
        }
        if (
            self.spec.weight_format is not None
        ):  # integers of its own, [in, out], also where the values are the embedding's
            weights["weight"] = ("lm_head.weight", (matrix,), True)
        names = ("write_indices", "attention_mask") if self.spec.unit.logits == "last" else ()
        (self.outputs["logits"],) = self.add(head, [hidden, *(self.values[name] for name in names)], "", weights)

    def add(
        self, fragment: Fragment, arguments: list[ir.Value], prefix: str, weights: dict[str, Stored]
    ) -> list[ir.Value]:
        """Clones a fragment's nodes onto `arguments`; returns its outputs. `weights` says of each parameter what is stored for it."""
        mapping: dict[ir.Value | None, ir.Value] = dict(zip(fragment.graph.inputs, arguments, strict=True))
        for name, parameter in fragment.parameters.items():
            mapping[parameter] = self._weight(parameter, *weights[name])
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

    def _weight(self, parameter: ir.Value, name: str, weights: tuple[str, ...], transposed: bool) -> ir.Value:
        assert parameter.shape is not None, "weights have shapes"
        shape = tuple(parameter.shape.numpy())
        weight_format = self.spec.weight_format
        if weight_format is not None and is_quantized(name):
            return self._dequantized(name, weights, shape, weight_format.of(name))
        assert parameter.dtype is not None, "weights have dtypes"
        dtype = ONNX_NAMES[parameter.dtype]
        return self._initializer(StoredTensor(name, weights, dtype, shape, transposed))

    def _dequantized(
        self, name: str, weights: tuple[str, ...], shape: tuple[int, ...], weight_format: WeightFormat
    ) -> ir.Value:
        """The weight as a DequantizeLinear makes it of its integers: onnxruntime and TensorRT both read them packed."""
        if name not in self.dequantized:
            tensors = weight_format.tensors((shape[0], shape[1]), self.spec.dtype)
            inputs = [
                self._initializer(StoredTensor(f"{name}.{part}", weights, *tensor, True, part))
                for part, tensor in tensors.items()
            ]
            blocks = {"axis": 0, "block_size": weight_format.block_size}
            node = ir.node("DequantizeLinear", inputs, blocks, name=name)
            result = node.outputs[0]
            result.name, result.shape, result.type = (
                name,
                ir.Shape(shape),
                ir.TensorType(ir.DataType(ONNX_TYPES[self.spec.dtype])),
            )
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
        """One initializer for equal constants of all fragments, named by what it holds."""
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
        """Names the outputs as the contract has them and closes the graph; nothing can be added afterwards."""
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


def _name_in_block(parameter: str) -> str:
    """The contract's name of a traced block's or component's parameter: `attention.qkv_proj.weight` for prepare_qkv.qkv_proj.weight."""
    module, _, rest = parameter.partition(".")
    owners = {
        "rms_norm": "attention_norm",
        "prepare_qkv": "attention",
        "merge_project": "attention",
        "swiglu_mlp": "mlp",
    }
    return f"{owners.get(module, module)}.{rest}"


def _block_weight(name: str, layer: int, first_layer: int) -> Stored:
    """What is stored for a weight of that name in a block, as the graph numbers its layers."""
    projection = name.removesuffix(".weight")
    weights = tuple(
        f"blocks.{layer + first_layer}.{part}.weight" for part in MERGED_WEIGHTS.get(projection, (projection,))
    )
    return f"blocks.{layer}.{name}", weights, projection.endswith("_proj")
