"""TensorRT-RTX compiles every graph. A graph that it would compute wrongly is refused with the reason."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from engines.building.build import build_bundle
from engines.building.preparation import BuildRequest, prepare_bundle, prepare_onnx
from engines.library.backend import choose_backend
from engines.library.usable_engines import check_engine, check_lineage, check_runnable
from engines.network.build_options import BuildOptions
from engines.network.network_checks import KNOWN_LAYERS, check_network
from engines.network.parsed import parse_network
from engines.network.source import load_source
from exporter.bundle.bundle import Bundle
from exporter.bundle.engine_records import read_records
from exporter.common.errors import BackendError, BundleError, CheckFailed, InputError
from exporter.export import ExportRequest, export_bundle
from exporter.graph.fixed_capacity import fix_capacity
from exporter.model.weights import RandomWeights
from exporter.spec.catalogue import CATALOGUE, ModelConfig
from exporter.spec.tensors import OPSET
from exporter.spec.unit import COMPONENTS, Unit
from tests.conftest import TINY

pytestmark = pytest.mark.slow

SMALL = BuildRequest(max_batch=2, max_seq_len=8, cache_capacity=32)


@pytest.fixture(scope="module")
def rtx():
    return choose_backend("tensorrt-rtx")


def copied(bundle: Bundle, folder: Path) -> Bundle:
    """A copy of a bundle to build into. It has no hard links, because onnx's checker refuses them."""
    shutil.copytree(bundle.folder, folder)
    return Bundle.open(folder)


def assert_layers(record, prepared, unit: Unit) -> None:
    parsed = prepared.parsed
    blocks = unit.n_layers if unit.has_cache else 0
    assert len(parsed.cache_updates) == 2 * blocks
    assert len(parsed.attention) == (blocks if unit.has_cache else int(unit.component == "attention"))
    assert all(layer.mask and layer.causal_kind == "NONE" and not layer.key_value_lengths for layer in parsed.attention)
    assert set(parsed.layer_types) <= KNOWN_LAYERS and not prepared.notes
    assert record.size_bytes > 0 and record.backend == "tensorrt-rtx"


def compile_bundle(bundle: Bundle, rtx, request: BuildRequest):
    prepared = prepare_bundle(bundle, rtx, request)
    record = build_bundle(bundle, rtx, request)
    assert_layers(record, prepared, bundle.manifest.unit)
    check_engine(bundle.folder, record, verify="full")
    assert read_records(bundle.folder) == [record]
    return record


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("component", COMPONENTS)
def test_every_component_compiles(tiny_bundle, tmp_path, rtx, component, dtype):
    bundle = copied(tiny_bundle(f"component:{component}", dtype), tmp_path / "bundle")
    record = compile_bundle(bundle, rtx, BuildRequest(max_batch=2, max_seq_len=8))
    assert record.cache_capacity is None and record.graph_file == "model.onnx"


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(("unit", "layers"), [("block", None), ("stack", "2"), ("model", "2")])
def test_block_stack_and_model_compile(tiny_bundle, tmp_path, rtx, unit, layers, dtype):
    bundle = copied(tiny_bundle(unit, dtype, layers), tmp_path / "bundle")
    record = compile_bundle(bundle, rtx, SMALL)
    assert [profile["name"] for profile in record.profiles] == ["decode", "prefill"]
    assert record.profiles[0]["ranges"]["position_ids"] == {"min": [1, 1], "opt": [2, 1], "max": [2, 1]}
    assert record.profiles[1]["ranges"]["position_ids"]["max"] == [2, 8]
    assert record.cache_capacity == 32 and record.dtypes["past_key_values.0.key"] == dtype
    fixed = onnx.load(bundle.folder / "model.c32.onnx", load_external_data=False)
    past = next(v for v in fixed.graph.input if v.name == "past_key_values.0.key")
    assert [d.dim_value or d.dim_param for d in past.type.tensor_type.shape.dim] == ["batch_size", 2, 32, 16]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_attention_in_float32_between_casts_compiles_too(tmp_path, rtx, dtype):
    request = ExportRequest(TINY, Unit.parse("block", TINY), RandomWeights(TINY, 0), dtype, 64, attention_dtype="fp32")
    bundle = export_bundle(request, tmp_path / "bundle")
    assert bundle.manifest.attention_dtype == "fp32"
    assert [layer.dtype for layer in prepare_bundle(bundle, rtx, SMALL).parsed.attention] == ["fp32"]
    compile_bundle(bundle, rtx, SMALL)


