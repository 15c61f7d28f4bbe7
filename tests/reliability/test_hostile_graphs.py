"""Untrusted graphs and their data: refused before onnxruntime or TensorRT parses them.

Each test keeps a fault fixed that the campaign (benchmarks/campaigns/hostile_input) once found.
"""

from __future__ import annotations

import os

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import engines.commands.main
from engines.network.source import load_source
from exporter.bundle.bundle import Bundle, sha256_of
from exporter.common.errors import BackendError, BundleError
from exporter.graph.weight_reader import bundle_weights
from exporter.steppers.onnxruntime_stepper import refusals
from exporter.validation.verify import verify_bundle
from tests.support import hostile_bundles
from tests.support.hostile_bundles import change_graph, change_manifest, refusal, seal

originals, bundle = hostile_bundles.originals, hostile_bundles.bundle  # fixtures


def external(model):
    return next(tensor for tensor in model.graph.initializer if tensor.external_data)


def set_place(model, key, value):
    next(entry for entry in external(model).external_data if entry.key == key).value = value


def loop(model):
    model.graph.node.insert(
        0, helper.make_node("If", ["c"], ["y"], then_branch=onnx.GraphProto(), else_branch=onnx.GraphProto())
    )


def stolen_constant(model):
    tensor = TensorProto(name="t", data_type=TensorProto.UINT8, dims=[1], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="../secret")
    model.graph.node.insert(0, helper.make_node("Constant", [], ["t"], value=tensor))


def fill(model):
    model.graph.initializer.append(numpy_helper.from_array(np.array([2**40], np.int64), "huge"))


def cycle(model):
    model.graph.node[0].input[0] = model.graph.node[-1].output[0]


def function(model):
    body = [helper.make_node("Add", ["a", "a"], ["b"])]
    model.functions.append(helper.make_function("", "Add", ["a"], ["b"], body, list(model.opset_import)))


GRAPH_CHANGES = [
    loop, stolen_constant, fill, cycle, function,
    lambda m: set_place(m, "location", "../secret"), lambda m: set_place(m, "location", "/etc/hostname"),
    lambda m: set_place(m, "offset", "-4096"), lambda m: set_place(m, "length", "9" * 30),
    lambda m: set_place(m, "length", "1e3"), lambda m: external(m).external_data.pop(),
    lambda m: external(m).external_data.add(key="location", value="x"), lambda m: external(m).dims.append(2**40),
    lambda m: setattr(m.graph.node[0], "domain", "com.microsoft"),
    lambda m: setattr(m.graph.node[0], "op_type", "Loop"), lambda m: setattr(m.opset_import[0], "version", 18),
    lambda m: m.graph.node[0].ClearField("output"), lambda m: m.graph.sparse_initializer.add(),
    lambda m: m.training_info.add(), lambda m: m.graph.output.pop(),
    lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", 11),
    lambda m: m.graph.node[0].attribute.add(name="g", type=5),
    lambda m: m.graph.initializer.append(m.graph.initializer[0]),
    lambda m: m.metadata_props.add(key="k", value="v" * 10**6),
]  # fmt: skip


@pytest.mark.parametrize("change", GRAPH_CHANGES, ids=range(len(GRAPH_CHANGES)))
def test_a_graph_of_another_form_is_refused_before_any_library_parses_it(bundle, change, monkeypatch):
    change_graph(bundle, change)
    monkeypatch.setattr("onnxruntime.InferenceSession", None)
    message = refusal(bundle)
    assert "model.onnx: it " in message and len(message) < 700


def test_bytes_that_are_no_graph_are_refused(bundle):
    for content in (b"", b"\xff" * 100, (bundle / "model.onnx").read_bytes()[:-7]):
        (bundle / "model.onnx").write_bytes(content)
        seal(bundle)
        assert "not a graph as an export writes it" in refusal(bundle)


def test_a_data_file_with_bytes_after_the_weights_is_refused(bundle):
    with open(bundle / "model.onnx.data", "ab") as file:
        file.write(b"more")
    seal(bundle)
    assert "its weights end at" in refusal(bundle)


