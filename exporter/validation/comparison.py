"""Compares two recordings tensor by tensor, and answers the first question of validation.

The question is: does the graph mean what the definition means?
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from exporter.validation.by_operation import OperationCheck, worst_by_operation
from exporter.validation.recording import CACHE_ROWS, Recording
from exporter.validation.tolerances import Tolerance


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


METRIC = "max |a - b| relative to the rms of the reference"


@dataclass(frozen=True)
class Meaning:
    """A float32 graph compared with the definition in float32.

    Attributes:
        comparisons: outputs and cache rows of every scenario.
        tolerance: what the comparisons allow.
        reference, candidate: both sides in words.
        through: the graph that was run, in words.
        operations: every operation on the definition's inputs; None where all outputs are within the tolerance, and
            where there are no operations to judge.
        unjudged_failed: whether a piece of a validation by layer fails whose operations were not judged.
        stored: the bundle's stored values, compared with what they should be.
    """

    comparisons: Sequence[Comparison]
    tolerance: Tolerance
    reference: str
    candidate: str
    through: str
    operations: Sequence[OperationCheck] | None = None
    unjudged_failed: bool = False
    stored: Sequence[Comparison] = ()

    @classmethod
    def of_pieces(cls, pieces: Sequence[Meaning]) -> Meaning:
        """Returns the answer for a graph that was run piece by piece; every piece must pass."""
        judged = [check for piece in pieces for check in piece.operations or ()]
        unjudged_failed = any(not piece.passed and not piece.operations for piece in pieces)
        comparisons = [c for piece in pieces for c in piece.comparisons]
        return replace(pieces[0], comparisons=comparisons, operations=judged or None, unjudged_failed=unjudged_failed)

    @property
    def passed(self) -> bool:
        """Whether all outputs agree, or every operation does on the definition's inputs; and all stored values do."""
        if self.unjudged_failed or not all(c.passed for c in self.stored):
            return False
        if all(c.passed for c in self.comparisons):
            return True
        return bool(self.operations) and all(check.passed for check in self.operations or ())

    @property
    def max_error(self) -> float:
        return max(c.max_error for c in self.comparisons)

    @property
    def failures(self) -> list[str]:
        """A sentence for each operation that fails, or for each output where operations were not judged."""
        if self.passed:
            return []
        wrong = [
            f"{c.scenario}: {c.tensor} differ by {c.max_error:.2e} at most ({c.allowed:.0e} allowed)"
            for c in self.stored
            if not c.passed
        ]
        if self.operations:
            return wrong + [
                f"{c.name}: on the definition's inputs it differs by {c.error:.2e} of rms ({c.allowed:.0e} allowed), "
                f"at worst in step {c.step} of {c.scenario}"
                for c in worst_by_operation(self.operations)
                if not c.passed
            ]
        return wrong + [
            f"{c.scenario}: {c.tensor} differs by {c.max_error:.2e} of rms at most ({c.allowed:.0e} allowed), "
            f"{c.mean_error:.2e} on average"
            for c in self.comparisons
            if not c.passed
        ]

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        return meaning_sentence(self.to_dict())

    def to_dict(self) -> dict:
        """Returns the section for report.json; numbers that are not finite are null."""
        operations = None if self.operations is None else [_plain(c) for c in worst_by_operation(self.operations)]
        return {
            "passed": self.passed,
            "reference": self.reference,
            "candidate": self.candidate,
            "through": self.through,
            "metric": METRIC,
            "judged_by": "outputs" if operations is None else "operations",
            "max_error": _finite(self.max_error),
            "max_allowed": self.tolerance.allowed,
            "tolerance": dataclasses.asdict(self.tolerance),
            "comparisons": [_plain(c) for c in self.comparisons],
            "operations": operations,
            "stored": [_plain(c) for c in self.stored],
            "failures": self.failures,
        }


def meaning_sentence(meaning: dict) -> str:
    """Returns the answer to the first question in one sentence.

    Args:
        meaning: what `Meaning.to_dict` returned.
    """
    said = "does the graph mean what the definition means? "
    if any(not c["passed"] for c in meaning["stored"]):
        return f"{said}NO: stored values are wrong, through the {meaning['through'].removeprefix('the ')}"
    if meaning["judged_by"] == "operations":
        said += "yes" if meaning["passed"] else "NO"
        how = "these weights amplify rounding, so every operation was judged on the definition's own inputs"
        return f"{said}: {how}, through the {meaning['through'].removeprefix('the ')}"
    error = "not finite" if meaning["max_error"] is None else f"{meaning['max_error']:.1e} of rms at most"
    said += "yes" if meaning["passed"] else "NO"
    allowed = f"{meaning['max_allowed']:.0e} allowed"
    return f"{said}: in float32 it differs by {error}, {allowed}, through the {meaning['through'].removeprefix('the ')}"


def _plain(row: Comparison | OperationCheck) -> dict:
    values = {key: _finite(v) if isinstance(v, float) else v for key, v in dataclasses.asdict(row).items()}
    return values | {"passed": row.passed}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