def test_the_whole_real_model_compiles(smollm2_bundle, tmp_path, rtx):
    bundle = copied(smollm2_bundle("fp16"), tmp_path / "bundle")
    record = compile_bundle(bundle, rtx, BuildRequest(max_batch=2, max_seq_len=64, cache_capacity=512))
    assert (
        0.9 < record.size_bytes / bundle.manifest.files["model.onnx.data"]["size_bytes"] < 1.5
    )  # half precision, not float32


def test_the_full_size_8b_block_compiles(tmp_path, rtx):
    config = CATALOGUE["llama3-8b"]
    request = ExportRequest(config, Unit.parse("block", config), RandomWeights(config, 0))
    bundle = export_bundle(request, tmp_path / "bundle", validated=False)
    record = compile_bundle(bundle, rtx, BuildRequest(cache_capacity=2048))
    assert 430e6 < record.size_bytes < 500e6


def test_the_axes_that_stay_dynamic_are_dynamic_in_the_network(tiny_bundle, rtx):
    shapes = {t.name: t.shape for t in prepare_bundle(tiny_bundle("block", "fp16"), rtx, SMALL).parsed.inputs}
    assert shapes["hidden_states"] == (-1, -1, 64) and shapes["attention_mask"] == (-1, -1)
    assert shapes["past_key_values.0.key"] == (-1, 2, 32, 16)


# --- graphs that TensorRT would get wrong -------------------------------------------------------------------


def attention_graph(
    path: Path, *, nonpad=False, causal=False, past=False, outputs=1, kv_length="total_sequence_length", softcap=0.0
) -> Path:
    """A small fp16 attention that is valid ONNX in every variant."""
    half, int64 = TensorProto.FLOAT16, TensorProto.INT64

    def value(name, dtype, *shape):
        return helper.make_tensor_value_info(name, dtype, shape)

    inputs = [
        value("q", half, "batch_size", 4, "sequence_length", 16),
        value("k", half, "batch_size", 2, kv_length, 16),
        value("v", half, "batch_size", 2, kv_length, 16),
    ]
    names = ["q", "k", "v", "", "", "", ""]
    if not nonpad and not causal:
        inputs.append(value("mask", TensorProto.BOOL, "batch_size", 1, "sequence_length", "total_sequence_length"))
        names[3] = "mask"
    if past:
        inputs += [value(f"past_{x}", half, "batch_size", 2, "past_length", 16) for x in "kv"]
        names[4:6] = ["past_k", "past_v"]
    if nonpad:
        inputs.append(value("lengths", int64, "batch_size"))
        names[6] = "lengths"
    while not names[-1]:
        names.pop()
    results = ["y", "present_k", "present_v"][:outputs]
    attributes = {"is_causal": int(causal)} | ({"softcap": softcap} if softcap else {})
    node = helper.make_node("Attention", names, results, name="the_attention", **attributes)
    outs = [value("y", half, "batch_size", 4, "sequence_length", 16)]
    outs += [value(name, half, "batch_size", 2, "past_and_new", 16) for name in results[1:]]
    model = helper.make_model(
        helper.make_graph([node], "g", inputs, outs), opset_imports=[helper.make_opsetid("", OPSET)], ir_version=12
    )
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    ("variant", "reasons"),
    [
        ({"nonpad": True, "causal": True}, ["nonpad_kv_seqlen", "drops", "position 0 alone"]),
        ({"causal": True}, ["is_causal", "upper left"]),
        ({"past": True, "outputs": 3}, ["past inputs", "3 outputs"]),
        ({"softcap": 5.0}, ["softcap"]),
    ],
)
def test_an_attention_that_tensorrt_would_misread_is_refused_with_what_it_would_have_done(
    tmp_path, rtx, variant, reasons
):
    path = attention_graph(tmp_path / "attention.onnx", **variant)
    with pytest.raises(CheckFailed, match="the_attention") as caught:
        prepare_onnx(path, rtx, SMALL)
    for reason in reasons:
        assert reason in str(caught.value)


