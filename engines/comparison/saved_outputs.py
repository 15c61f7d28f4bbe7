"""Compares outputs that Polygraphy has saved with those of the reference, by the contract of the bundle.

`polygraphy run --load-outputs` compares the outputs that two files have in common, and passes where one of them lacks
an output or has it under another name. Here every output of the contract must be in both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engines.comparison.polygraphy_files import read_outputs
from engines.comparison.results import StepDifference
from exporter.bundle.bundle import Bundle
from exporter.common.errors import CheckFailed, InputError, together
from exporter.spec.dtypes import numpy_dtype
from exporter.spec.tensors import TensorSpec

MOST_PROBLEMS = 20  # that one message lists
Step = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class OutputResult:
    """The result for one output of one runner.

    Attributes:
        runner, output: their names.
        steps: number of steps.
        worst: the difference at the step with the largest |a − b|, and `at`, the number of that step.
        excess: largest |a − b| − (atol + rtol · |a|); above 0 where it fails.
    """

    runner: str
    output: str
    steps: int
    worst: StepDifference
    at: int
    excess: float

    @property
    def passed(self) -> bool:
        return self.excess <= 0

    def to_dict(self) -> dict:
        return {
            "runner": self.runner,
            "output": self.output,
            "steps": self.steps,
            "max_abs": self.worst.max_abs,
            "worst_step": self.at,
            "worst_index": list(self.worst.worst_index or ()),
            "passed": self.passed,
        }


def compare_outputs(bundle: Bundle, reference: Path, candidate: Path, atol: float, rtol: float) -> list[OutputResult]:
    """Compares every runner in a file with the reference: |a − b| ≤ atol + rtol · |a| for each element a of it.

    Args:
        bundle: the bundle whose graph ran.
        reference: file of `python -m engines compare --save-outputs`.
        candidate: file of `polygraphy run --save-outputs`, made with the inputs of the same command.
        atol, rtol: absolute and relative tolerance.

    Returns:
        The result of each output of each runner, in the order of the contract.

    Raises:
        InputError: a tolerance is no number of at least 0, or a file is not one of outputs.
        CheckFailed: an output is missing, unknown, of another dtype or shape, or not finite; or steps are missing. The
            message has every such output.
    """
    for name, value in (("atol", atol), ("rtol", rtol)):
        if not 0 <= value < math.inf:
            raise InputError(f"{name}: got {value}, expected a finite number of at least 0")
    expected, runs = read_outputs(reference), read_outputs(candidate)
    if len(expected) != 1:
        raise InputError(f"{reference}: got outputs of {sorted(expected)}, expected those of one runner, the reference")
    (steps,) = expected.values()
    specs = bundle.manifest.contract.outputs
    _check(f"{reference}", _problems(specs, steps, steps))
    for runner, got in runs.items():
        _check(f"{candidate}, {runner}", _problems(specs, steps, got))
    return [_measure(runner, spec.name, steps, got, atol, rtol) for runner, got in runs.items() for spec in specs]


def _check(subject: str, problems: Sequence[str]) -> None:
    if problems:
        more = len(problems) - MOST_PROBLEMS
        raise CheckFailed(together(subject, [*problems[:MOST_PROBLEMS], *([f"and {more} more"] if more > 0 else [])]))


def _problems(specs: Sequence[TensorSpec], expected: Sequence[Step], got: Sequence[Step]) -> list[str]:
    """Returns what is wrong with the outputs of a run, before their values are compared."""
    problems = []
    if not got or len(got) != len(expected):
        problems.append(
            f"got {len(got)} steps, expected {len(expected) or 'at least one'}; save inputs and outputs again"
        )
    known = {spec.name for spec in specs}
    for number, (a, b) in enumerate(zip(expected, got, strict=False)):
        for name in sorted(known - set(b)):
            problems.append(f"step {number}: the output {name} is missing")
        for name in sorted(set(b) - known):
            problems.append(f"step {number}: the output {name} is not one of the bundle's")
        for spec in specs:
            if spec.name in a and spec.name in b:
                problems += [
                    f"step {number}: {spec.name}: {text}" for text in _differs(spec, a[spec.name], b[spec.name])
                ]
    return problems


def _differs(spec: TensorSpec, a: np.ndarray, b: np.ndarray) -> list[str]:
    dtype = numpy_dtype(spec.dtype)
    if b.dtype != dtype:
        return [f"got dtype {b.dtype}, expected {dtype}"]
    fits = len(spec.axes) == b.ndim and all(
        isinstance(axis, str) or axis == size for axis, size in zip(spec.axes, b.shape, strict=True)
    )
    if not fits or b.shape != a.shape:
        return [f"got shape {list(b.shape)}, expected {list(a.shape if fits else spec.axes)}"]
    if not b.size:
        return [f"got shape {list(b.shape)}, which has no values"]
    return [] if np.isfinite(b).all() else ["it holds inf or NaN"]


def _measure(
    runner: str, name: str, expected: Sequence[Step], got: Sequence[Step], atol: float, rtol: float
) -> OutputResult:
    differences, excess = [], -math.inf
    for a, b in ((a[name], b[name]) for a, b in zip(expected, got, strict=True)):
        differences.append(StepDifference.measure(a, b))
        a, b = a.astype(np.float64), b.astype(np.float64)
        excess = max(excess, float((np.abs(a - b) - (atol + rtol * np.abs(a))).max()))
    at = max(range(len(differences)), key=[difference.max_abs for difference in differences].__getitem__)
    return OutputResult(runner, name, len(differences), differences[at], at, excess)
