"""Judges every operation of a graph on the definition's own inputs.

A small rounding error can grow large on its way through many layers: no tolerance for the outputs then tells a right
graph from a wrong one. Here the float32 graph is cut at every named value. Each operation reads the values of the
eager definition, so its error is its own, and the budgets stay tight with any weights. A graph whose every operation
is right on the definition's inputs is right as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from onnx import helper
from torch import Tensor

from exporter.bundle.bundle import Bundle
from exporter.measuring.named_values import GIVEN, SCORES, Values, cut_values, show_values, token_error
from exporter.model.observe import See
from exporter.model.weights import WeightSource
from exporter.spec.graph_spec import GraphSpec
from exporter.spec.tensors import PAST, Contract
from exporter.steppers.eager_stepper import EagerStepper, to_numpy
from exporter.steppers.onnxruntime_stepper import open_session, refusals
from exporter.validation.cpu_graph import twin_path
from exporter.validation.scenarios import RunLimits, cache_scenarios
from exporter.validation.tolerances import operation_budget

_HEADS = "attention.heads"
_VALUES = "attention.values"


@dataclass(frozen=True)
class OperationCheck:
    """The error of one operation on the definition's inputs.

    Attributes:
        name: name of its result, such as "blocks.3.mlp.up_proj".
        scenario: name of the scenario.
        step: index of the step.
        error: largest |a − b|, relative to the rms of the value's token or to the value's own size; infinite where the
            result is missing, misshapen or not finite.
        allowed: largest `error` that passes.
    """

    name: str
    scenario: str
    step: int
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed


@dataclass(frozen=True)
class StepValues:
    """One step of the eager definition in float32.

    Attributes:
        scenario, index: name of the scenario, and index of the step in it.
        feeds: the step's inputs.
        values: every named value.
        past, present: every cache tensor before and after the step, [B, K, C, D], by its name in the graph.
    """

    scenario: str
    index: int
    feeds: dict[str, np.ndarray]
    values: Values
    past: Values
    present: Values

    def renamed(self, old: str, new: str) -> StepValues:
        """Returns the step with `new` in place of the prefix `old` of its values' names."""
        values = {new + name[len(old) :] if name.startswith(old) else name: x for name, x in self.values.items()}
        return replace(self, values=values)

    @property
    def past_len(self) -> int:
        """The rows of a growing cache before the step."""
        return self.feeds["attention_mask"].shape[1] - self.feeds["position_ids"].shape[1]

    def input(self, name: str, growing: bool) -> np.ndarray:
        """Returns what the graph reads under a name."""
        if name in self.past:
            return np.ascontiguousarray(self.past[name][:, :, : self.past_len]) if growing else self.past[name]
        x = self.feeds[name]
        return x if x.dtype == np.int64 else x.astype(np.float32)


def record_values(spec: GraphSpec, weights: WeightSource, seed: int, limits: RunLimits) -> list[StepValues]:
    """Runs every scenario through the eager definition in float32 and returns every step with its values.

    Args:
        spec: what the graph is, in the dtype of the random inputs and with its cache in place.
        weights: weights rounded to the bundle's dtype.
        seed: seed for the random inputs: those of `record_run` with this seed.
        limits: limits that the scenarios keep.
    """
    stepper = EagerStepper.from_weights(spec.in_dtype("fp32"), weights)
    rng = np.random.default_rng(seed)
    pasts, presents = zip(*spec.contract.cache_pairs, strict=True)
    recorded = []
    for scenario in cache_scenarios(spec.max_positions, limits):
        cache = stepper.new_cache(len(scenario.steps[0]), scenario.capacity)
        for index, feeds in enumerate(scenario.feeds(spec.contract, spec.config, rng)):
            values: Values = {}
            past = {name: array.copy() for name, array in zip(pasts, cache.arrays, strict=True)}
            stepper.run(feeds, cache, see=_keeps(values))
            present = {name: array.copy() for name, array in zip(presents, cache.arrays, strict=True)}
            recorded.append(StepValues(scenario.name, index, feeds, values, past, present))
    return recorded


def _keeps(values: Values) -> See:
    """Returns an observer that puts a copy of every value into `values`."""

    def see(name: str, x: Tensor) -> Tensor:
        values[name] = to_numpy(x).copy()  # cache rows are views, and the next step changes them
        return x

    return see