def test_the_parser_really_reads_causal_attention_as_upper_left(tmp_path, rtx):
    """The refusal above is true: TensorRT parses the graph in this way."""
    path = attention_graph(tmp_path / "attention.onnx", nonpad=True, causal=True)
    parsed = parse_network(rtx, load_source(path), path)
    (layer,) = parsed.attention
    assert layer.causal_kind == "UPPER_LEFT" and not layer.key_value_lengths and not layer.mask
    with pytest.raises(CheckFailed, match="UPPER_LEFT"):
        check_network(parsed)


def test_a_good_attention_of_a_user_is_prepared(tmp_path, rtx):
    assert prepare_onnx(attention_graph(tmp_path / "attention.onnx"), rtx, SMALL).parsed.attention[0].mask


def test_a_float32_graph_is_refused_before_the_backend_fails(tiny_bundle, rtx):
    with pytest.raises(BackendError, match=r"float32 attention.*export it in fp16 or bf16"):
        prepare_bundle(tiny_bundle("block", "fp32"), rtx, SMALL)


def test_heads_too_small_for_a_kernel_are_refused(tmp_path, rtx):
    config = ModelConfig(
        hidden_size=32,
        n_layers=1,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        intermediate_size=32,
        vocab_size=9,
        context_length=64,
    )
    bundle = export_bundle(
        ExportRequest(config, Unit.parse("block", config), RandomWeights(config, 0)), tmp_path / "b", validated=False
    )
    with pytest.raises(BackendError, match="head_dim 8, expected at least 16"):
        prepare_bundle(bundle, rtx, SMALL)


def parsed_block(bundle: Bundle, rtx, damage=lambda graph: None, capacity=32):
    model = load_source(bundle.graph_path)
    if capacity:
        fix_capacity(model, capacity)
    damage(model.graph)
    return parse_network(rtx, model, bundle.graph_path)


def test_wrong_head_counts_are_refused(tiny_bundle, rtx):
    bundle = tiny_bundle("block", "fp16")
    wrong = dataclasses.replace(
        bundle.manifest, spec=dataclasses.replace(bundle.manifest.spec, config=dataclasses.replace(TINY, n_heads=8))
    )
    with pytest.raises(CheckFailed, match="4 query heads on 2 KV heads of 16, expected 8 on 2"):
        check_network(parsed_block(bundle, rtx), wrong)


def test_a_capacity_left_dynamic_is_refused(tiny_bundle, tmp_path, rtx):
    bundle = copied(tiny_bundle("block", "fp16"), tmp_path / "bundle")
    model = onnx.load(bundle.graph_path, load_external_data=False)
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "cache_capacity":
                dim.dim_param = "some_length"  # a symbol that no option fixes
    bundle.graph_path.unlink()
    onnx.save(model, bundle.graph_path)
    with pytest.raises(CheckFailed, match=r"past_key_values\.0\.key: got axes \['batch_size', 2, 'some_length', 16\]"):
        prepare_onnx(bundle.graph_path, rtx, SMALL)


def test_a_cache_that_is_no_output_of_the_network_is_refused(tiny_bundle, rtx):
    def drop_output(graph):
        del graph.output[1]

    bundle = tiny_bundle("block", "fp16")
    with pytest.raises(CheckFailed, match="expected an output of the network at the cache's address"):
        check_network(parsed_block(bundle, rtx, drop_output), bundle.manifest)


