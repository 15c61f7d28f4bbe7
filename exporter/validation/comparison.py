"""Runs the same scenarios through steppers, one after the other, and measures where they differ."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass

import numpy as np

from exporter.common.errors import InputError
from exporter.common.timing import timed
from exporter.spec.catalogue import ModelConfig
from exporter.spec.contract import SEQUENCE, Contract, Unit, numpy_dtype
from exporter.spec.feeds import real_tokens
from exporter.steppers.protocol import Stepper
from exporter.validation.scenarios import COMPONENT_SIZES, RunLimits, Scenario, cache_scenarios, component_feeds
from exporter.validation.tolerances import CONTROL_FACTOR, Tolerance

log = logging.getLogger(__name__)

CACHE_ROWS = "cache rows"

# (scenario, tensor) → the tensor at each step; cache rows are every row that a later step may read
Recording = dict[tuple[str, str], list[np.ndarray | None]]


@dataclass(frozen=True)
class Comparison:
    """One tensor of one scenario, compared over all its steps.

    Attributes:
        scenario: the scenario's name.
        tensor: an output's name, or "cache rows".
        shapes: of the tensor at each step.
        max_error: max |a − b| relative to the reference's rms; infinite where shapes or dtypes differ or a value is not
            finite. Cache rows are judged relative to rms or their own size, whichever is larger: keys of trained models
            reach 40 × rms, where rounding to half alone is 2e-2 of rms.
        mean_error: mean |a − b| likewise.
        allowed: the largest max_error that passes.
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


def record(
    config: ModelConfig,
    unit: Unit,
    max_positions: int,
    stepper: Stepper,
    inputs: Contract,
    seed: int = 0,
    limits: RunLimits = RunLimits(),  # noqa: B008 - frozen, so it can be shared
) -> Recording:
    """Runs every scenario of the unit and keeps what comparisons look at.

    Args:
        config: the model's geometry.
        unit: what the stepper runs.
        max_positions: what the graph was exported for.
        stepper: runs the steps.
        inputs: the contract whose dtypes the inputs are drawn in; every stepper of one comparison gets the same.
        seed: of the random inputs.
        limits: what every stepper of the comparison takes.
    """
    if seed < 0:
        raise InputError(f"seed: got {seed}, expected 0 or more")
    rng = np.random.default_rng(seed)
    recording: Recording = {}
    if unit.kind == "component":
        for sizes in COMPONENT_SIZES:
            name = "sizes " + " ".join(f"{axis}={size}" for axis, size in sizes.items())
            outputs = stepper.run(component_feeds(inputs, config, unit, sizes, rng))
            recording |= {(name, spec.name): [_checked(outputs.get(spec.name), spec.dtype, inputs, stepper)] for spec in inputs.outputs}
        return recording
    for scenario in cache_scenarios(max_positions, limits):
        with timed(log, "%s: %s, %d steps", stepper.description, scenario.name, len(scenario.steps)):
            recording |= _record_scenario(config, scenario, stepper, inputs, rng)
    return recording


def _record_scenario(config: ModelConfig, scenario: Scenario, stepper: Stepper, inputs: Contract, rng: np.random.Generator) -> Recording:
    cache = stepper.new_cache(len(scenario.steps[0]), scenario.capacity)
    steps: dict[str, list] = {spec.name: [] for spec in inputs.step_outputs}
    for feeds in scenario.feeds(inputs, config, rng):
        outputs = stepper.run(feeds, cache)
        for spec in inputs.step_outputs:
            output = _checked(outputs.get(spec.name), spec.dtype, inputs, stepper)
            if spec.name == "logits" and SEQUENCE in spec.axes and output is not None:
                output = output[real_tokens(feeds)]  # logits at pads mean nothing; hidden states at pads must be 0
            steps[spec.name].append(output)
    mask = feeds["attention_mask"]
    rows = [array[:, real == 1] for row, real in enumerate(mask) for array in cache.read(row, mask.shape[1])]
    return {(scenario.name, name): outputs for name, outputs in steps.items()} | {(scenario.name, CACHE_ROWS): rows}


def _checked(output: np.ndarray | None, dtype: str, inputs: Contract, stepper: Stepper) -> np.ndarray | None:
    """The output, or None where a stepper that keeps this contract returns another dtype than it says."""
    if output is not None and stepper.contract == inputs and output.dtype != numpy_dtype(dtype):
        return None
    return output


def compare(reference: Recording, candidate: Recording, tolerance: Tolerance) -> list[Comparison]:
    """Compares two recordings tensor by tensor; what the candidate lacks fails."""
    return [
        compare_tensor(scenario, tensor, [a for a in arrays if a is not None], candidate.get((scenario, tensor), []), tolerance.allowed)
        for (scenario, tensor), arrays in reference.items()
    ]


def compare_tensor(scenario: str, tensor: str, reference: list[np.ndarray], candidate: list[np.ndarray | None], allowed: float) -> Comparison:
    """Compares one tensor over all its steps; a missing, misshapen or non-finite candidate fails."""
    shapes = [list(array.shape) for array in reference]
    failed = Comparison(scenario, tensor, shapes, float("inf"), float("inf"), allowed)
    if len(candidate) != len(reference) or any(b is None or b.shape != a.shape for a, b in zip(reference, candidate, strict=True)):
        return failed
    a, b = (np.concatenate([np.ravel(array).astype(np.float64) for array in arrays if array is not None]) for arrays in (reference, candidate))
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return failed
    rms = float(np.sqrt(np.mean(a**2))) or 1.0
    difference = np.abs(a - b) / (np.maximum(rms, np.abs(a)) if tensor == CACHE_ROWS else rms)
    return Comparison(scenario, tensor, shapes, float(difference.max()), float(difference.mean()), allowed)


def judge_by_control(comparisons: list[Comparison], reference: Recording, control: Recording) -> list[Comparison]:
    """Widens what is allowed of each tensor to CONTROL_FACTOR times the control's own largest error in any scenario."""
    strayed: dict[str, float] = {}
    for comparison in compare(reference, control, Tolerance(0.0, {}, "control")):
        strayed[comparison.tensor] = max(strayed.get(comparison.tensor, 0.0), comparison.max_error)
    return [
        dataclasses.replace(c, allowed=max(c.allowed, CONTROL_FACTOR * strayed[c.tensor])) if np.isfinite(strayed[c.tensor]) else c
        for c in comparisons
    ]


def summarize(comparisons: list[Comparison], reference: str, candidate: str, tolerance: Tolerance, control: str | None) -> dict:
    """The comparisons as a section of report.json; infinite errors are written as null."""

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
