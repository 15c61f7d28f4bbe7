"""The calculated bytes of weights equal those of real exports.

The cases are every format, tied and untied, whole and in parts.
"""

from __future__ import annotations

import dataclasses

import onnx
import pytest

from exporter.commands.main import main
from exporter.costs.stored_size import parts_within, stored_weights_bytes
from exporter.export import ExportRequest, export_bundle
from exporter.model.weights import RandomWeights
from exporter.spec.catalogue import CATALOGUE
from exporter.spec.graph_spec import GraphSpec
from exporter.spec.unit import Unit
from exporter.spec.weight_formats import WEIGHT_FORMATS, WeightFormat
from tests.conftest import MAX_POSITIONS, TINY


def stored(path) -> int:
    """Returns the bytes of all tensors that a graph has in its data file."""
    tensors = onnx.load(path, load_external_data=False).graph.initializer
    return sum(int(entry.value) for tensor in tensors for entry in tensor.external_data if entry.key == "length")


CASES = [
    *(("model", True, 2, name) for name in (None, *WEIGHT_FORMATS)),
    *(("model", tied, n_parts, name) for tied, n_parts in ((False, 2), (True, 1)) for name in (None, "int4")),
    ("component:swiglu_mlp", False, 1, "uint4"),
]


@pytest.mark.parametrize(("kind", "tied", "n_parts", "name"), CASES)
def test_the_bytes_are_those_of_a_real_export(tmp_path, kind, tied, n_parts, name):
    config = dataclasses.replace(TINY, tie_word_embeddings=tied)
    unit, weight_format = Unit.parse(kind, config), WeightFormat(name, 16) if name else None
    request = ExportRequest(
        config, unit, RandomWeights(config, 0), "fp16", MAX_POSITIONS, n_parts=n_parts, weight_format=weight_format
    )
    bundle = export_bundle(request, tmp_path / "bundle", validated=False)
    for part, bounds in zip(bundle.parts, bundle.manifest.parts or [None], strict=True):
        assert stored_weights_bytes(request.spec, bounds) == stored(part.graph_path)


def test_a_budget_makes_fewer_parts_of_fewer_bits():
    config = CATALOGUE["llama3-8b"]
    unit = Unit.parse("model", config)
    counts = [
        parts_within(GraphSpec(config, unit, "fp16", 8192, False, WeightFormat(name) if name else None), 8 << 30)
        for name in (None, "int8", "int4")
    ]
    assert counts == sorted(counts, reverse=True) and len(set(counts)) == 3, counts


def test_the_command_line_counts_the_format_and_refuses_one_that_does_not_fit(tmp_path, capsys):
    arguments = ["export", "--model", "smollm2-135m", "--unit", "model", "--part-budget", "0.01"]
    arguments += ["-o", str(tmp_path / "x")]
    needed = []
    for more in ([], ["--weights", "int4"], ["--weights", "int4", "--max-positions", "64"]):
        assert main([*arguments, *more]) == 2
        needed.append(float(capsys.readouterr().err.rpartition("expected at least ")[2].partition(",")[0]))
    assert needed == sorted(needed, reverse=True) and needed[0] > needed[1]
    assert main([*arguments, "--weights", "int4", "--block-size", "128"]) == 2
    assert "does not divide the matrices' inputs" in capsys.readouterr().err
