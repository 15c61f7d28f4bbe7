"""Validates a model or stack layer by layer: compares one block of its graph with one eager block at a time.

Each piece is cut out of model.onnx as it is: the same nodes, and the same weights read from the same data file. A 16 GB
model is therefore validated in the memory of one block.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from exporter.bundle.bundle import Bundle
from exporter.model.block import RMSNorm
from exporter.model.weights import WeightSource
from exporter.spec.dtypes import ONNX_TYPES, numpy_dtype
from exporter.spec.tensors import SEQUENCE, Contract, TensorSpec
from exporter.spec.unit import Unit
from exporter.steppers.eager_stepper import EagerStepper
from exporter.steppers.onnxruntime_stepper import OnnxruntimeStepper
from exporter.steppers.protocol import Stepper
from exporter.validation.by_operation import OperationCheck, judge_graph, record_values
from exporter.validation.comparison import Comparison, Meaning, compare, compare_tensor
from exporter.validation.cost import Cost, LargestValues, SizedStepper, usual_error
from exporter.validation.cpu_graph import runs_as_twin, twin_piece, twin_run
from exporter.validation.recording import Recording, record_run
from exporter.validation.scenarios import RunLimits
from exporter.validation.tolerances import VALIDATION_STAGE, tolerance

HIDDEN = "hidden_states"

_VOCABULARY_RUN = 16384  # rows of the output head that are multiplied at a time


def residual(layer: int) -> str:
    """Returns the name of the value that is a block's output."""
    return f"blocks.{layer}.mlp.residual"


def layer_graph(model: onnx.ModelProto, layer: int, hidden_in: str, block: Contract) -> onnx.ModelProto:
    """Returns one block of a whole graph as a graph of its own with a block's contract.

    The result refers to weights by their place in the data file and holds none itself.

    Args:
        model: the whole graph, read without its data.
        layer: index of the block, as the graph numbers it.
        hidden_in: name of the value that is the block's input.
        block: contract of a block unit in the graph's dtype.
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
    nodes += [  # the output of a block unit is zero at pads
        helper.make_node(
            "Unsqueeze", ["attention_mask.real", "validate.axis"], ["validate.real"], name="validate.real"
        ),
        helper.make_node(
            "Where", ["validate.real", hidden_out, "validate.zero"], ["hidden_states_out"], name="hidden_states_out"
        ),
    ]
    return _model(model, nodes, block, [axis, zero])


def head_graph(model: onnx.ModelProto, unit: Unit, dtype: str) -> tuple[onnx.ModelProto, Contract]:
    """Returns the final norm and output head as a graph of its own, with its contract.

    It computes logits: fp32 [B, V] from the last tokens' hidden states [B, E], or [B, T, V] from [B, T, E] where the
        unit
    returns all logits.
    """
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
    """Returns the nodes that compute `outputs`, in order, from the graph's inputs and the value `cut`."""
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


