"""Runs the same scenarios through two steppers and measures where they differ."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from exporter.catalogue import ModelConfig
from exporter.contract import SEQUENCE, Unit, numpy_dtype
from exporter.errors import InputError
from exporter.feeds import real_tokens
from exporter.scenarios import COMPONENT_SIZES, Scenario, cache_scenarios, component_feeds
from exporter.steppers.protocol import Stepper
from exporter.tolerances import Tolerance


@dataclass
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
        passed: max_error is within the tolerance.
    """

    scenario: str
    tensor: str
    shapes: list[list[int]]
    max_error: float
    mean_error: float
    passed: bool


def validate(
    config: ModelConfig, unit: Unit, max_positions: int, reference: Stepper, candidate: Stepper, tolerance: Tolerance, seed: int = 0
) -> list[Comparison]:
    """Compares every output, and every cache row that holds a token, in every scenario of the unit.

    Args:
        config: the model's geometry.
        unit: what both steppers run.
        max_positions: what the graph was exported for.
        reference: the oracle; it may compute in a wider dtype than the candidate.
        candidate: what is judged against it; the scenarios' inputs are in its dtype.
        tolerance: what it may differ by.
        seed: of the random inputs.
    """
    if seed < 0:
        raise InputError(f"seed: got {seed}, expected 0 or more")
    rng = np.random.default_rng(seed)
    if unit.kind == "component":
        return [c for sizes in COMPONENT_SIZES for c in _compare_component(config, unit, sizes, reference, candidate, tolerance, rng)]
    return [
        comparison
        for scenario in cache_scenarios(max_positions)
        for comparison in _compare_scenario(config, scenario, reference, candidate, tolerance, rng)
    ]


def _compare_component(config, unit, sizes, reference, candidate, tolerance, rng) -> list[Comparison]:
    feeds = component_feeds(candidate.contract, config, unit, sizes, rng)
    expected, got = reference.run(feeds), candidate.run(feeds)
    name = "sizes " + " ".join(f"{axis}={size}" for axis, size in sizes.items())
    return [
        compare(name, spec.name, [(expected[spec.name], _of_dtype(got.get(spec.name), spec.dtype))], tolerance) for spec in candidate.contract.outputs
    ]


def _compare_scenario(config, scenario: Scenario, reference: Stepper, candidate: Stepper, tolerance, rng) -> list[Comparison]:
    batch = len(scenario.steps[0])
    steppers = (reference, candidate)
    caches = [stepper.new_cache(batch, scenario.capacity) for stepper in steppers]
    pairs: dict[str, list] = {spec.name: [] for spec in candidate.contract.step_outputs}
    for feeds in scenario.feeds(candidate.contract, config, rng):
        expected, got = (stepper.run(feeds, cache) for stepper, cache in zip(steppers, caches, strict=True))
        real = real_tokens(feeds)
        for spec in candidate.contract.step_outputs:
            a, b = expected[spec.name], _of_dtype(got.get(spec.name), spec.dtype)
            if spec.name == "logits" and SEQUENCE in spec.axes and b is not None:
                a, b = a[real], b[real]  # logits at pads mean nothing; hidden states at pads must be 0 in both
            pairs[spec.name].append((a, b))
    comparisons = [compare(scenario.name, name, outputs, tolerance) for name, outputs in pairs.items()]
    rows = [_real_rows(cache, feeds["attention_mask"]) for cache in caches]
    return [*comparisons, compare(scenario.name, "cache rows", list(zip(*rows, strict=True)), tolerance, by_own_size=True)]


def _real_rows(cache, attention_mask: np.ndarray) -> list[np.ndarray]:
    """Every cached row that a later step may read, of each sequence and layer."""
    length = attention_mask.shape[1]
    return [array[:, mask == 1] for row, mask in enumerate(attention_mask) for array in cache.read(row, length)]


def _of_dtype(array: np.ndarray | None, dtype: str) -> np.ndarray | None:
    """The array, or None where it is not of the dtype that the contract says."""
    return array if array is not None and array.dtype == numpy_dtype(dtype) else None


def compare(
    scenario: str, tensor: str, pairs: list[tuple[np.ndarray, np.ndarray | None]], tolerance: Tolerance, by_own_size: bool = False
) -> Comparison:
    """Compares (reference, candidate) pairs of one tensor; a missing, misshapen or non-finite candidate fails.

    Args:
        scenario, tensor: what is compared, for the report.
        pairs: one (reference, candidate) a step.
        tolerance: the allowed error.
        by_own_size: divide each element's error by rms or by its own magnitude, whichever is larger; else by rms.
    """
    shapes = [list(reference.shape) for reference, _ in pairs]
    failed = Comparison(scenario, tensor, shapes, float("inf"), float("inf"), False)
    if any(b is None or b.shape != a.shape for a, b in pairs):
        return failed
    reference, candidate = (np.concatenate([np.ravel(pair[i]).astype(np.float64) for pair in pairs]) for i in (0, 1))
    if not (np.isfinite(reference).all() and np.isfinite(candidate).all()):
        return failed
    rms = float(np.sqrt(np.mean(reference**2))) or 1.0
    difference = np.abs(reference - candidate) / (np.maximum(rms, np.abs(reference)) if by_own_size else rms)
    worst = float(difference.max())
    return Comparison(scenario, tensor, shapes, worst, float(difference.mean()), worst <= tolerance.allowed)


def summarize(comparisons: list[Comparison], reference: Stepper, candidate: Stepper, tolerance: Tolerance) -> dict:
    """The comparisons as a section of report.json; infinite errors are written as null."""

    def finite(value: float) -> float | None:
        return value if np.isfinite(value) else None

    rows = [asdict(c) | {"max_error": finite(c.max_error), "mean_error": finite(c.mean_error)} for c in comparisons]
    return {
        "passed": all(c.passed for c in comparisons),
        "reference": reference.description,
        "candidate": candidate.description,
        "metric": "max |a - b| relative to the rms of the reference",
        "max_error": finite(max(c.max_error for c in comparisons)),
        "tolerance": asdict(tolerance),
        "comparisons": rows,
    }
