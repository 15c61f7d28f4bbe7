"""Weights in integers: what they stand for, that both engines read them so, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from engines.building.build import BuildRequest, build_bundle
from engines.comparison.compare import CompareRequest, compare_bundle
from engines.interpreter.stepper import InterpreterStepper
from engines.library.backend import choose_backend
from exporter.bundle.bundle import Bundle
from exporter.bundle.manifest import GRAPH_FILE, Manifest
from exporter.commands.main import main
from exporter.common.errors import BackendError, CheckpointError, InputError
from exporter.costs.ledger import Ledger
from exporter.export import ExportRequest, export_bundle
from exporter.graph import weight_writer
from exporter.graph.quantize import CLIPPINGS, pack, quantize, unpack
from exporter.graph.weight_reader import bundle_weights
from exporter.model.weights import RandomWeights
from exporter.spec.catalogue import ModelConfig
from exporter.spec.unit import Unit
from exporter.spec.weight_formats import WEIGHT_FORMATS, WeightFormat, is_quantized
from exporter.validation.bundle_validation import validate_bundle
from exporter.validation.reference_weights import reference_weights
from runtime import DecodeSession
from tests.conftest import MAX_POSITIONS, TINY
from tests.support.planted_faults import relisted

pytestmark = pytest.mark.slow

SIGNED = ("int8", "int4")
FORMATS = pytest.mark.parametrize("name", WEIGHT_FORMATS)


def export(folder, name: str, kind: str = "block", dtype: str = "fp32", config: ModelConfig = TINY, **more) -> Bundle:
    unit = Unit.parse(kind, config, more.pop("layers", None))
    request = ExportRequest(
        config, unit, RandomWeights(config, 0), dtype, MAX_POSITIONS, weight_format=WeightFormat(name, 32), **more
    )
    return export_bundle(request, folder / f"{name}-{dtype}", validated=False)


# --- rounding ---------------------------------------------------------------------------------------------------------


@FORMATS
def test_integers_of_the_format_are_kept_as_they_are(name):
    """A block whose values the format can represent comes back to the last bit."""
    weight_format = WeightFormat(name, 32)
    low, high = weight_format.range
    grid = torch.linspace(
        low + weight_format.symmetric, high, 32
    ).round()  # the least integer of a signed format has no opposite
    zero_point = 0 if weight_format.symmetric else high // 2
    weight = ((grid - zero_point) * 0.25)[:, None]
    assert torch.equal(quantize(weight, weight_format, "fp32").dequantized(), weight)


@FORMATS
@given(seed=st.integers(0, 1000), size=st.floats(1e-6, 1e3))
@settings(max_examples=15, deadline=None)
def test_no_weight_moves_further_than_rounding_and_clipping_may(name, seed, size):
    weight_format = WeightFormat(name, 16)
    weight = torch.randn(64, 5, generator=torch.Generator().manual_seed(seed)) * size
    quantized = quantize(weight, weight_format, "fp32")
    error = (quantized.dequantized() - weight).reshape(4, 16, 5)
    nearest = quantized.scales / 2
    largest = weight.reshape(4, 16, 5).abs().amax(1)
    clipped = (1 - min(CLIPPINGS[name])) * largest * 2 + 1e-5 * largest
    assert (error.abs().amax(1) <= nearest + clipped).all()


def test_choosing_the_scale_never_costs_and_mostly_pays(monkeypatch):
    weight = torch.randn(128, 200, generator=torch.Generator().manual_seed(0))

    def errors() -> torch.Tensor:
        return (
            (quantize(weight, WeightFormat("int4", 32), "fp32").dequantized() - weight)
            .reshape(4, 32, 200)
            .square()
            .sum(1)
        )

    chosen = errors()
    monkeypatch.setitem(CLIPPINGS, "int4", (1.0,))
    plain = errors()
    assert (chosen <= plain).all()
    assert chosen.sum() < 0.95 * plain.sum()


@FORMATS
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_zeros_and_the_smallest_weights_stay_finite(name, dtype):
    weight = torch.zeros(32, 3)
    weight[:, 1] = 1e-30
    weight[0, 2] = 6e-5
    quantized = quantize(weight, WeightFormat(name, 32), dtype)
    assert torch.isfinite(quantized.scales).all() and (quantized.scales > 0).all()
    assert (quantized.dequantized()[:, 0] == 0).all()


@pytest.mark.parametrize("count", [8, 9])
@pytest.mark.parametrize("signed", [True, False])
def test_four_bits_are_packed_as_onnx_reads_them(count, signed):
    kind = onnx.TensorProto.INT4 if signed else onnx.TensorProto.UINT4
    integers = torch.arange(count, dtype=torch.int8 if signed else torch.uint8) - (4 if signed else 0)
    raw = pack(integers, 4)
    tensor = onnx.TensorProto(data_type=kind, dims=[count], raw_data=raw.numpy().tobytes())
    assert numpy_helper.to_array(tensor).astype(np.int64).tolist() == integers.tolist()
    assert unpack(raw, 4, signed)[:count].tolist() == integers.tolist()


# --- graphs -----------------------------------------------------------------------------------------------------------


@FORMATS
@pytest.mark.parametrize(
    ("kind", "dtype"), [("component:swiglu_mlp", "fp16"), ("block", "fp32"), ("model", "fp32"), ("model", "fp16")]
)
def test_the_graph_equals_eager_over_the_rounded_weights_of_the_source(tmp_path, name, kind, dtype):
    """Rounded again from where they came from: wrong scales, a wrong layout or swapped halves of a byte would show."""
    bundle = export(tmp_path, name, kind, dtype)
    section, _ = validate_bundle(bundle, RandomWeights(TINY, 0))
    assert section["passed"], section["meaning"]["failures"]


def test_one_altered_scale_is_found(tmp_path):
    bundle = export(tmp_path, "int4")
    graph = onnx.load(bundle.graph_path, load_external_data=False).graph
    tensor = next(t for t in graph.initializer if t.name == "blocks.0.mlp.gate_up_proj.weight.scales")
    offset = next(int(entry.value) for entry in tensor.external_data if entry.key == "offset")
    with open(bundle.folder / "model.onnx.data", "r+b") as file:
        file.seek(offset)
        first = np.frombuffer(file.read(4), np.float32)
        file.seek(offset)
        file.write((first * 2).tobytes())
    section, comparisons = validate_bundle(relisted(bundle), RandomWeights(TINY, 0))
    assert not section["passed"] and not all(c.passed for c in comparisons)


@FORMATS
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_the_bundles_weights_are_the_sources_rounded(tmp_path, name, dtype):
    config = dataclasses.replace(TINY, tie_word_embeddings=True)
    bundle = export(tmp_path, name, "model", dtype, config)
    own, source = reference_weights(bundle), reference_weights(bundle, RandomWeights(config, 0))
    names = [
        "embedding.weight",
        "lm_head.weight",
        "blocks.1.attention.k_proj.weight",
        "blocks.2.mlp.down_proj.weight",
        "norm.weight",
    ]
    for weight in names:
        assert torch.equal(own.read(weight), source.read(weight)), weight
    assert not torch.equal(own.read("lm_head.weight"), own.read("embedding.weight"))
    whole = own.read("blocks.2.mlp.down_proj.weight")
    assert torch.equal(
        own.read("blocks.2.mlp.down_proj.weight", columns=slice(40, 90), rows=slice(3, 9)), whole[3:9, 40:90]
    )


def test_only_projections_and_the_head_are_in_integers(tmp_path):
    graph = onnx.load(export(tmp_path, "uint4", "model").graph_path, load_external_data=False).graph
    made = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    projections = ["attention.qkv_proj", "attention.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]
    assert made == {f"blocks.{i}.{name}.weight" for i in range(3) for name in projections} | {"lm_head.weight"}
    assert all(is_quantized(name.partition(".weight")[0] + ".weight") for name in made)
    stored = {t.name: t.data_type for t in graph.initializer}
    assert stored["embedding.weight"] == stored["norm.weight"] == onnx.TensorProto.FLOAT
    assert stored["lm_head.weight.integers"] == stored["lm_head.weight.zero_points"] == onnx.TensorProto.UINT8
    assert stored["blocks.0.mlp.gate_up_proj.weight.integers"] == onnx.TensorProto.UINT4


@FORMATS
def test_onnxruntime_multiplies_packed_weights(tmp_path, name):
    """Each DequantizeLinear and its product become one kernel; unpacked weights would cost more than they save."""
    bundle = export(tmp_path, name, "model")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "optimized.onnx"), 3
    onnxruntime.InferenceSession(str(bundle.graph_path), options, providers=["CPUExecutionProvider"])
    kinds = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx", load_external_data=False).graph.node]
    assert kinds.count("MatMulNBits") == 3 * 4 + 1 and not {"DequantizeLinear", "MatMul", "Gemm"} & set(kinds)


@pytest.mark.parametrize("name", SIGNED)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_tensorrt_understands_the_same(tmp_path, name, dtype):
    assert compare_bundle(export(tmp_path, name, "model", dtype), CompareRequest()).passed


@pytest.mark.parametrize(("name", "dtype"), [("int4", "fp16"), ("int8", "bf16"), ("uint4", "fp16"), ("uint8", "fp32")])
def test_every_operation_is_within_its_budget(tmp_path, name, dtype):
    """Weights are rounded once more where they are widened; a budget for whole weights would blame each projection."""
    result = compare_bundle(export(tmp_path, name, dtype=dtype), CompareRequest(audit=True))
    assert result.passed
    assert all(backend.audit is not None for backend in result.results)


@pytest.mark.parametrize(("name", "share"), [("int8", 0.75), ("int4", 0.5)])
def test_an_engines_weights_stay_packed(tmp_path, name, share):
    config = dataclasses.replace(
        TINY, hidden_size=1024, n_heads=16, n_kv_heads=16, head_dim=64, intermediate_size=4096, n_layers=1
    )
    bundle = export(tmp_path, name, dtype="fp16", config=config)
    record = build_bundle(bundle, choose_backend("tensorrt-rtx"), BuildRequest(cache_capacity=64))
    assert (
        record.size_bytes < share * 2 * Ledger.of(config).block_parameters
    )  # bytes of the block at 16 bits, kernels beside them


@pytest.mark.parametrize("name", ["uint8", "uint4"])
def test_zero_points_are_refused_by_name_where_tensorrt_would_read_them(tmp_path, name):
    bundle = export(tmp_path, name, dtype="fp16")
    message = f"weights are {name} with zero points, which its parser refuses; export again with {name[1:]} weights"
    with pytest.raises(BackendError, match=message):
        build_bundle(bundle, choose_backend("tensorrt-rtx"), BuildRequest())
    with pytest.raises(BackendError, match=message):
        InterpreterStepper.from_bundle(bundle)
    result = compare_bundle(bundle, CompareRequest(backends=("eager", "onnxruntime")))
    assert result.passed


@FORMATS
def test_the_order_in_which_threads_ask_for_slices_changes_nothing(tmp_path, monkeypatch, name):
    expected = export(tmp_path / "in order", name).graph_path.with_suffix(".onnx.data").read_bytes()

    def last_first(slices):
        return reversed([make() for make in reversed(list(slices))])

    monkeypatch.setattr(weight_writer, "_ahead", last_first)
    assert export(tmp_path / "last first", name).graph_path.with_suffix(".onnx.data").read_bytes() == expected


def test_parts_and_slices_have_the_same_integers(tmp_path):
    whole = bundle_weights(export(tmp_path / "whole", "int4", "model"))
    parts = bundle_weights(export(tmp_path / "parts", "int4", "model", n_parts=3))
    stack = bundle_weights(export(tmp_path / "stack", "int4", "stack", layers="1:3"))
    for name in ("blocks.2.mlp.up_proj.weight", "lm_head.weight"):
        assert torch.equal(whole.read(name), parts.read(name))
    assert torch.equal(whole.read("blocks.2.mlp.up_proj.weight"), stack.read("blocks.2.mlp.up_proj.weight"))


# --- sessions ---------------------------------------------------------------------------------------------------------


@FORMATS
def test_a_session_decodes_near_the_exact_graph_and_says_how(tmp_path, name):
    bundle = export(tmp_path, name, "model")
    tokens = np.arange(12)[None] * 7 % TINY.vocab_size
    results = {}
    for backend in ("eager", "onnxruntime"):
        with DecodeSession.open(bundle.folder, backend, cache_capacity=32) as session:
            results[backend] = session.prefill(tokens)
            description = session.description
    assert "integer products" in description
    exact, fast = results["eager"], results["onnxruntime"]
    error = np.abs(exact - fast).max() / np.sqrt(np.square(exact).mean())
    assert 1e-5 < error < 0.15  # activations rounded to 8 bits: 7e-2 was measured; had they not been, it would be 1e-6


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("int3", 32, "weights: got 'int3', expected one of int8, int4, uint8, uint4"),
        ("int4", 24, "block size: got 24, expected a power of two"),
        ("int4", 8, "block size: got 8, expected a power of two of at least 16"),
        ("int4", True, "block size: got True"),
        ("int4", 64, r"does not divide the matrices' inputs \[64, 96\]; use 32 or a smaller"),
    ],
)
def test_formats_without_a_kernel_are_refused(name, size, message):
    with pytest.raises(InputError, match=message):
        WeightFormat(name, size).check(TINY)


def test_the_command_line_wants_a_format_for_a_block_size(tmp_path, capsys):
    assert main(["export", "--model", "smollm2-135m", "--block-size", "64", "-o", str(tmp_path / "x")]) == 2
    assert "block size: got 64 without --weights" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_weights_that_are_not_finite_are_refused(tmp_path, monkeypatch):
    draw = RandomWeights._draw
    monkeypatch.setattr(
        RandomWeights, "_draw", lambda self, name: draw(self, name) * (float("nan") if "up_proj" in name else 1)
    )
    with pytest.raises(CheckpointError, match=r"blocks\.0\.mlp\.up_proj\.weight: 6144 of its values are inf or NaN"):
        export(tmp_path, "int8")
    assert not list(tmp_path.iterdir())


def test_a_manifest_keeps_the_format_and_one_without_is_read(tmp_path):
    manifest = export(tmp_path, "int4").manifest
    assert Manifest.from_json(manifest.to_json(), "manifest") == manifest
    plain = json.loads(
        dataclasses.replace(manifest, spec=dataclasses.replace(manifest.spec, weight_format=None)).to_json()
    )
    del plain["weight_format"]
    assert Manifest.from_json(json.dumps(plain), "manifest").weight_format is None
    assert GRAPH_FILE in manifest.files
