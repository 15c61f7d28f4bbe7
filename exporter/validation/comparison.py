"""Compares two recordings tensor by tensor."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass

import numpy as np

from exporter.validation.recording import CACHE_ROWS, Recording
from exporter.validation.tolerances import Tolerance

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Comparison:
    """One tensor of one scenario, compared over all its steps.

    Attributes:
        scenario: name of the scenario.
        tensor: name of an output, or "cache rows".
        shapes: shapes of the tensor at each step.
        max_error: largest |a − b| relative to the reference's rms; infinite where shapes or dtypes differ or a value is
            not finite. The error of cache rows is relative to rms or to their own size, whichever is larger: keys of
            trained models reach 40 × rms, and rounding such a key to half costs 2e-2 of rms.
        mean_error: mean |a − b|, relative to the same.
        allowed: largest `max_error` that passes.
    """

    scenario: str
    tensor: str
    shapes: list[list[int]]
    max_error: float
    mean_error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.max_error <= self.allowed


def compare(reference: Recording, candidate: Recording, tolerance: Tolerance) -> list[Comparison]:
    """Compares two recordings tensor by tensor; a tensor that the candidate lacks fails."""
    return [
        compare_tensor(
            scenario,
            tensor,
            [a for a in arrays if a is not None],
            candidate.get((scenario, tensor), []),
            tolerance.allowed,
        )
        for (scenario, tensor), arrays in reference.items()
    ]


def compare_tensor(
    scenario: str, tensor: str, reference: list[np.ndarray], candidate: list[np.ndarray | None], allowed: float
) -> Comparison:
    """Compares one tensor over all its steps; a missing, misshapen or non-finite candidate fails."""
    shapes = [list(array.shape) for array in reference]
    failed = Comparison(scenario, tensor, shapes, float("inf"), float("inf"), allowed)
    if len(candidate) != len(reference) or any(
        b is None or b.shape != a.shape for a, b in zip(reference, candidate, strict=True)
    ):
        return failed
    a, b = (
        np.concatenate([np.ravel(array).astype(np.float64) for array in arrays if array is not None])
        for arrays in (reference, candidate)
    )
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return failed
    rms = float(np.sqrt(np.mean(a**2))) or 1.0
    difference = np.abs(a - b) / (np.maximum(rms, np.abs(a)) if tensor == CACHE_ROWS else rms)
    return Comparison(scenario, tensor, shapes, float(difference.max()), float(difference.mean()), allowed)


def summarize(
    comparisons: list[Comparison], reference: str, candidate: str, tolerance: Tolerance, control: str | None
) -> dict:
    """Returns the comparisons as a section of report.json; infinite errors are null."""

    def finite(value: float) -> float | None:
        return value if np.isfinite(value) else None

    return {
        "passed": all(c.passed for c in comparisons),
        "reference": reference,
        "candidate": candidate,
        "control": control,
        "metric": "max |a - b| relative to the rms of the reference",
        "max_error": finite(max(c.max_error for c in comparisons)),
        "max_allowed": max(c.allowed for c in comparisons),
        "tolerance": dataclasses.asdict(tolerance),
        "comparisons": [
            {
                **dataclasses.asdict(c),
                "max_error": finite(c.max_error),
                "mean_error": finite(c.mean_error),
                "passed": c.passed,
            }
            for c in comparisons
        ],
    }
