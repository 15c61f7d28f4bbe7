"""The component audit: which operation of which layer, from which step on, makes the error, and how much of it.

Two passes over the same steps, against the eager definition in float64:
  carried   each backend computes from its own values, so errors travel on as they do in use;
  local     each operation reads the reference's values, rounded to what the backend holds, so that what is left is the
            error that this one operation makes.
The first operation whose local error exceeds its budget (exporter/validation/tolerances.py) is where the trouble starts. The error of
the last value is also divided among all operations to first order: the gradient of that error by each operation's result,
times the local error made there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from engines.comparison.observers import SCORES, Observer, StepperObserver, Values
from exporter.model.weights import WeightSource
from exporter.spec.catalogue import ModelConfig
from exporter.spec.dtypes import numpy_dtype
from exporter.spec.graph_spec import GraphSpec
from exporter.spec.tensors import Contract
from exporter.spec.unit import Unit
from exporter.steppers.eager_stepper import EagerStepper, feed_tensor, to_numpy, to_torch
from exporter.steppers.protocol import HostCache
from exporter.validation.scenarios import Scenario
from exporter.validation.tolerances import Budget, operation_budget

LARGEST_HALF = 65504.0
SMALLEST_HALF = 2.0**-24  # below half of it, a value becomes zero
_CACHE = "cache"
UNDERFLOW_SHARE = 0.01  # of an operation's values; fewer are noise of activations near zero
TOKEN_SCALES = (1.0, 1e-3, 300.0)  # of hidden states in turn: where eps matters, and where squares leave half's range


@dataclass(frozen=True)
class OperationError:
    """One named value at one step.

    Attributes:
        step: of the scenario, from 0.
        name: of the value, e.g. "blocks.3.mlp.up_proj".
        shape: of the value.
        carried, local: largest |a − b| relative to the rms of the value's token or the value's own size, whichever is
            larger; infinite where a value is not finite and the reference is.
        differing: share of elements that are not bit-equal to the definition's in the bundle's dtype, given the same inputs;
            NaN where the backend does not round after each operation, or sums may be taken in any order.
        worst_index: where `local` was found.
        budget: what is allowed.
        largest: largest |value| of the reference.
        flushed: share of the reference's nonzero values that half precision turns into zero; 0 for other dtypes.
        overflow: whether the reference leaves the range of half; False for other dtypes.
        share: of the error of the step's last value, to first order; NaN where that error is 0 or not finite.
    """

    step: int
    name: str
    shape: tuple[int, ...]
    carried: float
    local: float
    differing: float
    worst_index: tuple[int, ...]
    budget: Budget
    largest: float
    flushed: float
    overflow: bool
    share: float = math.nan

    @property
    def passed(self) -> bool:
        return self.local <= self.budget.error and not self.differing > self.budget.differing and not self.overflow

    @property
    def headroom(self) -> float:
        """How many times larger the largest value could be in half precision."""
        return LARGEST_HALF / self.largest if self.largest else math.inf


@dataclass(frozen=True)
class BackendAudit:
    """All named values of one backend, in the order in which they are computed, step after step."""

    backend: str
    description: str
    operations: tuple[OperationError, ...]
    missing: tuple[str, ...]  # named values that this backend does not show
    share_of_earlier_steps: float  # of the last step's error: what the cache carried into it

    @property
    def passed(self) -> bool:
        return all(operation.passed for operation in self.operations)

    @property
    def first_failure(self) -> OperationError | None:
        """The first operation over its budget: at the earliest step, and there the earliest in the block."""
        return next((operation for operation in self.operations if not operation.passed), None)

    def contributors(self) -> list[OperationError]:
        """Operations by their share of the last step's error, largest first."""
        last = self.operations[-1].step
        ranked = [
            operation for operation in self.operations if operation.step == last and not math.isnan(operation.share)
        ]
        return sorted(ranked, key=lambda operation: -abs(operation.share))

    def explain(self) -> list[str]:
        """What was found, in sentences: the first failure, overflow and underflow, each with what to do."""
        lines = []
        first = self.first_failure
        if first is not None and not first.overflow:
            lines.append(_explain_failure(first))
        for operation in _worst_by_name(operation for operation in self.operations if operation.overflow):
            lines.append(
                f"{operation.name}: overflow from step {operation.step} on: it reaches {operation.largest:,.0f}, half precision ends at "
                f"{LARGEST_HALF:,.0f}; {_range_advice(operation.name)}"
            )
        for operation in _worst_by_name(
            operation for operation in self.operations if operation.flushed > UNDERFLOW_SHARE
        ):
            lines.append(
                f"{operation.name}: underflow: {operation.flushed:.0%} of its values become zero in half precision; {_range_advice(operation.name)}"
            )
        return lines