def judge_bundle(bundle: Bundle, scratch: Path, steps: Sequence[StepValues]) -> list[OperationCheck]:
    """Judges every operation of a bundle's float32 twin; a bundle in parts is judged part by part.

    Args:
        bundle: a bundle of a unit with a cache.
        scratch: folder with the twins, which are written if they are not there.
        steps: the steps of the definition.
    """
    manifest = bundle.manifest
    checks: list[OperationCheck] = []
    for part, (first, stop) in zip(bundle.parts, manifest.parts or ((0, manifest.unit.n_layers),), strict=True):
        path = twin_path(part, scratch)
        model = onnx.load(path, load_external_data=False)
        checks += judge_graph(model, path.parent, part.manifest.contract, [_of_part(s, first, stop) for s in steps])
    return checks


def _of_part(step: StepValues, first: int, stop: int) -> StepValues:
    """Returns a step as one part sees it, which reads and returns hidden states where another part is beside it."""
    feeds, values = dict(step.feeds), dict(step.values)
    if first > 0:
        feeds["hidden_states"] = values[f"blocks.{first - 1}.mlp.residual"]
    if f"blocks.{stop}.mlp.residual" in values:
        real = values["attention_mask.real"][:, :, None]
        values["hidden_states_out"] = np.where(real, values[f"blocks.{stop - 1}.mlp.residual"], np.float32(0))
    return replace(step, feeds=feeds, values=values)


def judge_graph(
    model: onnx.ModelProto, data_folder: Path, contract: Contract, steps: Sequence[StepValues]
) -> list[OperationCheck]:
    """Judges every operation of a float32 graph at every step.

    Args:
        model: the graph, without its weights; it is changed.
        data_folder: the folder of the file with its weights.
        contract: inputs and outputs of the graph, in any dtype.
        steps: the steps of the definition, with the graph's own names.
    """
    growing = any(PAST in spec.axes for spec in contract.inputs)
    names = show_values(model, steps[0].values)
    cut_values(model, {name: helper.np_dtype_to_tensor_dtype(steps[0].values[name].dtype) for name in names})
    session = open_session(model.SerializeToString(), data_folder=data_folder)
    inputs = [entry.name for entry in session.get_inputs()]
    outputs = [spec.name for spec in contract.outputs]
    shown = list(dict.fromkeys([*outputs, *names]))
    checks: list[OperationCheck] = []
    for step in steps:
        feeds = {
            name: step.values[name.removesuffix(GIVEN)] if name.endswith(GIVEN) else step.input(name, growing)
            for name in inputs
        }
        with refusals():
            results = dict(zip(shown, session.run(shown, feeds), strict=True))
        checks += _measured(step, results, growing)
    return checks


def _measured(step: StepValues, results: Mapping[str, np.ndarray], growing: bool) -> Iterator[OperationCheck]:
    for name, result in results.items():
        if name in step.present:
            expected, allowed = step.present[name], 0.0  # rows are moved, not computed
            if growing:
                expected = expected[:, :, : step.feeds["attention_mask"].shape[1]]
        else:
            expected = _expected(name, step.values, results)
            allowed = operation_budget(name, "fp32", "onnxruntime").error
            if name == "lm_head" and result.size == expected.size:
                result = result.reshape(expected.shape)  # a graph that returns all logits multiplies [B · T, E]
        error, _ = token_error(name, expected, result)
        yield OperationCheck(name, step.scenario, step.index, error, allowed)


def _expected(name: str, values: Values, results: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the right result of an operation.

    Attention over large scores amplifies their rounding: exp(300 · (1 + 1e-7)) is off by 3e-5. Its scores have a
    budget of their own, so its result is compared with the definition's softmax over the scores of the graph.
    """
    scores = results.get(name.removesuffix(_HEADS) + SCORES) if name.endswith(_HEADS) else None
    if scores is None or scores.shape != values[name.removesuffix(_HEADS) + SCORES].shape:
        return values[name]
    visible, kept = values["attention_mask.visible"], values[name.removesuffix(_HEADS) + _VALUES]
    masked = np.where(visible, scores.astype(np.float64), -math.inf)
    largest = masked.max(-1, keepdims=True)
    weights = np.where(visible, np.exp(masked - np.where(np.isfinite(largest), largest, 0.0)), 0.0)
    total = weights.sum(-1, keepdims=True)
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    repeated = np.repeat(kept.astype(np.float64), scores.shape[1] // kept.shape[1], axis=1)
    return weights @ repeated


def worst_by_operation(checks: Sequence[OperationCheck]) -> list[OperationCheck]:
    """Returns the worst check of each operation, over layers, scenarios and steps: one that failed, or the largest."""
    worst: dict[str, OperationCheck] = {}
    for check in checks:
        short = ".".join(part for part in check.name.split(".") if not part.isdigit())
        seen = worst.setdefault(short, check)
        if (check.passed, -check.error) < (seen.passed, -seen.error):
            worst[short] = check
    return list(worst.values())
