"""Every exported graph keeps the contract, has no size of the tracing example, and equals a graph traced at once."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import exporter.graph.fragments
from engines.interpreter.stepper import InterpreterStepper
from exporter.bundle.bundle import Bundle
from exporter.bundle.manifest import GRAPH_FILE
from exporter.common.errors import CheckFailed
from exporter.export import ExportRequest, export_bundle
from exporter.graph import fused_decoder as traced
from exporter.graph.assemble import assemble
from exporter.graph.cache_forms import InPlaceCache
from exporter.graph.contract_check import check_graph
from exporter.graph.fragments import EXAMPLE_SIZES, Fragment, Piece, _trace, trace_fragments
from exporter.graph.pieces import block_piece, head_piece, prologue_piece
from exporter.model.weights import RandomWeights
from exporter.spec.dtypes import DTYPES
from exporter.spec.feeds import step_feeds
from exporter.spec.graph_spec import GraphSpec
from exporter.spec.tensors import BATCH, CAPACITY, OPSET, PAST, SEQUENCE, TOTAL, TensorSpec, graph_contract
from exporter.spec.unit import COMPONENTS, Unit
from exporter.steppers.eager_stepper import EagerStepper
from exporter.steppers.onnxruntime_stepper import OnnxruntimeStepper
from exporter.validation.tolerances import tolerance
from tests.conftest import MAX_POSITIONS, TINY

UNITS = ["block", "stack", "model", *(f"component:{name}" for name in COMPONENTS)]


def load(bundle: Bundle) -> onnx.ModelProto:
    return onnx.load(bundle.graph_path, load_external_data=False)


def axes(values) -> dict:
    return {
        v.name: (v.type.tensor_type.elem_type, [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim])
        for v in values
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unit", UNITS)
def test_every_graph_keeps_the_contract(tiny_bundle, unit, dtype):
    bundle = tiny_bundle(unit, dtype)
    check_graph(bundle.graph_path, bundle.manifest.contract)
    model = load(bundle)
    assert [(o.domain, o.version) for o in model.opset_import] == [("", OPSET)]
    assert all(node.domain == "" for node in model.graph.node)
    for node in model.graph.node:
        if node.op_type == "Attention":
            assert len(node.output) == 1 and len(node.input) == 4 and all(node.input)
            assert not {a.name for a in node.attribute} & {"is_causal", "softcap", "softmax_precision"}
    if unit != "component:repeat_kv":
        copying = {"Tile", "Expand", "Concat", "Pad"}
        allowed = (
            {"Expand", "Concat"} if unit == "component:prepare_qkv" else set()
        )  # R has no batch axis: it is spread over the rows
        assert not copying & {node.op_type for node in model.graph.node} - allowed
    for node in model.graph.node:
        if node.op_type == "Split":  # of merged projections, never of a cache
            assert re.fullmatch(r"blocks\.\d\.(attention\.qkv_proj|mlp\.gate_up_proj)/Split", node.name)
            assert node.input[0] == node.name.removesuffix("/Split")


def test_a_blocks_interface_is_the_documented_one(tiny_bundle):
    graph = load(tiny_bundle("block", "fp16")).graph
    int64, fp16 = onnx.TensorProto.INT64, onnx.TensorProto.FLOAT16
    cache = (fp16, ["batch_size", 2, "cache_capacity", 16])
    assert axes(graph.input) == {
        "hidden_states": (fp16, ["batch_size", "sequence_length", 64]),
        "position_ids": (int64, ["batch_size", "sequence_length"]),
        "write_indices": (int64, ["batch_size"]),
        "attention_mask": (int64, ["batch_size", "total_sequence_length"]),
        "past_key_values.0.key": cache,
        "past_key_values.0.value": cache,
    }
    assert axes(graph.output) == {
        "hidden_states_out": (fp16, ["batch_size", "sequence_length", 64]),
        "present.0.key": cache,
        "present.0.value": cache,
    }


@pytest.mark.parametrize(
    ("logits", "expected"), [("last", ["batch_size", 101]), ("all", ["batch_size", "sequence_length", 101])]
)
def test_a_models_interface_is_the_documented_one(tiny_bundle, logits, expected):
    graph = load(tiny_bundle("model", "fp16", logits=logits)).graph
    assert axes(graph.input)["input_ids"] == (onnx.TensorProto.INT64, ["batch_size", "sequence_length"])
    assert axes(graph.output)["logits"] == (onnx.TensorProto.FLOAT, expected)
    assert [v.name for v in graph.output][1:] == [f"present.{i}.{kind}" for i in range(3) for kind in ("key", "value")]


def test_values_are_named_by_block_and_operation(tiny_bundle):
    values = {output for node in load(tiny_bundle("stack", "fp16")).graph.node for output in node.output}
    operations = (
        "attention_norm attention.q_proj attention.k_proj attention.v_proj "
        "attention.reshape_q attention.reshape_k attention.reshape_v attention.q_heads attention.k_heads "
        "attention.rope_q attention.rope_k attention.heads attention.merged attention.o_proj "
        "attention.residual ffn_norm mlp.gate_proj mlp.up_proj mlp.product mlp.down_proj"
    )
    assert {f"blocks.{i}.{name}" for i in range(3) for name in operations.split()} <= values


def test_the_mask_and_rotation_are_made_once_per_graph(tiny_bundle):
    blocks_1, blocks_3 = (load(tiny_bundle("stack", "fp32", layers)).graph.node for layers in ("1", None))
    per_block = (len(blocks_3) - len(blocks_1)) / 2
    in_block = [node for node in blocks_3 if node.name.startswith("blocks.0.")]
    assert per_block == len([n for n in blocks_3 if n.name.startswith("blocks.") or n.name.startswith("present.")]) / 3
    assert not {"Range", "LessOrEqual", "Gather", "Shape", "Where"} & {node.op_type for node in in_block}


@pytest.mark.slow
def test_tied_weights_are_stored_once():
    import dataclasses

    for tied in (True, False):
        config = dataclasses.replace(TINY, tie_word_embeddings=tied)
        spec = GraphSpec(config, Unit.parse("model", config), "fp32", MAX_POSITIONS)
        names = {stored.name for stored in assemble(spec).stored}
        assert ("lm_head.weight" in names) is not tied


# --- sizes of the tracing example must not leak -----------------------------------------------------------------------

CAPACITY_ROWS = 16
FULL = None  # a past length that leaves room for exactly this step's tokens
GRID = [
    (b, t, CAPACITY_ROWS - t if p is FULL else p)
    for b, t, p in itertools.product((1, 2, 3, 5), (1, 2, 7), (0, 1, 8, FULL))
]


@pytest.mark.parametrize("unit", ["block", "stack", "model"])
def test_every_shape_of_the_grid_equals_eager(tiny_bundle, unit):
    bundle = tiny_bundle(unit, "fp32")
    steppers = EagerStepper.from_bundle(bundle), OnnxruntimeStepper.from_bundle(bundle)
    rng = np.random.default_rng(0)
    allowed = tolerance(("eager", "onnxruntime"), bundle.manifest.unit, "fp32").allowed
    name = bundle.manifest.contract.inputs[0].name
    for batch, seq_len, past_len in GRID:
        shape = (batch, seq_len) if unit == "model" else (batch, seq_len, TINY.hidden_size)
        x = (
            rng.integers(0, TINY.vocab_size, shape)
            if unit == "model"
            else rng.standard_normal(shape).astype(np.float32)
        )
        feeds = step_feeds(name, x, np.full(batch, past_len), np.full(batch, seq_len))
        results = []
        for stepper in steppers:
            cache = stepper.new_cache(batch, CAPACITY_ROWS)
            for i, array in enumerate(cache.arrays):
                array[:, :, :past_len] = np.random.default_rng(i).standard_normal(array[:, :, :past_len].shape)
            results.append((next(iter(stepper.run(feeds, cache).values())), np.stack(cache.arrays)))
        (expected, expected_cache), (got, got_cache) = results
        assert got.shape == expected.shape
        error = np.abs(got - expected).max() / np.sqrt((expected**2).mean())
        assert error <= allowed, (batch, seq_len, past_len)
        np.testing.assert_allclose(got_cache, expected_cache, atol=1e-4)


# --- assembled from fragments = traced in one piece -------------------------------------------------------------------


class OnePiece(nn.Module):
    """The whole decoder as one module, to be traced at once."""

    def __init__(self, unit: Unit):
        super().__init__()
        self.unit = unit
        self.prologue = traced.Prologue(TINY, MAX_POSITIONS, InPlaceCache())
        self.blocks = nn.ModuleList(traced.TracedBlock(TINY, False, InPlaceCache()) for _ in range(unit.n_layers))
        if unit.kind == "model":
            self.embedding, self.epilogue = traced.Embedding(TINY), traced.Head(TINY, unit.logits, transposed=False)
        else:
            self.epilogue = traced.ZeroPads()

    def forward(self, x, position_ids, write_indices, attention_mask, *past):
        cos, sin, visible, total, real = self.prologue(position_ids, write_indices, attention_mask)
        h, presents = self.embedding(x) if self.unit.kind == "model" else x, []
        for i, block in enumerate(self.blocks):
            h, key, value = block(h, cos, sin, visible, total, write_indices, *past[2 * i : 2 * i + 2])
            presents += [key, value]
        return self.epilogue(h, real), *presents


class Flat(OnePiece):
    """torch.export wants a fixed list of arguments to name their axes."""

    def forward(self, x, position_ids, write_indices, attention_mask, k0, v0, k1, v1):
        return super().forward(x, position_ids, write_indices, attention_mask, k0, v0, k1, v1)


def structure(graph: ir.Graph) -> list[str]:
    """A hash of each output, from operators, attributes and wiring and not from names: equal hashes, equal graphs."""
    digests: dict[ir.Value, str] = {}

    def digest(text: str) -> str:
        return hashlib.sha256(text.encode()).hexdigest()

    for i, value in enumerate(graph.inputs):
        digests[value] = f"input {i}"

    def of(value):
        if value is None:
            return "none"
        if value not in digests:  # an initializer
            held = value.const_value
            digests[value] = (
                f"constant {held.dtype} {held.numpy().tolist()}"
                if held is not None
                else f"weight {value.dtype} {list(value.shape)}"
            )
        return digests[value]

    for node in graph:
        if node.op_type == "Shape":  # whichever input an axis is read from, it is the same axis
            start, end = (node.attributes[k].value for k in ("start", "end"))
            digests[node.outputs[0]] = f"size {node.inputs[0].shape[start:end]}"
            continue
        attributes = sorted((k, str(a.value)) for k, a in node.attributes.items())
        for k, output in enumerate(node.outputs):
            digests[output] = digest(f"{node.op_type} {attributes} {[of(v) for v in node.inputs]} {k}")
    return [digests[value] for value in graph.outputs]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stack", "model"])
def test_assembled_graph_equals_one_traced_in_one_piece(kind):
    unit = Unit.parse(kind, TINY, "2")
    contract = graph_contract(TINY, unit, "fp32")
    inputs = tuple(TensorSpec(f"input_{i}", spec.dtype, spec.axes) for i, spec in enumerate(contract.inputs))
    outputs = tuple(spec.name for spec in contract.outputs)
    (whole,) = trace_fragments([Piece(Flat, (unit,), "fp32", inputs, outputs)])
    assembled = assemble(GraphSpec(TINY, unit, "fp32", MAX_POSITIONS)).model.graph
    assert structure(whole.graph) == structure(assembled)


def text(fragment: Fragment) -> list[str]:
    """A fragment to the last name and shape, but for the names of its arguments."""
    names = {value: f"input {i}" for i, value in enumerate(fragment.graph.inputs)}
    names |= {value: name for name, value in fragment.parameters.items()}
    names |= {value: f"constant {value.const_value.numpy().tolist()}" for value in fragment.constants}
    lines = []
    for node in fragment.graph:
        inputs = [value and names.get(value, value.name) for value in node.inputs]
        lines.append(f"{node.name} {node.op_type} {inputs} {[str(value) for value in node.outputs]}")
    return lines


@pytest.mark.slow
def test_a_fragment_does_not_depend_on_what_it_is_traced_beside():
    """What was exported before in a process decides which pieces are traced together; the bytes must not follow it."""
    in_place, growing = (
        GraphSpec(TINY, Unit("model", n_layers=3, logits="all", cache=cache), "fp32", MAX_POSITIONS)
        for cache in ("in_place", "growing")
    )
    pieces = [
        prologue_piece(in_place),
        block_piece(in_place),
        head_piece(in_place),
        block_piece(growing.in_dtype("fp16")),
    ]
    alone = [text(_trace([piece])[0]) for piece in pieces]
    assert [text(fragment) for fragment in _trace(pieces)] == alone
    assert [text(fragment) for fragment in _trace(pieces[::-1])] == alone[::-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [{BATCH: 3, SEQUENCE: 3, PAST: 3}, dict.fromkeys(EXAMPLE_SIZES, 7), {SEQUENCE: 1}],
    ids=["B = T = P", "all equal", "one token"],
)
def test_an_example_of_equal_sizes_or_of_one_token_gives_the_same_graph(monkeypatch, sizes):
    """So no two axes are merged, and nothing depends on the example's length."""
    unit = Unit.parse("block", TINY)
    expected = structure(assemble(GraphSpec(TINY, unit, "fp32", MAX_POSITIONS)).model.graph)
    for name, size in sizes.items():
        monkeypatch.setitem(EXAMPLE_SIZES, name, size)
    monkeypatch.setattr(
        exporter.graph.fragments, "_traced", {}
    )  # traced anew here; what other tests traced stays for them
    assert structure(assemble(GraphSpec(TINY, unit, "fp32", MAX_POSITIONS)).model.graph) == expected
    assert exporter.graph.fragments._traced