def _explain_failure(operation: OperationError) -> str:
    where = f"{operation.name}: from step {operation.step} on"
    if operation.local > operation.budget.error:
        size = "is not finite" if math.isinf(operation.local) else f"errs by {operation.local:.1e}"
        return f"{where} it {size} on the reference's own inputs, {operation.budget.error:.0e} allowed; worst at {list(operation.worst_index)}"
    return (
        f"{where} {operation.differing:.0%} of its values round otherwise than the definition's, {operation.budget.differing:.0%} allowed: "
        "the order of rounding is another one"
    )


def _range_advice(name: str) -> str:
    island = (
        ", or keep attention in float32 with --attention-dtype fp32"
        if name.endswith((SCORES, "attention.heads"))
        else ""
    )
    return f"export with --dtype bf16, which has the range of float32{island}"


def _worst_by_name(operations: Iterator[OperationError]) -> list[OperationError]:
    """The first of each name, with the largest value that any step saw."""
    worst: dict[str, OperationError] = {}
    for operation in operations:
        seen = worst.setdefault(operation.name, operation)
        worst[operation.name] = replace(
            seen, largest=max(seen.largest, operation.largest), flushed=max(seen.flushed, operation.flushed)
        )
    return list(worst.values())


# --- the steps ---------------------------------------------------------------------------------------------------------------