def test_a_cache_that_is_no_input_of_the_network_is_refused(tiny_bundle, rtx):
    def compute_past(graph):
        scatter = next(n for n in graph.node if n.op_type == "TensorScatter")
        graph.node.insert(0, helper.make_node("Abs", [scatter.input[0]], ["computed_past"], name="computed_past"))
        scatter.input[0] = "computed_past"

    bundle = tiny_bundle("block", "fp16")
    with pytest.raises(CheckFailed):
        check_network(parsed_block(bundle, rtx, compute_past), bundle.manifest)


def test_an_unknown_layer_is_noted(tiny_bundle, rtx):
    def add_sort(graph):
        graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "k"))
        name = graph.output[0].name
        node = next(n for n in graph.node if n.output[0] == name)
        node.output[0] = "before"
        graph.node.append(helper.make_node("TopK", ["before", "k"], ["top", "indices"], name="topk", axis=1))
        graph.node.append(helper.make_node("Add", ["before", "top"], [name], name="sum"))

    assert check_network(parsed_block(tiny_bundle("block", "fp16"), rtx, add_sort)) == [
        "layer types outside the known list: TOPK"
    ]


# --- files and shapes ---------------------------------------------------------------------------------------


def test_missing_truncated_or_foreign_external_data_is_refused(tiny_bundle, tmp_path, rtx):
    bundle = copied(tiny_bundle("block", "fp16"), tmp_path / "bundle")
    data = bundle.folder / "model.onnx.data"
    content = data.read_bytes()
    data.unlink()
    with pytest.raises(BundleError, match=r"missing: no model.onnx.data"):
        prepare_onnx(bundle.graph_path, rtx, SMALL)
    data.write_bytes(content[:-10])
    with pytest.raises(BundleError, match="truncated"):
        prepare_onnx(bundle.graph_path, rtx, SMALL)
    model = onnx.load(bundle.graph_path, load_external_data=False)
    next(e for t in model.graph.initializer for e in t.external_data if e.key == "location").value = "../secret"
    bundle.graph_path.unlink()
    onnx.save(model, bundle.graph_path)
    with pytest.raises(BundleError, match=r"\.\./secret"):
        prepare_onnx(bundle.graph_path, rtx, SMALL)


@pytest.mark.parametrize("content", [b"", b"not an onnx file", b"\x08\x0c" * 50])
def test_a_damaged_onnx_file_is_refused(tmp_path, rtx, content):
    (tmp_path / "bad.onnx").write_bytes(content)
    with pytest.raises(BundleError, match=r"bad\.onnx"):
        prepare_onnx(tmp_path / "bad.onnx", rtx, SMALL)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (BuildRequest(cache_capacity=128), "at most 64"),
        (BuildRequest(max_seq_len=64, cache_capacity=32), "expected at most the cache capacity 32"),
        (BuildRequest(max_batch=0), "max_batch: got 0"),
        (
            BuildRequest(
                min_shapes=("hidden_state:1x1x64",),
                opt_shapes=("hidden_states:1x1x64",),
                max_shapes=("hidden_states:1x1x64",),
            ),
            "hidden_state",
        ),
    ],
)
def test_inconsistent_shapes_are_refused_before_the_build(tiny_bundle, rtx, request_, message):
    with pytest.raises(InputError, match=message):
        prepare_bundle(tiny_bundle("block", "fp16"), rtx, request_)


def test_a_profile_that_reads_beyond_the_cache_is_refused(tiny_bundle, rtx):
    past = "past_key_values.0.key:1x2x32x16,past_key_values.0.value:1x2x32x16"
    shapes = "hidden_states:1x1x64,position_ids:1x1,write_indices:1,attention_mask:1x{}," + past
    texts = {f"{which}_shapes": (shapes.format(total),) for which, total in (("min", 1), ("opt", 16), ("max", 33))}
    with pytest.raises(InputError, match="reads up to 33 cached tokens, the cache capacity is 32"):
        prepare_bundle(tiny_bundle("block", "fp16"), rtx, BuildRequest(cache_capacity=32, **texts))


