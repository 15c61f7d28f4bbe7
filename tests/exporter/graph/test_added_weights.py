"""A vector that is added to the table of weights is reordered, merged and taken apart as the matrix beside it is."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir
import pytest
import torch

from exporter.checkpoint.formats import Checkpoint
from exporter.checkpoint.huggingface import open_huggingface, open_weights
from exporter.checkpoint.meta import MetaWeights
from exporter.graph.assemble import AssembledGraph
from exporter.graph.weight_reader import GraphWeights
from exporter.graph.weight_writer import write_graph
from exporter.model.weights import RandomWeights, load_eager
from exporter.spec import parameters
from exporter.spec.dtypes import ONNX_TYPES
from exporter.spec.graph_spec import GraphSpec
from exporter.spec.parameters import BLOCK_WEIGHTS, held_weights, is_rotated
from exporter.spec.stored_tensor import StoredTensor
from exporter.spec.tensors import IR_VERSION, OPSET
from exporter.spec.unit import Unit
from tests.conftest import MAX_POSITIONS, TINY
from tests.support.checkpoint_folders import half_split_pairs, meta_shards, rewrite_tensors, write_huggingface

LAYERS = range(TINY.n_layers)
BIASES = tuple(
    dataclasses.replace(weight, name=f"{weight.module}.bias", axes=weight.axes[:1])
    for weight in BLOCK_WEIGHTS
    if weight.merged_into == "attention.qkv_proj"
)


@pytest.fixture
def with_biases(monkeypatch) -> RandomWeights:
    """Adds the biases of q, k and v to the table; returns a source of all weights."""
    monkeypatch.setattr(parameters, "BLOCK_WEIGHTS", (*BLOCK_WEIGHTS, *BIASES))
    return RandomWeights(TINY, 0)


def test_a_hugging_face_folder_s_vectors_are_reordered_like_its_matrices(tmp_path, with_biases):
    source, names = with_biases, list(parameters.weight_shapes(TINY, Unit("model", n_layers=3)))
    with pytest.MonkeyPatch.context() as plain:
        plain.setattr(parameters, "BLOCK_WEIGHTS", BLOCK_WEIGHTS)
        folder = write_huggingface(tmp_path / "checkpoint", TINY)
        opened: Checkpoint = open_huggingface(folder)

    def add(tensors):
        for layer in LAYERS:
            for letter in "qkv":
                bias = source.read(f"blocks.{layer}.attention.{letter}_proj.bias")
                if letter in "qk":
                    bias = half_split_pairs(bias[:, None], TINY.head_dim)[:, 0]
                tensors[f"model.layers.{layer}.self_attn.{letter}_proj.bias"] = bias.clone()

    rewrite_tensors(folder, add)
    weights = open_weights(folder, opened.config)
    names = [name for name in names if name.endswith(".bias")]
    assert len(names) == 3 * TINY.n_layers
    assert [name for name in names if is_rotated(name)] == [name for name in names if "v_proj" not in name]
    for name in names:
        assert torch.equal(weights.read(name), source.read(name)), name
        assert torch.equal(weights.read(name, columns=slice(3, 17)), source.read(name)[3:17]), name


def test_a_meta_checkpoint_s_vectors_are_joined_from_all_shards(tmp_path, with_biases):
    source = with_biases
    with pytest.MonkeyPatch.context() as plain:
        plain.setattr(parameters, "BLOCK_WEIGHTS", BLOCK_WEIGHTS)
        shards = meta_shards(TINY, source, 2)
    for layer in LAYERS:
        for letter in "qkv":
            halves = source.read(f"blocks.{layer}.attention.{letter}_proj.bias").chunk(2)
            for shard, half in zip(shards, halves, strict=True):
                shard[f"layers.{layer}.attention.w{letter}.bias"] = half.clone()
    paths = [tmp_path / f"consolidated.{index:02d}.pth" for index in range(2)]
    for path, shard in zip(paths, shards, strict=True):
        torch.save(shard, path)
    weights = MetaWeights(tmp_path, TINY, paths, shards)
    for layer in LAYERS:
        for letter in "qkv":
            name = f"blocks.{layer}.attention.{letter}_proj.bias"
            assert torch.equal(weights.read(name), source.read(name)), name
            assert torch.equal(weights.read(name, columns=slice(3, 30)), source.read(name)[3:30]), name


def test_merged_vectors_are_written_side_by_side_and_taken_apart(tmp_path, with_biases):
    spec = GraphSpec(TINY, Unit("block"), "fp16", MAX_POSITIONS)
    names = tuple(f"blocks.0.{weight.name}" for weight in held_weights("attention.qkv_proj.bias"))
    assert [name[-11:] for name in names] == ["q_proj.bias", "k_proj.bias", "v_proj.bias"]
    stored = StoredTensor("blocks.0.attention.qkv_proj.bias", names, "fp16", (64 + 32 + 32,), transposed=False)
    kind = ir.TensorType(ir.DataType(ONNX_TYPES["fp16"]))
    initializer = ir.Value(name=stored.name, shape=ir.Shape(stored.shape), type=kind)
    graph = ir.Graph([], [], nodes=[], initializers=[initializer], opset_imports={"": OPSET}, name="vectors")
    model = ir.Model(graph, ir_version=IR_VERSION)
    write_graph(AssembledGraph(spec, model, [stored], spec.contract), tmp_path, with_biases)

    weights = GraphWeights(tmp_path, TINY, 0, {})
    assert weights.names == set(names)
    for name in names:
        expected = with_biases.read(name).half()
        assert weights.shapes[name] == tuple(expected.shape)
        assert torch.equal(weights.read(name), expected), name
        assert torch.equal(weights.read(name, columns=slice(3, 30)), expected[3:30]), name


def test_a_weight_that_the_eager_module_does_not_have_is_refused(with_biases):
    spec = GraphSpec(TINY, Unit("block"), "fp32", MAX_POSITIONS)
    with pytest.raises(AssertionError, match="every weight of the spec"):
        load_eager(spec, with_biases)
