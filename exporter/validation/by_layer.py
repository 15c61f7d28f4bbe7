"""Validates a model or stack layer by layer: one block of its graph against one eager block at a time, never the whole.

Each piece is cut out of model.onnx as the file has it (same nodes, same weights, read from the same data file), so that a
16 GB model is validated in the memory of one block.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from exporter.bundle.bundle import Bundle
from exporter.graph.float32_twin import widen_model
from exporter.model.block import RMSNorm
from exporter.model.weights import WeightSource
from exporter.placing.temporaries import scratch_folder
from exporter.spec.dtypes import ONNX_TYPES, numpy_dtype
from exporter.spec.tensors import SEQUENCE, Contract, TensorSpec
from exporter.spec.unit import Unit
from exporter.steppers.eager_stepper import EagerStepper
from exporter.steppers.onnxruntime_stepper import OnnxruntimeStepper
from exporter.validation.comparison import Comparison, compare, compare_tensor
from exporter.validation.control import judge_by_control
from exporter.validation.recording import Recording, record
from exporter.validation.tolerances import tolerance

HIDDEN = "hidden_states"
_VOCABULARY_RUN = 16384  # rows of the output head at a time


def residual(layer: int) -> str:
    """The value that a block's hidden states leave as."""
    return f"blocks.{layer}.mlp.residual"


def layer_graph(model: onnx.ModelProto, layer: int, hidden_in: str, block: Contract) -> onnx.ModelProto:
    """One block of a whole graph as a graph of its own with a block's contract; it holds no weights, only where they lie.

    Args:
        model: the whole graph, read without its data.
        layer: which of its blocks, as the graph numbers them.
        hidden_in: the value that its hidden states come in as.
        block: the contract of a block unit in the graph's dtype.
    """
    hidden_out = residual(layer)
    presents = [f"present.{layer}.{kind}" for kind in ("key", "value")]
    nodes = _nodes_between(model.graph, [hidden_out, *presents, "attention_mask.real"], hidden_in)
    names = {hidden_in: HIDDEN}
    for kind in ("key", "value"):
        names |= {
            f"past_key_values.{layer}.{kind}": f"past_key_values.0.{kind}",
            f"present.{layer}.{kind}": f"present.0.{kind}",
        }
    nodes = [_renamed(node, names) for node in nodes]
    element_type = ONNX_TYPES[block.inputs[0].dtype]
    axis = numpy_helper.from_array(np.array([2], np.int64), "validate.axis")
    zero = numpy_helper.from_array(np.zeros((), helper.tensor_dtype_to_np_dtype(element_type)), "validate.zero")
    nodes += [  # pads leave a block unit as zeros
        helper.make_node(
            "Unsqueeze", ["attention_mask.real", "validate.axis"], ["validate.real"], name="validate.real"
        ),
        helper.make_node(
            "Where", ["validate.real", hidden_out, "validate.zero"], ["hidden_states_out"], name="hidden_states_out"
        ),
    ]
    return _model(model, nodes, block, [axis, zero])


def head_graph(model: onnx.ModelProto, unit: Unit, dtype: str) -> tuple[onnx.ModelProto, Contract]:
    """Final norm and output head as a graph: hidden states [B, E] of the last tokens → float32 logits [B, V]."""
    source = "last_token" if unit.logits == "last" else residual(unit.n_layers - 1)
    nodes = [_renamed(node, {source: HIDDEN}) for node in _nodes_between(model.graph, ["logits"], source)]
    logits = next(value for value in model.graph.output if value.name == "logits")
    vocabulary = logits.type.tensor_type.shape.dim[-1].dim_value
    weight = next(tensor for tensor in model.graph.initializer if tensor.name == "norm.weight")
    tokens = ("batch_size",) if unit.logits == "last" else ("batch_size", "sequence_length")
    contract = Contract(
        (TensorSpec(HIDDEN, dtype, (*tokens, weight.dims[0])),), (TensorSpec("logits", "fp32", (*tokens, vocabulary)),)
    )
    return _model(model, nodes, contract, []), contract


def _nodes_between(graph: onnx.GraphProto, outputs: list[str], cut: str) -> list[onnx.NodeProto]:
    """The nodes that make `outputs`, in order, from the graph's inputs and the value `cut` on."""
    wanted, kept = set(outputs), []
    for node in reversed(graph.node):
        if wanted & set(node.output) - {cut}:
            kept.append(node)
            wanted |= set(node.input)
    return kept[::-1]


def _renamed(node: onnx.NodeProto, names: dict[str, str]) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    for field in (copy.input, copy.output):
        for index, name in enumerate(field):
            field[index] = names.get(name, name)
    return copy


def _model(
    whole: onnx.ModelProto, nodes: list[onnx.NodeProto], contract: Contract, constants: list[TensorProto]
) -> onnx.ModelProto:
    read = {name for node in nodes for name in node.input}
    inputs, outputs = (
        [helper.make_tensor_value_info(spec.name, ONNX_TYPES[spec.dtype], list(spec.axes)) for spec in specs]
        for specs in (contract.inputs, contract.outputs)
    )
    initializers = [tensor for tensor in whole.graph.initializer if tensor.name in read]
    graph = helper.make_graph(nodes, "blockline", inputs, outputs, [*initializers, *constants])
    return helper.make_model(graph, opset_imports=list(whole.opset_import), ir_version=whole.ir_version)


