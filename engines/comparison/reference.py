"""The reference of the audit: the eager definition in float64, run once over the audit's steps.

Every backend is compared with its named values. There are two passes over the same steps:
  carried   each operation reads the exact values of the operations before it;
  local     each operation reads those values rounded to the dtypes of the backend.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from engines.comparison.observers import Observer, StepperObserver
from exporter.measuring.named_values import SCORES, Values, is_float32
from exporter.model.weights import WeightSource
from exporter.spec.catalogue import ModelConfig
from exporter.spec.dtypes import LARGEST_HALF, numpy_dtype
from exporter.spec.graph_spec import GraphSpec
from exporter.spec.tensors import Contract
from exporter.spec.unit import Unit
from exporter.steppers.eager_stepper import EagerStepper, to_numpy, to_torch
from exporter.steppers.protocol import HostCache
from exporter.validation.scenarios import Scenario

# Scales of a step's tokens in turn. The norm's eps counts at 1e-3; squares leave the range of half at 300.
TOKEN_SCALES = (1.0, 1e-3, 300.0)


def audit_scenario(max_positions: int) -> Scenario:
    """Returns the audit's steps: a ragged prefill, a decode step, and a ragged step over a filled cache.

    They fit the number of positions that the graph was exported for; a graph of fewer than 8 decodes one token at a
    time.
    """
    capacity = min(32, max_positions)
    if capacity < 8:
        return Scenario("audit", capacity, ((1,),) * capacity)
    return Scenario("audit", capacity, ((3, capacity // 2, capacity - 4), (1, 1, 1), (2, 1, 1)))


def audit_feeds(contract: Contract, config: ModelConfig, scenario: Scenario, seed: int) -> list[dict[str, np.ndarray]]:
    """Returns the feeds of each step; hidden states are scaled token by token, by TOKEN_SCALES in turn."""
    steps = []
    for feeds in scenario.feeds(contract, config, np.random.default_rng(seed)):
        x = feeds.get("hidden_states")
        if x is not None:
            scales = np.resize(TOKEN_SCALES, x.shape[1]).astype(np.float32)
            feeds["hidden_states"] = (x.astype(np.float32) * scales[:, None]).astype(x.dtype)
        steps.append(feeds)
    return steps


# --- the reference ----------------------------------------------------------------------------------------------------


@dataclass
class StepReference:
    """The values that every backend is compared with at one step.

    Attributes:
        feeds: the step's inputs.
        carried: named values in float64, computed from float64 values.
        given: named values rounded to the backend's dtypes, which the local pass reads. Values beyond half's range are
            clamped.
        local: named values in float64, each computed from `given` values.
        definition: named values of the eager definition in the bundle's dtype, each computed from `given` values.
        past: cache rows before the local pass, one array [B, K, C, D] in the bundle's dtype for each cache tensor.
    """

    feeds: dict[str, np.ndarray]
    carried: Values
    given: Values
    local: Values
    definition: Values
    past: list[np.ndarray]


@dataclass
class Reference:
    """The eager definition in float64 over the bundle's rounded weights, and its values at every step.

    Attributes:
        config: the model's geometry.
        unit: the bundle's unit.
        dtype: the bundle's dtype.
        stepper: the eager definition in float64.
        steps: the values of each step.
        carried_pasts: cache rows before each step of the carried pass, one float64 array for each cache tensor.
    """

    config: ModelConfig
    unit: Unit
    dtype: str
    stepper: EagerStepper
    steps: list[StepReference] = field(default_factory=list)
    carried_pasts: list[list[np.ndarray]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The names of all values, in the order in which they are computed."""
        return list(self.steps[0].carried)


def make_reference(spec: GraphSpec, weights: WeightSource, seed: int) -> Reference:
    """Runs the float64 reference and the definition in the bundle's dtype over the audit's steps.

    Args:
        spec: what the bundle's graph is.
        weights: weights that are rounded to the spec's dtype already.
        seed: seed for the random inputs.
    """
    dtype = spec.dtype
    scenario = audit_scenario(spec.max_positions)
    feeds = audit_feeds(spec.contract, spec.config, scenario, seed)
    stepper = EagerStepper.from_weights(spec.in_dtype("fp64"), weights)
    reference = Reference(spec.config, spec.unit, dtype, stepper)
    shape = (len(scenario.steps[0]), scenario.capacity)
    carried_cache, local_cache = stepper.new_cache(*shape), stepper.new_cache(*shape)
    observer = StepperObserver(stepper)
    for step in feeds:
        reference.carried_pasts.append([array.copy() for array in carried_cache.arrays])
        carried = observer.observe(step, carried_cache)
        past = [array.astype(numpy_dtype(dtype)) for array in local_cache.arrays]
        local, given = _observe_rounded(stepper, step, local_cache, dtype)
        reference.steps.append(StepReference(step, carried, given, local, {}, past))
    definition = StepperObserver(EagerStepper.from_weights(spec, weights))
    for done in reference.steps:
        done.definition = definition.observe(done.feeds, filled_cache(definition, done.past), done.given)
    return reference


def _observe_rounded(
    stepper: EagerStepper, feeds: dict[str, np.ndarray], cache: HostCache, dtype: str
) -> tuple[Values, Values]:
    """Runs a float64 step in which every named value is rounded before it is read.

    Returns:
        The values before rounding, and the values after it.
    """
    exact: Values = {}
    given: Values = {}

    def see(name: str, x: Tensor) -> Tensor:
        exact[name] = to_numpy(x).copy()
        if name.endswith(SCORES) or not x.is_floating_point():
            given[name] = exact[name]
            return x
        target = numpy_dtype("fp32" if is_float32(name) else dtype)
        limit = LARGEST_HALF if dtype == "fp16" else np.inf
        given[name] = np.clip(exact[name], -limit, limit).astype(target)
        return to_torch(given[name].astype(np.float64))

    stepper.run(feeds, cache, see=see)
    return exact, given


def filled_cache(observer: Observer, past: list[np.ndarray]) -> HostCache:
    """Returns a new cache of an observer that holds these rows, one array [B, K, C, D] for each cache tensor."""
    cache = observer.new_cache(past[0].shape[0], past[0].shape[2])
    for array, rows in zip(cache.arrays, past, strict=True):
        array[:] = rows.astype(array.dtype)
    return cache
