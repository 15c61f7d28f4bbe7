"""Errors of a value by token, and graphs that are cut at their named values."""

from __future__ import annotations

import math

import numpy as np
import onnx

from exporter.measuring.named_values import GIVEN, cut_values, show_values, token_error


def test_an_error_is_relative_to_its_token_and_misshapen_values_are_infinitely_far():
    reference = np.ones((1, 2, 4), np.float32)
    reference[0, 1] *= 1000
    wrong = reference.copy()
    wrong[0, 0, 3] += 0.5
    assert token_error("blocks.0.mlp.up_proj", reference, wrong) == (0.5, (0, 0, 3))
    assert token_error("blocks.0.mlp.up_proj", reference, wrong[:, :1])[0] == math.inf
    wrong[0, 1, 0] = np.nan
    assert token_error("blocks.0.mlp.up_proj", reference, wrong)[0] == math.inf


def test_a_cut_graph_reads_given_values_and_shows_its_own(tiny_bundle):
    model = onnx.load(tiny_bundle("block").graph_path, load_external_data=False)
    names = show_values(model, ["blocks.0.mlp.product", "blocks.0.attention.scores", "no.such.value"])
    assert names == ["blocks.0.mlp.product", "blocks.0.attention.scores"]
    cut_values(model, dict.fromkeys(names, onnx.TensorProto.FLOAT))
    assert [entry.name for entry in model.graph.input if entry.name.endswith(GIVEN)] == ["blocks.0.mlp.product" + GIVEN]
    down = next(node for node in model.graph.node if "blocks.0.mlp.down_proj" in node.output)
    assert down.input[0] == "blocks.0.mlp.product" + GIVEN
    assert {"blocks.0.mlp.product", "blocks.0.attention.scores"} <= {output.name for output in model.graph.output}
