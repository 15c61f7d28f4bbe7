"""Streaming: memory that does not grow with depth, graphs of any depth, and validation one layer at a time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks.own.large_checkpoint import run
from exporter.bundle.manifest import DATA_FILE, GRAPH_FILE
from exporter.common.errors import InputError
from exporter.costs.ledger import Ledger
from exporter.graph.assemble import assemble
from exporter.graph.contract_check import check_graph
from exporter.graph.weight_writer import place_weights, serialize_graph
from exporter.model.weights import RandomWeights
from exporter.spec import catalogue
from exporter.spec.catalogue import CATALOGUE, ModelConfig
from exporter.spec.graph_spec import GraphSpec
from exporter.spec.tensors import graph_contract
from exporter.spec.unit import Unit
from exporter.validation.bundle_validation import validate_bundle
from exporter.validation.stored_values import STORED
from tests.conftest import ROOT, TINY
from tests.support.planted_faults import doctored, half_split_rope, scale_weight

pytestmark = pytest.mark.slow

# 0.8 GB of bf16 weights: an export that kept them in memory would break the ceiling.
DEEP = ModelConfig(
    hidden_size=2048,
    n_layers=6,
    n_heads=16,
    n_kv_heads=8,
    head_dim=128,
    intermediate_size=5632,
    vocab_size=32_000,
    context_length=2048,
)
CEILING_BYTES = 0.65e9  # above imports, which take 0.3 GB, and 0.6 GB with PyTorch's CUDA build; 0.53 was measured
IMPORTS = """
import onnx, onnxruntime, torch
from exporter.common.memory import peak_memory_bytes
print(peak_memory_bytes())
"""


def test_exporting_a_deep_checkpoint_takes_the_memory_of_its_largest_tensor(tmp_path):
    figures = run(DEEP, tmp_path, shard_bytes=1 << 29, validated=False)
    assert figures["checkpoint_bytes"] > 0.8e9
    imports = subprocess.run([sys.executable, "-c", IMPORTS], cwd=ROOT, capture_output=True, text=True, check=True)
    added = figures["export"]["peak_memory_bytes"] - int(imports.stdout)
    print("added", added / 1e6, imports.stdout)
    assert 0 < added < CEILING_BYTES


def test_the_70b_models_graph_is_traced_placed_and_checked_without_a_weight(tmp_path):
    """All 80 blocks; the data file is sparse, so nothing of its 141 GB is written."""
    config = CATALOGUE["llama3-70b"]
    unit = Unit.parse("model", config)
    graph = assemble(GraphSpec(config, unit, "fp16", 8192))
    offsets = place_weights(graph)
    (tmp_path / GRAPH_FILE).write_bytes(serialize_graph(graph))
    with open(tmp_path / DATA_FILE, "wb") as file:
        os.truncate(file.fileno(), offsets[-1] + graph.stored[-1].n_bytes)
    check_graph(tmp_path / GRAPH_FILE, graph_contract(config, unit, "fp16"))
    weights = [stored for stored in graph.stored if not stored.name.startswith("rope.")]
    ledger = Ledger.of(config, catalogue.WIDTH_RULES["llama3-70b"])
    assert sum(stored.n_bytes for stored in weights) == 2 * ledger.model_parameters == 2 * 70_553_706_496
    assert (tmp_path / DATA_FILE).stat().st_blocks == 0


@pytest.mark.parametrize(("unit", "dtype"), [("model", "fp16"), ("model", "bf16"), ("stack", "fp32")])
def test_validation_by_layer_passes_what_is_right_and_covers_every_piece(tiny_bundle, unit, dtype):
    lines: list[str] = []
    section, comparisons = validate_bundle(
        tiny_bundle(unit, dtype), RandomWeights(TINY, 0), by_layer=True, say=lines.append
    )
    assert section["passed"] and section["meaning"]["through"].endswith("one at a time")
    pieces = {c.scenario.split(":")[0] for c in comparisons}
    ends = ("embedding", "output head") if unit == "model" else ()
    assert pieces == {"layer 0", "layer 1", "layer 2", *ends, STORED}
    assert "validate: layer 1 of 3" in lines[:2] and lines[-1] == (
        "validate: output head" if unit == "model" else "validate: layer 3 of 3"
    )


@pytest.mark.parametrize(
    ("name", "piece"),
    [
        ("blocks.1.mlp.up_proj.weight", "layer 1"),
        ("blocks.2.attention_norm.weight", "layer 2"),
        ("norm.weight", "output head"),
        ("lm_head.weight", "output head"),
        ("embedding.weight", "embedding"),
    ],
)
def test_validation_by_layer_names_the_piece_whose_weight_is_wrong(tiny_bundle, tmp_path, name, piece):
    broken = doctored(tiny_bundle("model", "fp16"), tmp_path / "broken")
    broken = scale_weight(broken, name, 1.05)
    section, comparisons = validate_bundle(broken, RandomWeights(TINY, 0), by_layer=True)
    assert not section["passed"]
    assert {c.scenario.split(":")[0] for c in comparisons if not c.passed} == {piece, STORED}


def test_validation_by_layer_runs_the_graphs_own_nodes(tiny_bundle, tmp_path):
    broken = doctored(tiny_bundle("model", "fp32"), tmp_path / "broken", lambda model: half_split_rope(model, 1))
    _, comparisons = validate_bundle(broken, RandomWeights(TINY, 0), by_layer=True)
    assert {c.scenario.split(":")[0] for c in comparisons if not c.passed} == {"layer 1"}


def test_a_whole_that_does_not_fit_is_validated_by_layer_and_says_so(tiny_bundle, monkeypatch):
    import exporter.validation.bundle_validation

    monkeypatch.setattr(exporter.validation.bundle_validation, "available_host_bytes", lambda: 1000)
    lines: list[str] = []
    section, _ = validate_bundle(tiny_bundle("model", "fp16"), RandomWeights(TINY, 0), say=lines.append)
    assert (
        section["passed"]
        and "its blocks" in section["meaning"]["through"]
        and "layer by layer, since the whole would need" in lines[0]
    )


def test_a_component_has_no_layers(tiny_bundle):
    with pytest.raises(InputError, match="expected a block, stack or model"):
        validate_bundle(tiny_bundle("component:rms_norm", "fp16"), by_layer=True)
