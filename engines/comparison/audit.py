"""The audit of a backend: finds the operation, layer and step where an error begins, and its part in the whole error.

The backend runs the same steps twice and is compared with the eager definition in float64 (reference.py):

* carried: each operation reads the backend's own values, so that errors are carried along as in use;
* local: each operation reads the reference's values, rounded to the backend's dtypes, so that its error is its own.

The error begins at the first operation whose local error is above its budget (exporter/validation/tolerances.py). The
error of the last value is also divided among all operations (shares.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from engines.comparison.observers import Observer
from engines.comparison.reference import Reference, StepReference, filled_cache
from engines.comparison.shares import CACHE, error_shares
from exporter.measuring.named_values import SCORES, is_float32, token_error
from exporter.spec.dtypes import LARGEST_HALF
from exporter.validation.tolerances import Budget, operation_budget

SMALLEST_HALF = 2.0**-24  # a value up to half of it becomes zero
UNDERFLOW_SHARE = 0.01  # share of an operation's values; a smaller one is noise of activations near zero


@dataclass(frozen=True)
class OperationError:
    """The error of one named value at one step.

    Attributes:
        step: index of the step, from 0.
        name: name of the value, such as "blocks.3.mlp.up_proj".
        shape: shape of the value.
        carried, local: largest |a − b| of each pass, relative to the rms of the value's token or to the value's own
            size, whichever is larger; infinite where a value is not finite.
        differing: share of elements that differ in bits from the definition in the bundle's dtype, given the same
            inputs; NaN where the backend does not round after each operation, or sums may be taken in any order.
        worst_index: index of `local`.
        budget: largest error that passes.
        largest: largest |value| of the reference.
        flushed: share of the reference's nonzero values that become zero in half; 0 for other dtypes.
        overflow: whether the reference leaves the range of half; False for other dtypes.
        share: share of the error of the step's last value, to first order; NaN where that error is 0 or not finite.
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
    """The errors of one backend.

    Attributes:
        backend: name of the backend.
        description: backend and version in words.
        operations: errors of all named values, in the order in which they are computed, step after step.
        missing: named values that this backend does not show.
        share_of_earlier_steps: share of the last step's error that came with rows cached in earlier steps.
    """

    backend: str
    description: str
    operations: tuple[OperationError, ...]
    missing: tuple[str, ...]
    share_of_earlier_steps: float

    @property
    def passed(self) -> bool:
        return all(operation.passed for operation in self.operations)

    @property
    def first_failure(self) -> OperationError | None:
        """The first operation over its budget: at the earliest step, and there the earliest in the block."""
        return next((operation for operation in self.operations if not operation.passed), None)

    def contributors(self) -> list[OperationError]:
        """Returns operations by their share of the last step's error, largest first."""
        last = self.operations[-1].step
        ranked = [
            operation for operation in self.operations if operation.step == last and not math.isnan(operation.share)
        ]
        return sorted(ranked, key=lambda operation: -abs(operation.share))

    def explain(self) -> list[str]:
        """Returns the findings in sentences: the first failure, overflow and underflow, and what to do about each."""
        lines = []
        first = self.first_failure
        if first is not None and not first.overflow:
            lines.append(_explain_failure(first))
        for worst in _worst_by_name(o for o in self.operations if o.overflow):
            lines.append(
                f"{worst.name}: overflow from step {worst.step} on: its largest value is {worst.largest:,.0f}, "
                f"the largest of half precision is {LARGEST_HALF:,.0f}; {_range_advice(worst.name)}"
            )
        for worst in _worst_by_name(o for o in self.operations if o.flushed > UNDERFLOW_SHARE):
            lines.append(
                f"{worst.name}: underflow: {worst.flushed:.0%} of its values become zero in half precision; "
                f"{_range_advice(worst.name)}"
            )
        return lines


def _explain_failure(operation: OperationError) -> str:
    where = f"{operation.name}: from step {operation.step} on"
    if operation.local > operation.budget.error:
        result = "its result is not finite" if math.isinf(operation.local) else f"its error is {operation.local:.1e}"
        return (
            f"{where} {result} on the reference's own inputs, {operation.budget.error:.0e} allowed; "
            f"worst at {list(operation.worst_index)}"
        )
    return (
        f"{where} {operation.differing:.0%} of its values differ in bits from the definition's, "
        f"{operation.budget.differing:.0%} allowed; it rounds in another order"
    )


def _range_advice(name: str) -> str:
    is_attention = name.endswith((SCORES, "attention.heads"))
    island = ", or with attention in float32 (attention_dtype='fp32')" if is_attention else ""
    return f"export in bf16, which has the range of float32{island}"


def _worst_by_name(operations: Iterator[OperationError]) -> list[OperationError]:
    """Returns the first operation of each name, with the largest values of all steps."""
    worst: dict[str, OperationError] = {}
    for operation in operations:
        seen = worst.setdefault(operation.name, operation)
        largest, flushed = max(seen.largest, operation.largest), max(seen.flushed, operation.flushed)
        worst[operation.name] = replace(seen, largest=largest, flushed=flushed)
    return list(worst.values())


# --- the audit --------------------------------------------------------------------------------------------------------


def audit(reference: Reference, observer: Observer) -> BackendAudit:
    """Runs one backend through both passes of the reference's steps and measures every named value."""
    operations: list[OperationError] = []
    first_past = reference.steps[0].past
    cache = filled_cache(observer, first_past)
    missing: set[str] = set()
    for index, step in enumerate(reference.steps):
        past = [array.copy() for array in cache.arrays]
        carried = observer.observe(step.feeds, cache)
        local = observer.observe(step.feeds, filled_cache(observer, step.past), step.given)
        missing |= set(step.carried) - set(carried)
        measured = [
            _measure(index, name, step, carried[name], local[name], reference.dtype, observer)
            for name in step.carried
            if name in carried
        ]
        shares = error_shares(reference, index, carried, past)
        operations += [replace(operation, share=shares.get(operation.name, math.nan)) for operation in measured]
    return BackendAudit(
        observer.backend, observer.description, tuple(operations), tuple(sorted(missing)), shares.get(CACHE, math.nan)
    )


def _measure(
    index: int, name: str, step: StepReference, carried: np.ndarray, local: np.ndarray, dtype: str, observer: Observer
) -> OperationError:
    reference = step.carried[name]
    carried_error, _ = token_error(name, reference, carried)
    local_error, worst = token_error(name, step.local[name], local)
    definition = step.definition[name]
    budget = operation_budget(name, dtype, observer.backend, observer.integer_weights)
    judged_by_bits = budget.differing < 1 and observer.rounds_each_operation and local.shape == definition.shape
    differing = float(np.mean(local != definition)) if judged_by_bits else math.nan
    is_half = dtype == "fp16" and reference.dtype == np.float64 and not is_float32(name)
    sizes = np.abs(reference.astype(np.float64))
    largest = float(sizes.max(initial=0.0))
    nonzero = int(np.count_nonzero(sizes))
    flushed = int(np.count_nonzero((sizes > 0) & (sizes <= SMALLEST_HALF / 2)))
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
        flushed=flushed / nonzero if is_half and nonzero else 0.0,
        overflow=is_half and largest > LARGEST_HALF,
    )
