"""Weights with which a half-precision graph strays far from the definition, and outputs that are wrong all the same."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
from onnx import helper

from exporter.model.weights import RandomWeights
from tests.conftest import TINY
from tests.support.planted_faults import add_constant, node_of

SIX = dataclasses.replace(TINY, n_layers=6)


class ScaledWeights:
    """Random weights, some of them multiplied by a factor."""

    def __init__(self, config, factors):
        self._random, self._factors = RandomWeights(config, 0), factors
        self.description, self.has_own_head = {"source": "checkpoint"}, False

    def read(self, name, columns=slice(None), rows=slice(None)):
        factor = next((f for part, f in self._factors.items() if name.endswith(f"{part}.weight")), 1.0)
        return self._random.read(name, columns, rows) * factor


# scores of 300: a rounding error in half moves attention to other keys, and the layers after it carry that on
STRAYED = ScaledWeights(SIX, {"q_proj": 300**0.5, "k_proj": 300**0.5, "o_proj": 8.0})


def instead_of_output(*operation):
    """A fault that computes the graph's output anew from the right one."""

    def fault(model: onnx.ModelProto) -> None:
        node = node_of(model, "hidden_states_out")
        node.output[0] = "planted.right"
        op, constants = operation
        names = [add_constant(model, f"planted.{i}", array) for i, array in enumerate(constants)]
        model.graph.node.append(helper.make_node(op, ["planted.right", *names], ["hidden_states_out"], name="planted"))

    return fault


LAST = [np.array([n], np.int64) for n in (-1, -100_000, 2, -1)]  # start, end, axis, step
OUTPUT_FAULTS = {
    "zeros": instead_of_output("Mul", [np.zeros((), np.float16)]),
    "negated": instead_of_output("Neg", []),
    "reversed": instead_of_output("Slice", LAST),
}
