"""Projections of one input are stored side by side, and each is read back as the checkpoint has it."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from exporter.bundle.graph_form import check_graph_form
from exporter.bundle.manifest import DATA_FILE, GRAPH_FILE
from exporter.common.errors import BundleError
from exporter.graph.weight_reader import GraphWeights, bundle_weights
from exporter.model.weights import RandomWeights
from exporter.spec.parameters import MERGED_WEIGHTS, block_weight_shapes, weight_shapes
from exporter.spec.unit import Unit
from tests.conftest import TINY


def test_every_projection_reads_back_as_it_was_whole_and_in_slices(tiny_bundle):
    bundle = tiny_bundle("stack", "fp32")
    own, source = bundle_weights(bundle), RandomWeights(TINY, 0)
    for name in weight_shapes(TINY, bundle.manifest.unit):
        assert torch.equal(own.read(name), source.read(name)), name
        if name.endswith("_proj.weight"):
            assert torch.equal(
                own.read(name, columns=slice(5, 40), rows=slice(3, 17)), source.read(name)[3:17, 5:40]
            ), name


@pytest.mark.parametrize("merged", MERGED_WEIGHTS)
def test_a_merged_matrix_holds_its_projections_side_by_side(tiny_bundle, merged):
    bundle = tiny_bundle("block", "fp32")
    stored = next(t for t in onnx.load(bundle.graph_path).graph.initializer if t.name == f"blocks.0.{merged}.weight")
    parts = [RandomWeights(TINY, 0).read(f"blocks.0.{name}.weight") for name in MERGED_WEIGHTS[merged]]
    assert np.array_equal(numpy_helper.to_array(stored), torch.cat(parts).T)


def test_a_graph_that_has_them_apart_is_read_too(tmp_path):
    """Older bundles have one tensor for each projection."""
    source = RandomWeights(TINY, 0)
    graph = onnx.GraphProto()
    for name in block_weight_shapes(TINY):
        weight = source.read(f"blocks.1.{name}")
        graph.initializer.append(
            numpy_helper.from_array(
                (weight.T if weight.dim() == 2 else weight).contiguous().numpy(), f"blocks.0.{name}"
            )
        )
    model = onnx.ModelProto(graph=graph)
    onnx.save(model, tmp_path / GRAPH_FILE, save_as_external_data=True, location=DATA_FILE, size_threshold=0)
    weights = GraphWeights(tmp_path, TINY, first_layer=1, description={})
    assert weights.shapes == weight_shapes(TINY, Unit("stack", first_layer=1, n_layers=1))
    assert all(torch.equal(weights.read(name), source.read(name)) for name in weights.names)


@pytest.mark.parametrize("heads", [(8, 2), (4, 1)])
def test_a_merged_matrix_of_another_width_is_refused(tiny_bundle, heads):
    bundle = tiny_bundle("block", "fp32")
    config = dataclasses.replace(TINY, n_heads=heads[0], n_kv_heads=heads[1])
    other = dataclasses.replace(
        bundle,
        manifest=dataclasses.replace(bundle.manifest, spec=dataclasses.replace(bundle.manifest.spec, config=config)),
    )
    with pytest.raises(BundleError, match=r"attention\.\w_proj\.weight has shape \("):
        bundle_weights(other)


def test_the_widths_of_a_split_are_no_shape_unless_something_else_reads_them(tiny_bundle, tmp_path):
    """The product of its numbers bounds the memory of an untrusted graph; the widths of a Split do not multiply."""
    bundle = tiny_bundle("block", "fp32")
    (tmp_path / DATA_FILE).write_bytes((bundle.folder / DATA_FILE).read_bytes())
    model = onnx.load(bundle.graph_path, load_external_data=False)
    widths = next(node.input[1] for node in model.graph.node if node.op_type == "Split")
    onnx.save(model, tmp_path / GRAPH_FILE)
    check_graph_form(tmp_path / GRAPH_FILE, bundle.manifest)
    next(node for node in model.graph.node if node.op_type == "Reshape").input[1] = widths
    onnx.save(model, tmp_path / GRAPH_FILE)
    with pytest.raises(ValueError, match=r"numbers \[64, 32, 32\], expected none beyond"):
        check_graph_form(tmp_path / GRAPH_FILE, bundle.manifest)