@pytest.mark.slow
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_every_ratio_of_heads_validates_in_a_graph(tmp_path, n_kv_heads):
    config = dataclasses.replace(TINY, n_layers=1, n_kv_heads=n_kv_heads)
    request = ExportRequest(config, Unit.parse("block", config), RandomWeights(config, 0), "fp32", MAX_POSITIONS)
    export_bundle(request, tmp_path / "bundle")  # raises where onnxruntime strays from eager
    stepper, eager = (
        InterpreterStepper.from_bundle(Bundle.open(tmp_path / "bundle")),
        EagerStepper.from_bundle(Bundle.open(tmp_path / "bundle")),
    )
    x = np.random.default_rng(0).standard_normal((2, 3, TINY.hidden_size)).astype(np.float32)
    feeds = step_feeds("hidden_states", x, np.array([0, 4]), np.array([3, 3]))
    got, expected = (one.run(feeds, one.new_cache(2, 16))["hidden_states_out"] for one in (stepper, eager))
    np.testing.assert_allclose(got, expected, atol=2e-5)


# --- planted faults ---------------------------------------------------------------------------------------------------


def damage_is_causal(graph):
    next(n for n in graph.node if n.op_type == "Attention").attribute.append(onnx.helper.make_attribute("is_causal", 1))


