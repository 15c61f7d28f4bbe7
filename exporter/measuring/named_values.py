"""Named values of a graph: copies of a graph that show them, or that read given values in their place.

Every operation's result has a name, such as `blocks.3.mlp.up_proj`; the eager definition uses the same names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import onnx
from onnx import helper

Values = dict[str, np.ndarray]  # by name

SCORES = "attention.scores"  # is inside of the attention operation: it can be shown, but not given
GIVEN = "/given"  # the ending of an input that takes the place of a named value


def is_float32(name: str) -> bool:
    """Whether a value is float32 in a bundle of any dtype. Scores are, inside of a fused attention."""
    return name.startswith("rope.") or name == "logits" or name.endswith(SCORES)


def show_values(model: onnx.ModelProto, names: Iterable[str]) -> list[str]:
    """Makes every value of those names an output, attention scores too; returns the names that the graph has."""
    _show_scores(model.graph)
    computed = {name for node in model.graph.node for name in node.output}
    outputs = {output.name for output in model.graph.output}
    found = [name for name in names if name in computed]
    model.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in found if name not in outputs)
    return found


def _show_scores(graph: onnx.GraphProto) -> None:
    """Names the fourth output of every Attention, the scaled products of queries and keys, after its result."""
    for node in graph.node:
        if node.op_type == "Attention" and len(node.output) == 1:
            prefix = node.output[0].split("/")[0].removesuffix("attention.heads")
            node.output.extend(["", "", prefix + SCORES])


def cut_values(model: onnx.ModelProto, types: dict[str, int]) -> None:
    """Makes every operation read an input, `NAME/given`, in place of a named value. Scores stay where they are.

    Args:
        model: the graph; it is changed.
        types: ONNX type of each named value that the graph computes.
    """
    cut = {name: kind for name, kind in types.items() if not name.endswith(SCORES)}
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            if name in cut:
                node.input[index] = name + GIVEN
    model.graph.input.extend(helper.make_tensor_value_info(name + GIVEN, kind, None) for name, kind in cut.items())


def token_error(name: str, reference: np.ndarray, value: np.ndarray) -> tuple[float, tuple[int, ...]]:
    """Returns the largest error of a value, relative to the rms of its token or to its own size, and the error's index.

    The error is infinite where shapes differ or a value is not finite.
    """
    if value.shape != reference.shape:
        return math.inf, ()
    if not value.size:
        return 0.0, ()
    a, b = reference.astype(np.float64), value.astype(np.float64)
    with np.errstate(invalid="ignore"):
        difference = np.abs(a - b)
    if reference.dtype != np.bool_:
        others = _axes_within_token(name, a.ndim)
        rms = np.sqrt(np.mean(a**2, axis=others, keepdims=True))
        scale = np.maximum(rms, np.abs(a))
        difference = np.divide(difference, scale, out=np.where(difference > 0, math.inf, 0.0), where=scale > 0)
    difference = np.where(np.isfinite(b), difference, math.inf)
    worst = np.unravel_index(int(difference.argmax()), difference.shape)
    return float(difference[worst]), tuple(int(i) for i in worst)


def _axes_within_token(name: str, rank: int) -> tuple[int, ...]:
    """Returns the axes of one token's value: the last of [B, T, F] and [B, F], and axes H and D of [B, H, T, D].

    Heads that are not moved yet are [B, T, H, D].
    """
    if rank == 4:
        return (2, 3) if ".reshape_" in name else (1, 3)
    return (rank - 1,)
