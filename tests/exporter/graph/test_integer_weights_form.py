"""Opening and verify hold the tensors of weights in integers against the manifest's format: every lie about them is refused by name."""

from __future__ import annotations

import json
import shutil

import onnx
import pytest
from onnx import TensorProto, helper

from exporter.bundle.bundle import Bundle
from exporter.bundle.manifest import GRAPH_FILE, MANIFEST_FILE
from exporter.common.errors import BundleError
from exporter.export import ExportRequest, export_bundle
from exporter.model.weights import RandomWeights
from exporter.spec.unit import Unit
from exporter.spec.weight_formats import WEIGHT_FORMATS, WeightFormat
from exporter.validation.verify import verify_bundle
from tests.conftest import MAX_POSITIONS, TINY
from tests.support.planted_faults import doctored, node_of

UP, HEAD = "blocks.0.mlp.gate_up_proj.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A model of one layer in every format."""
    folder = tmp_path_factory.mktemp("originals")
    for name in WEIGHT_FORMATS:
        unit = Unit.parse("model", TINY, "1")
        request = ExportRequest(
            TINY, unit, RandomWeights(TINY, 0), "fp16", MAX_POSITIONS, weight_format=WeightFormat(name, 32)
        )
        export_bundle(request, folder / name, validated=False)
    return folder


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_bundles_of_every_format_open_and_verify(originals, name):
    Bundle.open(originals / name, "full")
    assert verify_bundle(originals / name).problems == ()


def tensor(model, part, weight=UP):
    return next(t for t in model.graph.initializer if t.name == f"{weight}.{part}")


def attribute(model, name):
    return next(a for a in node_of(model, UP).attribute if a.name == name)


def in_the_graph(model):
    """The scales' bytes in the graph file; where they were stays."""
    scales = tensor(model, "scales")
    scales.ClearField("external_data")
    scales.data_location = TensorProto.DEFAULT
    scales.raw_data = bytes(scales.dims[0] * scales.dims[1] * 2)


def give_to_a_stranger(model):
    node_of(model, UP).output[0] = "stranger"
    for node in model.graph.node:
        node.input[:] = ["stranger" if name == UP else name for name in node.input]


CHANGES = {
    "block size": (lambda m: setattr(attribute(m, "block_size"), "i", 16), f"{UP} is made with {{'axis': 0, 'block_size': 16}}"),
    "axis": (lambda m: setattr(attribute(m, "axis"), "i", 1), f"{UP} is made with {{'axis': 1"),
    "axis is no whole number": (lambda m: setattr(attribute(m, "axis"), "type", 1), "an attribute of another type than it says"),
    "axis missing": (lambda m: node_of(m, UP).attribute.remove(attribute(m, "axis")), f"{UP} is made with {{'block_size'"),
    "axis twice": (lambda m: node_of(m, UP).attribute.append(helper.make_attribute("axis", 0)), "the attribute 'axis' is given twice"),
    "another dtype": (lambda m: node_of(m, UP).attribute.append(helper.make_attribute("output_dtype", 1)), f"{UP} is made with"),
    "no zero points": (lambda m: node_of(m, UP).input.pop(), f"{UP} is made of"),
    "others' scales": (lambda m: node_of(m, UP).input.__setitem__(1, f"{UP.replace('gate_up', 'down')}.scales"), f"{UP} is made of"),
    "of another name": (give_to_a_stranger, "stranger.integers: dims []"),
    "not whole blocks": (lambda m: tensor(m, "integers").dims.__setitem__(slice(None), [48, 256]), f"{UP}.integers: dims [48, 256]"),
    "a vector": (lambda m: tensor(m, "integers").dims.__setitem__(slice(None), [64 * 192]), f"{UP}.integers: dims [12288]"),
    "scales turned": (lambda m: tensor(m, "scales").dims.__setitem__(slice(None), [192, 2]), f"{UP}.scales: fp16 [192, 2], expected fp16 [2, 192]"),
    "scales of another dtype": (lambda m: setattr(tensor(m, "scales"), "data_type", 16), f"{UP}.scales: bf16"),
    "signed": (lambda m: setattr(tensor(m, "integers"), "data_type", TensorProto.INT4), f"{UP}.integers: int4 [64, 192], expected uint4"),
    "zero points signed": (lambda m: setattr(tensor(m, "zero_points"), "data_type", TensorProto.INT4), f"{UP}.zero_points: int4"),
    "head signed": (lambda m: setattr(tensor(m, "integers", HEAD), "data_type", TensorProto.INT8), f"{HEAD}.integers: int8 [64, 101]"),
    "in the graph": (in_the_graph, f"{UP}.scales: fp16 [2, 192] in the graph, expected fp16"),
    "another reader": (lambda m: m.graph.node.append(helper.make_node("Cast", [f"{UP}.integers"], ["leak"], to=1)), f"{UP}.integers is read by"),
    "another reader of scales": (lambda m: m.graph.node.append(helper.make_node("Shape", [f"{UP}.scales"], ["leak"])), f"{UP}.scales is read by"),
    "nobody reads integers": (lambda m: m.graph.initializer.append(TensorProto(name="x", data_type=3, dims=[1], raw_data=b"1")), "x is part of"),
    "nobody reads scales": (lambda m: m.graph.initializer.append(TensorProto(name="x.scales", data_type=1, raw_data=b"1234")), "x.scales is part of"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_lie_about_weights_in_integers_is_refused_by_name_at_opening_and_by_verify(originals, tmp_path, change):
    fault, said = CHANGES[change]
    folder = doctored(Bundle.read(originals / "uint4"), tmp_path / "bundle", fault).folder
    with pytest.raises(BundleError) as caught:
        Bundle.open(folder)
    assert f"{GRAPH_FILE}: it is not a graph as an export writes it" in str(caught.value) and said in str(caught.value)
    assert any(problem.file == GRAPH_FILE and said in problem.problem for problem in verify_bundle(folder).problems)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (None, "is made of integers, and the manifest has no weight_format"),
        ({"dtype": "uint8", "block_size": 32}, ".integers: uint4 [64, 128], expected uint8 [64, 128]"),
        ({"dtype": "int4", "block_size": 32}, "is made of"),
        ({"dtype": "uint4", "block_size": 16}, "is made with {'axis': 0, 'block_size': 32}"),
    ],
    ids=["none", "more bits", "signed", "smaller blocks"],
)
def test_a_manifest_of_another_format_is_refused(originals, tmp_path, changed, said):
    folder = shutil.copytree(originals / "uint4", tmp_path / "bundle")
    data = json.loads((folder / MANIFEST_FILE).read_text())
    (folder / MANIFEST_FILE).write_text(json.dumps(data | {"weight_format": changed}))
    with pytest.raises(BundleError) as caught:
        Bundle.open(folder)
    assert said in str(caught.value)


def test_a_format_does_not_ask_for_integers_where_there_is_no_matrix(originals, tmp_path):
    request = ExportRequest(
        TINY,
        Unit.parse("component:rms_norm", TINY),
        RandomWeights(TINY, 0),
        "fp16",
        MAX_POSITIONS,
        weight_format=WeightFormat("int4", 32),
    )
    Bundle.open(export_bundle(request, tmp_path / "bundle", validated=False).folder)
    assert not any(
        node.op_type == "DequantizeLinear" for node in onnx.load(tmp_path / "bundle" / GRAPH_FILE).graph.node
    )