def damage_no_mask(graph):
    node = next(n for n in graph.node if n.op_type == "Attention")
    del node.input[3]


def damage_second_output(graph):
    next(n for n in graph.node if n.op_type == "Attention").output.extend(["extra"])


def damage_static_axis(graph):
    graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2


def damage_renamed_axis(graph):
    graph.input[4].type.tensor_type.shape.dim[2].dim_param = "total_sequence_length"


def damage_renamed_output(graph):
    node = next(n for n in graph.node if n.output[0] == graph.output[0].name)
    node.output[0] = graph.output[0].name = "logits_out"


def damage_dtype(graph):
    graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16


def damage_copied_keys(graph):
    attention = next(n for n in graph.node if n.op_type == "Attention")
    at = list(graph.node).index(attention)
    shape = onnx.numpy_helper.from_array(np.array([1, 1, 1, 1]), "copies")
    graph.initializer.append(shape)
    graph.node.insert(at, onnx.helper.make_node("Expand", [attention.input[1], "copies"], ["copied"], name="copied"))
    attention.input[1] = "copied"


def damage_cache_update(graph):
    node = next(n for n in graph.node if n.op_type == "TensorScatter")
    node.input[0] = "past_key_values.0.value" if node.input[0].endswith("key") else "past_key_values.0.key"


