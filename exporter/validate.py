"""Runs the same scenarios through two steppers and measures where they differ."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from exporter.catalogue import ModelConfig
from exporter.contract import SEQUENCE, Unit
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
        max_error: max |a − b| relative to the reference's rms; infinite where shapes differ or a value is not finite.
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
        reference: the oracle, usually eager.
        candidate: what is judged against it.
        tolerance: what it may differ by.
        seed: of the random inputs.
    """
    rng = np.random.default_rng(seed)
    if unit.kind == "component":
        return [c for sizes in COMPONENT_SIZES for c in _compare_component(config, unit, sizes, reference, candidate, tolerance, rng)]
    return [
        comparison
        for scenario in cache_scenarios(max_positions)
        for comparison in _compare_scenario(config, scenario, reference, candidate, tolerance, rng)
    ]


def _compare_component(config, unit, sizes, reference, candidate, tolerance, rng) -> list[Comparison]:
    feeds = component_feeds(reference.contract, config, unit, sizes, rng)
    expected, got = reference.run(feeds), candidate.run(feeds)
    name = "sizes " + " ".join(f"{axis}={size}" for axis, size in sizes.items())
    return [compare(name, output, [(expected[output], got.get(output))], tolerance) for output in expected]


def _compare_scenario(config, scenario: Scenario, reference: Stepper, candidate: Stepper, tolerance, rng) -> list[Comparison]:
    batch = len(scenario.steps[0])
    steppers = (reference, candidate)
    caches = [stepper.new_cache(batch, scenario.capacity) for stepper in steppers]
    pairs: dict[str, list] = {spec.name: [] for spec in reference.contract.step_outputs}
    for feeds in scenario.feeds(reference.contract, config, rng):
        expected, got = (stepper.run(feeds, cache) for stepper, cache in zip(steppers, caches, strict=True))
        real = real_tokens(feeds)
        for spec in reference.contract.step_outputs:
            a, b = expected[spec.name], got.get(spec.name)
            if spec.name == "logits" and SEQUENCE in spec.axes and b is not None:
                a, b = a[real], b[real]  # logits at pads mean nothing; hidden states at pads must be 0 in both
            pairs[spec.name].append((a, b))
    comparisons = [compare(scenario.name, name, outputs, tolerance) for name, outputs in pairs.items()]
    rows = [_real_rows(cache, feeds["attention_mask"]) for cache in caches]
    return [*comparisons, compare(scenario.name, "cache rows", list(zip(*rows, strict=True)), tolerance)]


def _real_rows(cache, attention_mask: np.ndarray) -> list[np.ndarray]:
    """Every cached row that a later step may read, of each sequence and layer."""
    length = attention_mask.shape[1]
    return [array[:, mask == 1] for row, mask in enumerate(attention_mask) for array in cache.read(row, length)]


def compare(scenario: str, tensor: str, pairs: list[tuple[np.ndarray, np.ndarray | None]], tolerance: Tolerance) -> Comparison:
    """Compares (reference, candidate) pairs of one tensor; a missing, misshapen or non-finite candidate fails."""
    shapes = [list(reference.shape) for reference, _ in pairs]
    if any(b is None or b.shape != a.shape or b.dtype != a.dtype for a, b in pairs):
        return Comparison(scenario, tensor, shapes, float("inf"), float("inf"), False)
    reference, candidate = (np.concatenate([np.ravel(x[i]).astype(np.float64) for x in pairs]) for i in (0, 1))
    rms = float(np.sqrt(np.mean(reference**2))) or 1.0
    with np.errstate(invalid="ignore"):
        difference = np.abs(reference - candidate) / rms
    if not np.isfinite(difference).all():
        return Comparison(scenario, tensor, shapes, float("inf"), float("inf"), False)
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
