"""Opening and verify compare integer weights with the format in the manifest, and refuse every difference by name."""

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


def tensor(model, role, weight=UP):
    return next(t for t in model.graph.initializer if t.name == f"{weight}.{role}")


def attribute(model, name):
    return next(a for a in node_of(model, UP).attribute if a.name == name)


def in_the_graph(model):
    """Puts the bytes of the scales into the graph file; the data file keeps their place."""
    scales = tensor(model, "scales")
    scales.ClearField("external_data")
    scales.data_location = TensorProto.DEFAULT
    scales.raw_data = bytes(scales.dims[0] * scales.dims[1] * 2)


def rename_the_weight(model):
    node_of(model, UP).output[0] = "other"
    for node in model.graph.node:
        node.input[:] = ["other" if name == UP else name for name in node.input]


def attribute_set(name, field, value):
    return lambda model: setattr(attribute(model, name), field, value)


def attribute_added(name, value):
    return lambda model: node_of(model, UP).attribute.append(helper.make_attribute(name, value))


def dims_set(role, *dims):
    return lambda model: tensor(model, role).dims.__setitem__(slice(None), dims)


def type_set(role, number, weight=UP):
    return lambda model: setattr(tensor(model, role, weight), "data_type", number)


def reader_added(op_type, role, **attributes):
    node = helper.make_node(op_type, [f"{UP}.{role}"], ["leak"], **attributes)
    return lambda model: model.graph.node.append(node)


def initializer_added(**fields):
    return lambda model: model.graph.initializer.append(TensorProto(**fields))


DOWN_SCALES = f"{UP.replace('gate_up', 'down')}.scales"
INT4, INT8 = TensorProto.INT4, TensorProto.INT8
CHANGES = {
    "block size": (attribute_set("block_size", "i", 16), f"{UP} is made with {{'axis': 0, 'block_size': 16}}"),
    "axis": (attribute_set("axis", "i", 1), f"{UP} is made with {{'axis': 1"),
    "axis is no whole number": (attribute_set("axis", "type", 1), "an attribute of another type than it says"),
    "axis missing": (
        lambda m: node_of(m, UP).attribute.remove(attribute(m, "axis")),
        f"{UP} is made with {{'block_size'",
    ),
    "axis twice": (attribute_added("axis", 0), "the attribute 'axis' is given twice"),
    "another dtype": (attribute_added("output_dtype", 1), f"{UP} is made with"),
    "no zero points": (lambda m: node_of(m, UP).input.pop(), f"{UP} is made of"),
    "others' scales": (lambda m: node_of(m, UP).input.__setitem__(1, DOWN_SCALES), f"{UP} is made of"),
    "of another name": (rename_the_weight, "other.integers: dims []"),
    "not whole blocks": (dims_set("integers", 48, 256), f"{UP}.integers: dims [48, 256]"),
    "a vector": (dims_set("integers", 64 * 192), f"{UP}.integers: dims [12288]"),
    "scales transposed": (dims_set("scales", 192, 2), f"{UP}.scales: fp16 [192, 2], expected fp16 [2, 192]"),
    "scales of another dtype": (type_set("scales", 16), f"{UP}.scales: bf16"),
    "signed": (type_set("integers", INT4), f"{UP}.integers: int4 [64, 192], expected uint4"),
    "zero points signed": (type_set("zero_points", INT4), f"{UP}.zero_points: int4"),
    "head signed": (type_set("integers", INT8, HEAD), f"{HEAD}.integers: int8 [64, 101]"),
    "in the graph": (in_the_graph, f"{UP}.scales: fp16 [2, 192] in the graph, expected fp16"),
    "another reader": (reader_added("Cast", "integers", to=1), f"{UP}.integers is read by"),
    "another reader of scales": (reader_added("Shape", "scales"), f"{UP}.scales is read by"),
    "nobody reads integers": (initializer_added(name="x", data_type=3, dims=[1], raw_data=b"1"), "x is part of"),
    "nobody reads scales": (initializer_added(name="x.scales", data_type=1, raw_data=b"1234"), "x.scales is part of"),
}


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
