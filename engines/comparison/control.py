"""Judges a candidate by a control where it misses the fixed tolerance.

Trained weights can make a scenario ill-conditioned. SmolLM2's activations reach 24,000 = 60 × rms after block 3; a
relative change of 1e-6 in the input of its 30 blocks moves their output by up to 2e-4 of rms. No arithmetic keeps a
fixed tolerance there. Measured errors: 3.0e-2 for the whole model in fp16; for the stack of its first 8 blocks 1.1e-1
in fp16, 3.4e-4 in fp32.

A candidate that misses its tolerance is therefore judged again. The control is the eager definition in another
arithmetic. It shows how far a right answer can be from the reference with these weights, and the candidate may be
CONTROL_FACTOR times as far.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from exporter.validation.comparison import Comparison, compare
from exporter.validation.recording import Recording
from exporter.validation.tolerances import Tolerance

# The reference has a rounding error too, and the direction of each rounding is random: a right candidate was seen at
# 2.1 times the control's error (bf16, the first 8 blocks of SmolLM2).
CONTROL_FACTOR = 4.0


@dataclass(frozen=True)
class Control:
    """Two right answers of the eager definition, whose difference shows what rounding does with these weights.

    Both are the eager definition's, whichever backends are compared: a wrong graph must not widen its own tolerance.

    Attributes:
        exact: recording of the eager definition in float32.
        rounded: recording of the eager definition in the arithmetic of `control_dtype`.
        description: description of the stepper that made `rounded`.
    """

    exact: Recording
    rounded: Recording
    description: str


def control_dtype(computed_in: str) -> str:
    """Returns the arithmetic of the control: float64 for a candidate computed in float32, else the candidate's."""
    return "fp64" if computed_in == "fp32" else computed_in


def judge(
    reference: Recording, candidate: Recording, tolerance: Tolerance, run_control: Callable[[], Control]
) -> tuple[list[Comparison], str | None]:
    """Compares a candidate with the reference; where it misses the tolerance, a control decides what is allowed.

    Args:
        reference: recording of the reference.
        candidate: recording of what is judged.
        tolerance: what is allowed without a control.
        run_control: makes the control; it is called only where a comparison fails.

    Returns:
        The comparisons, and the control's description where the control allowed more than the tolerance.
    """
    comparisons = compare(reference, candidate, tolerance)
    if all(c.passed for c in comparisons):
        return comparisons, None
    control = run_control()
    comparisons = judge_by_control(comparisons, control.exact, control.rounded)
    return comparisons, control.description if is_widened(comparisons, tolerance) else None


def judge_by_control(comparisons: list[Comparison], reference: Recording, control: Recording) -> list[Comparison]:
    """Widens what is allowed of each tensor to CONTROL_FACTOR times the control's largest error in any scenario.

    A control whose error is not finite widens nothing.
    """
    errors: dict[str, float] = {}
    for comparison in compare(reference, control, Tolerance(0.0, {}, "control")):
        errors[comparison.tensor] = max(errors.get(comparison.tensor, 0.0), comparison.max_error)
    return [
        dataclasses.replace(c, allowed=max(c.allowed, CONTROL_FACTOR * errors[c.tensor]))
        if np.isfinite(errors[c.tensor])
        else c
        for c in comparisons
    ]


def is_widened(comparisons: list[Comparison], tolerance: Tolerance) -> bool:
    """Whether a comparison allows more than the tolerance."""
    return any(c.allowed > tolerance.allowed for c in comparisons)


def explain_control(description: str, allowed: float) -> str:
    """Returns why more than the fixed tolerance was allowed, as one sentence for reports."""
    return (
        f"small rounding errors grow large with these weights: where {description} itself differs from the reference, "
        f"{CONTROL_FACTOR:g} times its error is allowed, and {allowed:.0e} at least"
    )