# --- the validation ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class LayerValidation:
    """Validates the pieces of one bundle's graph; each is compared with the eager definition of that piece.

    Attributes:
        bundle: a stack or model whose cache is updated in place.
        weights: weights rounded to the bundle's dtype.
        seed: seed for the random inputs.
    """

    bundle: Bundle
    weights: WeightSource
    seed: int

    def run(self, say: Callable[[str], None]) -> tuple[Meaning, Cost]:
        """Answers both questions for a model's embedding, every block in every scenario, and a model's head."""
        dtype = self.bundle.manifest.dtype
        pieces: list[Meaning] = []
        own: list[Comparison] = []
        largest = LargestValues()
        for meaning, comparisons, sizes in self._pieces(say):
            pieces.append(meaning)
            own += comparisons
            for name, size in sizes.items():
                largest.note(name, size)
        candidate = "the eager definition" if runs_as_twin(dtype) else "onnxruntime"
        usual = usual_error(Unit("block"), dtype)
        cost = Cost(dtype, f"{candidate} in {dtype}, one block at a time", own, usual, largest)
        return Meaning.of_pieces(pieces), cost

    def _pieces(
        self, say: Callable[[str], None]
    ) -> Iterator[tuple[Meaning, Sequence[Comparison], Mapping[str, float]]]:
        """Yields the answer for each piece, what it costs, and the largest values in it."""
        unit = self.bundle.manifest.unit
        is_model = unit.kind == "model"
        bounds = self.bundle.manifest.parts or ((0, unit.n_layers),)
        for part, (first, stop) in zip(self.bundle.parts, bounds, strict=True):
            model = onnx.load(part.graph_path, load_external_data=False)
            if is_model and first == 0:
                say("validate: embedding")
                yield self._meaning([self._embedding(model, part.folder)]), (), {}
            hidden_in = "embedding" if is_model and first == 0 else HIDDEN
            for layer in range(first, stop):
                say(f"validate: layer {layer + 1} of {unit.n_layers}")
                yield self._block(model, part.folder, layer, hidden_in)
                hidden_in = residual(layer)
            if is_model and stop == unit.n_layers:
                say("validate: output head")
                yield self._meaning([self._head(model, part.folder)]), (), {}

    def _meaning(
        self, comparisons: Sequence[Comparison], operations: Sequence[OperationCheck] | None = None
    ) -> Meaning:
        allowed = tolerance(VALIDATION_STAGE, Unit("block"), "fp32")
        reference, candidate = "eager PyTorch in fp32 on the CPU", "onnxruntime on CPUExecutionProvider"
        through = f"{twin_run(self.bundle.manifest.dtype)}, its blocks one at a time"
        return Meaning(comparisons, allowed, reference, candidate, through, operations)

    def _block(
        self, model: onnx.ModelProto, folder: Path, layer: int, hidden_in: str
    ) -> tuple[Meaning, Sequence[Comparison], Mapping[str, float]]:
        manifest = self.bundle.manifest
        dtype, unit = manifest.dtype, Unit("block", first_layer=manifest.unit.first_layer + layer)
        block = dataclasses.replace(manifest.spec, unit=unit)
        contract, where = block.contract, f"layer {unit.first_layer}: "

        def recorded(stepper: Stepper) -> Recording:
            return record_run(block, stepper, self.seed)

        eager = SizedStepper.from_weights(block.in_dtype("fp32"), self.weights)
        reference = recorded(eager)
        piece = layer_graph(model, layer, hidden_in, contract)
        own_graph = piece.SerializeToString()
        with twin_piece(piece, folder, contract, dtype) as twin:
            with twin.open() as stepper:
                candidate = recorded(stepper)
            comparisons = compare(reference, candidate, tolerance(VALIDATION_STAGE, unit, "fp32"))
            operations = None
            if not all(c.passed for c in comparisons):
                steps = record_values(block, self.weights, self.seed, RunLimits())
                steps = [step.renamed("blocks.0.", f"blocks.{layer}.") for step in steps]
                operations = [
                    dataclasses.replace(check, scenario=where + check.scenario)
                    for check in judge_graph(twin.model, twin.data_folder, twin.contract, steps)
                ]
        if runs_as_twin(dtype):
            candidate = recorded(EagerStepper.from_weights(block, self.weights))
        elif dtype != "fp32":
            with contextlib.closing(OnnxruntimeStepper(own_graph, contract, dtype, data_folder=folder)) as own:
                candidate = recorded(own)
        cost = compare(reference, candidate, usual_error(unit, dtype))
        comparisons, cost = (
            [dataclasses.replace(c, scenario=where + c.scenario) for c in several] for several in (comparisons, cost)
        )
        sizes = {name.replace("blocks.0.", f"blocks.{layer}.", 1): size for name, size in eager.largest.sizes.items()}
        return self._meaning(comparisons, operations), cost, sizes

    def _embedding(self, model: onnx.ModelProto, folder: Path) -> Comparison:
        """Compares rows of the embedding, which must equal the weights bit for bit."""
        manifest = self.bundle.manifest
        config, dtype = manifest.config, manifest.dtype
        ids = np.random.default_rng(self.seed).integers(0, config.vocab_size, (2, 8))
        tokens = TensorSpec("input_ids", "int64", ("batch_size", SEQUENCE))
        output = TensorSpec("embedding", dtype, ("batch_size", SEQUENCE, config.hidden_size))
        contract = Contract((tokens,), (output,))
        piece = _model(model, _nodes_between(model.graph, ["embedding"], ""), contract, [])
        with twin_piece(piece, folder, contract, dtype) as twin, twin.open() as stepper:
            rows = stepper.run({"input_ids": ids})["embedding"]
        expected = [self.weights.read("embedding.weight", rows=slice(i, i + 1)).numpy()[0] for i in ids.flatten()]
        return compare_tensor("embedding", "embedding", [np.stack(expected).reshape(rows.shape)], [rows], 0.0)

    def _head(self, model: onnx.ModelProto, folder: Path) -> Comparison:
        """Compares final norm and head on random hidden states with float32 products."""
        manifest, config = self.bundle.manifest, self.bundle.manifest.config
        piece, contract = head_graph(model, manifest.unit, manifest.dtype)
        hidden = np.random.default_rng(self.seed).standard_normal((3, config.hidden_size))
        x = hidden.astype(numpy_dtype(manifest.dtype))
        if SEQUENCE in contract.inputs[0].axes:
            x = x[None]
        with twin_piece(piece, folder, contract, manifest.dtype) as twin, twin.open() as stepper:
            logits = stepper.run({HIDDEN: x})["logits"]
        norm = RMSNorm(config.hidden_size, config.norm_eps)
        norm.load_state_dict({"weight": self.weights.read("norm.weight")})
        head = "embedding.weight" if config.tie_word_embeddings and not self.weights.has_own_head else "lm_head.weight"
        with torch.inference_mode():
            normed = norm(torch.from_numpy(x.astype(np.float32)))
            runs = [slice(start, start + _VOCABULARY_RUN) for start in range(0, config.vocab_size, _VOCABULARY_RUN)]
            expected = torch.cat([normed @ self.weights.read(head, rows=run).T for run in runs], dim=-1).numpy()
        allowed = tolerance(VALIDATION_STAGE, manifest.unit, "fp32").allowed
        return compare_tensor("output head", "logits", [expected], [logits], allowed)
