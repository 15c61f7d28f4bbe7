"""The results of a comparison: every candidate, every tensor, every step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from engines.comparison.audit import BackendAudit
from engines.comparison.network_meaning import NetworkMeaning
from exporter.validation.comparison import Comparison, Meaning
from exporter.validation.recording import Recording
from exporter.validation.tolerances import Tolerance


@dataclass(frozen=True)
class StepDifference:
    """The difference of one tensor at one step, between candidate b and reference a.

    Attributes:
        shape: shape of the tensor.
        max_abs, mean_abs: largest and mean |a − b|.
        max_rel, mean_rel: largest and mean |a − b| / |a| over elements where a is not 0; NaN where there is no such
            element.
        cosine: cosine of the angle between both as flat vectors; NaN where one is zero.
        worst_index: index of `max_abs`; None where the candidate is missing, misshapen or not finite.
    """

    shape: tuple[int, ...]
    max_abs: float
    mean_abs: float
    max_rel: float
    mean_rel: float
    cosine: float
    worst_index: tuple[int, ...] | None

    @classmethod
    def measure(cls, a: np.ndarray, b: np.ndarray | None) -> StepDifference:
        """Measures candidate `b` against reference `a`.

        The difference is infinite where `b` is missing, of another shape or not finite.
        """
        if b is None or b.shape != a.shape or not a.size:
            return cls._infinite(a.shape, None)
        a, b = a.astype(np.float64), b.astype(np.float64)
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            bad = np.argwhere(~np.isfinite(b))
            return cls._infinite(a.shape, tuple(int(i) for i in bad[0]) if len(bad) else None)
        difference = np.abs(a - b)
        worst = tuple(int(i) for i in np.unravel_index(int(difference.argmax()), a.shape))
        relative = difference[a != 0] / np.abs(a[a != 0])
        norms = float(np.linalg.norm(a) * np.linalg.norm(b))
        return cls(
            shape=a.shape,
            max_abs=float(difference.max()),
            mean_abs=float(difference.mean()),
            max_rel=float(relative.max()) if relative.size else math.nan,
            mean_rel=float(relative.mean()) if relative.size else math.nan,
            cosine=float((a * b).sum() / norms) if norms else math.nan,
            worst_index=worst,
        )

    @classmethod
    def _infinite(cls, shape: tuple[int, ...], worst_index: tuple[int, ...] | None) -> StepDifference:
        return cls(shape, math.inf, math.inf, math.inf, math.inf, math.nan, worst_index)


@dataclass(frozen=True)
class TensorResult:
    """The result for one tensor of one scenario.

    Attributes:
        comparison: the comparison over all steps, which passes or fails.
        steps: the difference at each step.
    """

    comparison: Comparison
    steps: tuple[StepDifference, ...]

    @classmethod
    def measure(cls, comparison: Comparison, reference: Recording, candidate: Recording) -> TensorResult:
        """Measures every step of a comparison; steps that the candidate lacks are infinitely far."""
        key = (comparison.scenario, comparison.tensor)
        expected = [array for array in reference[key] if array is not None]
        arrays = candidate.get(key, [])
        arrays = [*arrays, *[None] * (len(expected) - len(arrays))]
        return cls(comparison, tuple(StepDifference.measure(a, b) for a, b in zip(expected, arrays, strict=True)))


@dataclass(frozen=True)
class BackendResult:
    """The result for one candidate.

    Attributes:
        backend: name of the candidate.
        description: its stepper in words.
        tolerance: what the comparison allows without a control.
        control: description of the control that allowed more; None where none did.
        tensors: results for each tensor of each scenario.
        audit: audit of the candidate; None where it was not audited.
        meaning: the float32 twin against the definition, which no control excuses: the network's for the interpreter,
            the graph's for onnxruntime where a control allowed more than the tolerance; None elsewhere.
    """

    backend: str
    description: str
    tolerance: Tolerance
    control: str | None
    tensors: tuple[TensorResult, ...]
    audit: BackendAudit | None = None
    meaning: NetworkMeaning | Meaning | None = None

    @property
    def passed(self) -> bool:
        if self.meaning is not None and not self.meaning.passed:
            return False
        return all(tensor.comparison.passed for tensor in self.tensors) and (self.audit is None or self.audit.passed)


@dataclass(frozen=True)
class CompareResult:
    """The result of a whole comparison.

    Attributes:
        unit, dtype: the bundle's.
        reference: the reference's stepper in words.
        results: one result for each candidate.
        left_out: the reason for each backend that was not run, by its name.
        files: file name → SHA-256 of each graph and data file of the bundle, as they were read.
    """

    unit: str
    dtype: str
    reference: str
    results: tuple[BackendResult, ...]
    left_out: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results)