def audit_scenario(max_positions: int) -> Scenario:
    """Ragged prefill, decode, and a ragged step over a filled cache, fitted to the positions that the graph was exported for."""
    capacity = min(32, max_positions)
    if capacity < 8:
        return Scenario("audit", capacity, ((1,),) * capacity)
    return Scenario("audit", capacity, ((3, capacity // 2, capacity - 4), (1, 1, 1), (2, 1, 1)))


def audit_feeds(contract: Contract, config: ModelConfig, scenario: Scenario, seed: int) -> list[dict[str, np.ndarray]]:
    """The scenario's feeds; hidden states are scaled token by token, so that small and large ones are among them."""
    steps = []
    for feeds in scenario.feeds(contract, config, np.random.default_rng(seed)):
        x = feeds.get("hidden_states")
        if x is not None:
            scales = np.resize(TOKEN_SCALES, x.shape[1]).astype(np.float32)
            feeds["hidden_states"] = (x.astype(np.float32) * scales[:, None]).astype(x.dtype)
        steps.append(feeds)
    return steps


# --- the reference -------------------------------------------------------------------------------------------------------------


@dataclass
class StepReference:
    """What every backend is held against at one step.

    Attributes:
        feeds: the step's inputs.
        carried: named values in float64, from float64 inputs.
        given: named values rounded to the backend's dtypes, which the local pass reads; inf where half overflows is clamped.
        local: named values in float64, each computed from `given` ones.
        definition: named values of the eager definition in the bundle's dtype, each computed from `given` ones.
        past: cache rows before the local pass, one array for each cache tensor.
    """

    feeds: dict[str, np.ndarray]
    carried: Values
    given: Values
    local: Values
    definition: Values
    past: list[np.ndarray]


@dataclass
class Reference:
    """The eager definition in float64 over the bundle's rounded weights, run once; backends come and go beside it."""

    config: ModelConfig
    unit: Unit
    dtype: str
    stepper: EagerStepper
    steps: list[StepReference] = field(default_factory=list)
    carried_pasts: list[list[np.ndarray]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return list(self.steps[0].carried)


def make_reference(
    spec: GraphSpec,
    weights: WeightSource,
    seed: int,
) -> Reference:
    """Runs the float64 reference and the definition in the bundle's dtype over the audit's steps.

    `weights` must be rounded to the spec's dtype already; both hold them exactly.
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
        done.definition = definition.observe(done.feeds, _filled(definition, done.past), done.given)
    return reference


def _observe_rounded(
    stepper: EagerStepper, feeds: dict[str, np.ndarray], cache: HostCache, dtype: str
) -> tuple[Values, Values]:
    """One float64 step in which every named value is rounded before it is read: the values before and after rounding."""
    exact: Values = {}
    given: Values = {}

    def see(name: str, x: Tensor) -> Tensor:
        exact[name] = to_numpy(x).copy()
        if name.endswith(SCORES) or not x.is_floating_point():
            given[name] = exact[name]
            return x
        target = numpy_dtype("fp32" if _is_float32(name) else dtype)
        limit = LARGEST_HALF if dtype == "fp16" else np.inf
        given[name] = np.clip(exact[name], -limit, limit).astype(target)
        return to_torch(given[name].astype(np.float64))

    stepper.run(feeds, cache, see=see)
    return exact, given


def _is_float32(name: str) -> bool:
    """Whether a value is float32 in every graph, whatever the bundle's dtype; scores are, inside of a fused attention."""
    return name.startswith("rope.") or name == "logits" or name.endswith(SCORES)


def _filled(observer: Observer, past: list[np.ndarray]) -> HostCache:
    cache = observer.new_cache(past[0].shape[0], past[0].shape[2])
    for array, rows in zip(cache.arrays, past, strict=True):
        array[:] = rows.astype(array.dtype)
    return cache


# --- the audit -----------------------------------------------------------------------------------------------------------------


def audit(reference: Reference, observer: Observer) -> BackendAudit:
    """Runs one backend through the reference's steps, both ways, and measures every named value."""
    operations: list[OperationError] = []
    first_past = reference.steps[0].past
    cache = _filled(observer, first_past)
    missing: set[str] = set()
    for index, step in enumerate(reference.steps):
        past = [array.copy() for array in cache.arrays]
        carried = observer.observe(step.feeds, cache)
        local = observer.observe(step.feeds, _filled(observer, step.past), step.given)
        missing |= set(step.carried) - set(carried)
        measured = [
            _measure(index, name, step, carried[name], local[name], reference.dtype, observer)
            for name in step.carried
            if name in carried
        ]
        shares = _shares(reference, index, carried, past)
        operations += [replace(operation, share=shares.get(operation.name, math.nan)) for operation in measured]
    return BackendAudit(
        observer.backend, observer.description, tuple(operations), tuple(sorted(missing)), shares.get(_CACHE, math.nan)
    )


def _measure(
    index: int, name: str, step: StepReference, carried: np.ndarray, local: np.ndarray, dtype: str, observer: Observer
) -> OperationError:
    reference = step.carried[name]
    carried_error, _ = _error(name, reference, carried)
    local_error, worst = _error(name, step.local[name], local)
    definition = step.definition[name]
    budget = operation_budget(name, dtype, observer.backend, observer.integer_weights)
    judged_by_bits = budget.differing < 1 and observer.rounds_each_operation and local.shape == definition.shape
    differing = float(np.mean(local != definition)) if judged_by_bits else math.nan
    is_half = dtype == "fp16" and reference.dtype == np.float64 and not _is_float32(name)
    sizes = np.abs(reference.astype(np.float64))
    largest = float(sizes.max(initial=0.0))
    nonzero = int(np.count_nonzero(sizes))
    return OperationError(
        step=index,
        name=name,
        shape=reference.shape,
        carried=carried_error,
        local=local_error,
        differing=differing,
        worst_index=worst,
        budget=budget,
        largest=largest,
        flushed=float(np.count_nonzero((sizes > 0) & (sizes <= SMALLEST_HALF / 2))) / nonzero
        if is_half and nonzero
        else 0.0,
        overflow=is_half and largest > LARGEST_HALF,
    )


def _error(name: str, reference: np.ndarray, value: np.ndarray) -> tuple[float, tuple[int, ...]]:
    """Largest error of a value by token, and where; infinite where shapes differ or a value is not finite."""
    if value.shape != reference.shape:
        return math.inf, ()
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
    """The axes that one token's value spans: [B, T, F], [B, H, T, D], [B, T, H, D] where heads are not moved yet, [B, F]."""
    if rank == 4:
        return (2, 3) if ".reshape_" in name else (1, 3)
    return (rank - 1,)


def _shares(reference: Reference, index: int, carried: Values, past: list[np.ndarray]) -> dict[str, float]:
    """Each operation's share of the error of the step's last value, to first order, by name.

    With e the error of the last value and J_v its derivative by value v, e ≈ Σ J_v δ_v over what the backend makes at each v
    beyond the exact operation on its own inputs, and over the errors already in the cache. The share of v is
    ⟨e, J_v δ_v⟩ / ‖e‖²; shares add up to 1 as long as the error is small.
    """
    step = reference.steps[index]
    last = reference.names[-1]
    if last not in carried or not np.isfinite(carried[last].astype(np.float64)).all():
        return {}
    error = torch.from_numpy(carried[last].astype(np.float64) - step.carried[last])
    size = float((error**2).sum())
    if size == 0:
        return {}
    probes: dict[str, Tensor] = {}

    def see(name: str, x: Tensor) -> Tensor:
        if not x.is_floating_point() or name.endswith(SCORES):
            return x
        probes[name] = torch.zeros_like(x, requires_grad=True)
        return x + probes[name]

    stepper = reference.stepper
    inputs = [feed_tensor(step.feeds, spec) for spec in stepper.contract.step_inputs]
    cached = [to_torch(array).requires_grad_() for array in reference.carried_pasts[index]]
    output = stepper.module(*inputs, *(tensor.clone() for tensor in cached), see=see)
    wanted = {**probes, **{f"{_CACHE} {i}": tensor for i, tensor in enumerate(cached)}}
    gradients = torch.autograd.grad((output * error).sum(), list(wanted.values()), allow_unused=True)
    observer = StepperObserver(stepper)
    exact = observer.observe(step.feeds, _filled(observer, past), carried)
    made = {name: carried[name].astype(np.float64) - exact[name] for name in probes if name in carried}
    made |= {
        f"{_CACHE} {i}": array.astype(np.float64) - reference.carried_pasts[index][i] for i, array in enumerate(past)
    }
    shares: dict[str, float] = {}
    for name, gradient in zip(wanted, gradients, strict=True):
        if gradient is not None and name in made:
            key = _CACHE if name.startswith(_CACHE) else name
            shares[key] = shares.get(key, 0.0) + float((gradient.numpy() * made[name]).sum()) / size
    return shares