@pytest.mark.parametrize("damage", [value for name, value in sorted(globals().items()) if name.startswith("damage_")])
def test_a_graph_that_breaks_the_contract_is_refused(tiny_bundle, tmp_path, damage):
    bundle = tiny_bundle("block", "fp32")
    model = onnx.load(bundle.graph_path)
    damage(model.graph)
    path = tmp_path / GRAPH_FILE
    onnx.save(model, path)
    with pytest.raises(CheckFailed, match=GRAPH_FILE):
        check_graph(path, bundle.manifest.contract)


def test_a_contrib_operator_is_refused(tiny_bundle, tmp_path):
    bundle = tiny_bundle("block", "fp32")
    model = onnx.load(bundle.graph_path)
    model.graph.node[0].domain = "com.microsoft"
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    onnx.save(model, tmp_path / GRAPH_FILE)
    with pytest.raises(CheckFailed, match="default domain"):
        check_graph(tmp_path / GRAPH_FILE, bundle.manifest.contract)


def test_axis_constants_are_the_symbols_in_the_file():
    assert (BATCH, SEQUENCE, TOTAL, CAPACITY) == (
        "batch_size",
        "sequence_length",
        "total_sequence_length",
        "cache_capacity",
    )
    assert torch.float16.itemsize == DTYPES["fp16"].n_bytes