# --- the validation ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class LayerValidation:
    """Validates the pieces of one bundle's graph, each against the eager definition of that piece.

    Attributes:
        bundle: a stack or model whose cache is in place.
        weights: rounded to the bundle's dtype.
        seed: of the random inputs.
    """

    bundle: Bundle
    weights: WeightSource
    seed: int

    def run(self, say: Callable[[str], None]) -> Iterator[Comparison]:
        """Every block's scenarios, then a model's embedding and head."""
        unit = self.bundle.manifest.unit
        bounds = self.bundle.manifest.parts or ((0, unit.n_layers),)
        for part, (first, stop) in zip(self.bundle.parts, bounds, strict=True):
            model = onnx.load(part.graph_path, load_external_data=False)
            if unit.kind == "model" and first == 0:
                say("validate: embedding")
                yield self._embedding(model, part.folder)
            for layer in range(first, stop):
                say(f"validate: layer {layer + 1} of {unit.n_layers}")
                yield from self._block(
                    model,
                    part.folder,
                    layer,
                    "" if layer > first else HIDDEN if first or unit.kind != "model" else "embedding",
                )
            if unit.kind == "model" and stop == unit.n_layers:
                say("validate: output head")
                yield self._head(model, part.folder)

    @property
    def _arithmetic(self) -> str:
        return "fp32" if self.bundle.manifest.dtype == "bf16" else self.bundle.manifest.dtype

    @contextlib.contextmanager
    def _open(self, piece: onnx.ModelProto, folder: Path, contract: Contract) -> Iterator[OnnxruntimeStepper]:
        """The piece in onnxruntime, a bf16 one as its float32 twin."""
        with scratch_folder() as scratch:
            if self.bundle.manifest.dtype == "bf16":
                stepper = OnnxruntimeStepper(str(widen_model(piece, folder, scratch)), contract, "fp32")
            else:
                stepper = OnnxruntimeStepper(piece.SerializeToString(), contract, self._arithmetic, data_folder=folder)
            try:
                yield stepper
            finally:
                stepper.close()

    def _block(self, model: onnx.ModelProto, folder: Path, layer: int, hidden_in: str) -> list[Comparison]:
        manifest = self.bundle.manifest
        unit = Unit("block", first_layer=manifest.unit.first_layer + layer)
        block = dataclasses.replace(manifest.spec, unit=unit)
        inputs = block.in_dtype(self._arithmetic)

        def eager(dtype: str) -> Recording:
            return record(inputs, EagerStepper.from_weights(block.in_dtype(dtype), self.weights), self.seed)

        reference = eager("fp32")
        piece = layer_graph(model, layer, hidden_in or residual(layer - 1), block.contract)
        with self._open(piece, folder, inputs.contract) as stepper:
            candidate = record(inputs, stepper, self.seed)
        comparisons = compare(reference, candidate, tolerance(("eager", "onnxruntime"), unit, manifest.dtype))
        if not all(c.passed for c in comparisons):
            comparisons = judge_by_control(
                comparisons, reference, eager("fp64" if self._arithmetic == "fp32" else self._arithmetic)
            )
        return [
            dataclasses.replace(c, scenario=f"layer {manifest.unit.first_layer + layer}: {c.scenario}")
            for c in comparisons
        ]

    def _embedding(self, model: onnx.ModelProto, folder: Path) -> Comparison:
        """Rows of the embedding, which must be the weights' own to the last bit."""
        manifest = self.bundle.manifest
        ids = np.random.default_rng(self.seed).integers(0, manifest.config.vocab_size, (2, 8))
        output = TensorSpec("embedding", self._arithmetic, ("batch_size", SEQUENCE, manifest.config.hidden_size))
        contract = Contract((TensorSpec("input_ids", "int64", ("batch_size", SEQUENCE)),), (output,))
        written = dataclasses.replace(contract, outputs=(dataclasses.replace(output, dtype=manifest.dtype),))
        with self._open(
            _model(model, _nodes_between(model.graph, ["embedding"], ""), written, []), folder, contract
        ) as stepper:
            rows = stepper.run({"input_ids": ids})["embedding"]
        expected = [self.weights.read("embedding.weight", rows=slice(i, i + 1)).numpy()[0] for i in ids.flatten()]
        return compare_tensor("embedding", "embedding", [np.stack(expected).reshape(rows.shape)], [rows], 0.0)

    def _head(self, model: onnx.ModelProto, folder: Path) -> Comparison:
        """Final norm and head on random hidden states, against the float32 product taken a run of the vocabulary at a time."""
        manifest, config = self.bundle.manifest, self.bundle.manifest.config
        piece, contract = head_graph(model, manifest.unit, manifest.dtype)
        x = (
            np.random.default_rng(self.seed)
            .standard_normal((3, config.hidden_size))
            .astype(numpy_dtype(manifest.dtype))
        )
        if SEQUENCE in contract.inputs[0].axes:
            x = x[None]
        if self._arithmetic != manifest.dtype:
            contract = Contract((dataclasses.replace(contract.inputs[0], dtype="fp32"),), contract.outputs)
        with self._open(piece, folder, contract) as stepper:
            logits = stepper.run({HIDDEN: x})["logits"]
        norm = RMSNorm(config.hidden_size, config.norm_eps)
        norm.load_state_dict({"weight": self.weights.read("norm.weight")})
        head = "embedding.weight" if config.tie_word_embeddings and not self.weights.has_own_head else "lm_head.weight"
        with torch.inference_mode():
            normed = norm(torch.from_numpy(x.astype(np.float32)))
            runs = [slice(start, start + _VOCABULARY_RUN) for start in range(0, config.vocab_size, _VOCABULARY_RUN)]
            expected = torch.cat([normed @ self.weights.read(head, rows=run).T for run in runs], dim=-1).numpy()
        allowed = tolerance(("eager", "onnxruntime"), manifest.unit, manifest.dtype).allowed
        return compare_tensor("output head", "logits", [expected], [logits], allowed)