@pytest.fixture
def fixed_graph(tiny_bundle, tmp_path) -> Path:
    """The graph of a tiny block whose caches have 32 rows as a number, as a build leaves it for other tools."""
    bundle = copied(tiny_bundle("block", "fp16"), tmp_path / "bundle")
    model = onnx.load(bundle.graph_path, load_external_data=False)
    fix_capacity(model, 32)
    onnx.save(model, bundle.folder / "model.c32.onnx")
    return bundle.folder / "model.c32.onnx"


def test_an_onnx_file_with_a_fixed_capacity_is_read_no_further_than_that(fixed_graph, rtx):
    prepared = prepare_onnx(fixed_graph, rtx, BuildRequest())
    assert prepared.cache_capacity == 32
    assert max(profile.ranges["attention_mask"].max[1] for profile in prepared.profiles) == 32
    assert max(profile.ranges["hidden_states"].max[1] for profile in prepared.profiles) == 32


def test_another_capacity_than_the_one_in_an_onnx_file_is_refused_with_both(fixed_graph, rtx):
    assert prepare_onnx(fixed_graph, rtx, BuildRequest(cache_capacity=32)).cache_capacity == 32
    with pytest.raises(InputError, match=r"cache_capacity: got 64, and past_key_values\.0\.key has 32 rows"):
        prepare_onnx(fixed_graph, rtx, BuildRequest(cache_capacity=64))


def test_a_build_that_fails_leaves_nothing(tiny_bundle, tmp_path, rtx):
    bundle = copied(tiny_bundle("block", "fp16"), tmp_path / "bundle")
    before = sorted(path.name for path in bundle.folder.iterdir())
    with pytest.raises(CheckFailed, match="workspace"):
        build_bundle(bundle, rtx, dataclasses.replace(SMALL, options=BuildOptions(workspace_mib=1), max_seq_len=32))
    assert sorted(path.name for path in bundle.folder.iterdir()) == before


def test_an_old_engine_is_refused_under_changed_weights_and_by_other_backends(tiny_bundle, tmp_path, rtx):
    bundle = copied(tiny_bundle("block", "fp16"), tmp_path / "bundle")
    record = build_bundle(bundle, rtx, SMALL)
    check_lineage(bundle, record)
    request = ExportRequest(TINY, Unit.parse("block", TINY), RandomWeights(TINY, 1), "fp16", 64)
    other = export_bundle(request, tmp_path / "other", validated=False)
    with pytest.raises(BundleError, match=r"model\.onnx\.data changed since it was built"):
        check_lineage(other, record)
    with pytest.raises(BundleError, match=rf"built with tensorrt-rtx {rtx.version}, this is tensorrt 10\.15"):
        check_runnable(record, "tensorrt", "10.15", [])
    with pytest.raises(BundleError, match=r"this is 9\.9"):
        check_runnable(record, "tensorrt-rtx", "9.9", [])


def test_exporting_again_takes_old_engines_away(tmp_path, rtx):
    request = ExportRequest(TINY, Unit.parse("block", TINY), RandomWeights(TINY, 0), "fp16", 64)
    bundle = export_bundle(request, tmp_path / "bundle", validated=False)
    build_bundle(bundle, rtx, SMALL)
    (bundle.folder / "notes.txt").write_text("mine")
    export_bundle(dataclasses.replace(request, weights=RandomWeights(TINY, 1)), tmp_path / "bundle", validated=False)
    assert sorted(p.name for p in bundle.folder.iterdir()) == [
        "manifest.json",
        "model.onnx",
        "model.onnx.data",
        "notes.txt",
        "report.json",
    ]