def test_weights_of_another_geometry_are_refused(bundle):
    change_manifest(bundle, lambda data: data["config"].update(intermediate_size=97))
    with pytest.raises(BundleError, match="has shape"):
        bundle_weights(Bundle.open(bundle))


def test_positions_beyond_the_tables_are_refused(bundle):
    change_manifest(
        bundle, lambda data: (data["config"].update(context_length=2**31 - 1), data.update(max_positions=2**31 - 1))
    )
    with pytest.raises(BundleError, match="RoPE tables"):
        bundle_weights(Bundle.open(bundle))


def test_a_step_that_onnxruntime_refuses_is_an_error_of_the_backend():
    with pytest.raises(BackendError, match=r"it does not run this graph: first line$"), refusals():
        raise RuntimeError("first line\nsecond line")


@pytest.mark.parametrize("location", ["../secret", "link", "/etc/hostname", "a\0b", ""])
def test_external_data_outside_of_the_folder_are_refused_anywhere_in_an_onnx_file(bundle, location):
    (bundle / "link").symlink_to("../secret")
    tensor = TensorProto(name="t", data_type=TensorProto.UINT8, dims=[1], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    inner = helper.make_graph([helper.make_node("Constant", [], ["y"], value=tensor)], "inner", [], [])
    change_graph(
        bundle,
        lambda model: model.graph.node.append(
            helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)
        ),
    )
    with pytest.raises(BundleError, match="the data of t is at"):
        load_source(bundle / "model.onnx")


def test_a_text_that_is_not_utf8_in_any_onnx_file_is_refused(bundle):
    """Protobuf returns such a text as bytes."""
    path = bundle / "model.onnx"
    path.write_bytes(path.read_bytes().replace(b"model.onnx.data", b"model.onnx\xff\xffata", 1))
    with pytest.raises(BundleError, match="value is no text"):
        load_source(path)


@pytest.mark.parametrize("domain", ["", "own"])
def test_functions_that_call_themselves_are_refused_before_the_parser(bundle, domain):
    """TensorRT's parser expanded them until the process died."""
    path = bundle / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    imports = [*model.opset_import, *([helper.make_opsetid(domain, 1)] if domain else [])]
    for name, called in (("First", "Second"), ("Second", "First")):
        body = [helper.make_node(called, ["a"], ["b"], domain=domain)]
        model.functions.append(helper.make_function(domain, name, ["a"], ["b"], body, imports))
    path.write_bytes(model.SerializeToString())
    with pytest.raises(BundleError, match=r"its function '(First|Second)' calls itself"):
        load_source(path)
    model.functions[1].node[0].CopyFrom(helper.make_node("Relu", ["a"], ["b"]))
    path.write_bytes(model.SerializeToString())
    assert len(load_source(path).functions) == 2


@pytest.mark.parametrize("value", ["-1", "1e3", "", "9" * 5000, "١"])
def test_the_place_of_a_weight_in_any_onnx_file_is_a_whole_number(bundle, value):
    change_graph(bundle, lambda model: set_place(model, "offset", value))
    assert (
        engines.commands.main.main(["build", "--onnx", str(bundle / "model.onnx"), "-o", str(bundle.parent / "out")])
        == 2
    )


def test_a_data_file_is_hashed_only_where_its_size_matches_the_graph(bundle, monkeypatch):
    """A sparse file can have any length, and its checksum would take days."""
    data = bundle / "model.onnx.data"
    monkeypatch.setattr(
        "exporter.bundle.bundle.sha256_of",
        lambda path: pytest.fail("it was hashed") if path.name == data.name else sha256_of(path),
    )
    os.truncate(data, 2**40)
    change_manifest(bundle, lambda manifest: manifest["files"][data.name].update(size_bytes=2**40))
    with pytest.raises(BundleError, match=r"its weights end at .*, expected 1,099,511,627,776"):
        Bundle.open(bundle, "full")
    assert any("its weights end at" in str(problem) for problem in verify_bundle(bundle).problems)
