"""Answers for the interpreter what validation answers for a graph: does the network mean what the definition means?

A comparison in a narrow dtype allows what the dtype costs, and a wrong network may cost less. So TensorRT parses the
graph's float32 twin too, and its network is compared with the definition in float32. Where its outputs differ because
the weights amplify rounding, every operation is judged on the reference's own inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from engines.comparison.audit import BackendAudit, OperationError, audit
from engines.comparison.observers import StepperObserver
from engines.comparison.reference import make_reference
from engines.interpreter.stepper import InterpreterStepper
from engines.library.backend import choose_backend
from exporter.bundle.bundle import Bundle
from exporter.measuring.named_values import SCORES
from exporter.model.weights import WeightSource
from exporter.steppers.parts_stepper import open_parts
from exporter.steppers.protocol import Stepper
from exporter.validation.comparison import Comparison, compare
from exporter.validation.cpu_graph import twin_path
from exporter.validation.recording import Recording
from exporter.validation.tolerances import Tolerance, tolerance

HEADS = "attention.heads"
# Parts have no audit. Rounding alone moved the float32 outputs of the first 8 blocks of SmolLM2 by 3.4e-4 of rms.
LARGEST_OF_PARTS = 1e-3


@dataclass(frozen=True)
class NetworkMeaning:
    """A float32 network compared with the definition in float32.

    Attributes:
        comparisons: outputs and cache rows of every scenario.
        audit: every operation on the reference's inputs; None where all outputs are within the tolerance, and where
            there are no operations to judge.
    """

    comparisons: tuple[Comparison, ...]
    audit: BackendAudit | None = None

    @property
    def passed(self) -> bool:
        """Whether all outputs agree, or every operation does on the reference's inputs."""
        if all(c.passed for c in self.comparisons):
            return True
        return self.audit is not None and not self.audit.missing and not self.wrong_operations

    @property
    def wrong_operations(self) -> list[OperationError]:
        """The operations whose error on the reference's inputs is above their budget.

        The scores of attention are given rounded to float32: a score s is off by up to |s| · 2⁻²⁴, and its exponential
        is off by as much relative to its size. The weights of a softmax then differ by up to twice that.
        """
        operations = () if self.audit is None else self.audit.operations
        scores = {(o.step, o.name.removesuffix(SCORES)): o.largest for o in operations if o.name.endswith(SCORES)}
        return [
            o
            for o in operations
            if not o.passed
            and o.local > o.budget.error + scores.get((o.step, o.name.removesuffix(HEADS)), 0.0) * 2.0**-23
        ]

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        worst = max(self.comparisons, key=lambda c: c.max_error)
        answer = f"does the network mean what the definition means? {'yes' if self.passed else 'NO'}: in float32"
        if self.audit is not None:
            wrong = "".join(f"; {o.name} differs by {o.local:.1e} of rms" for o in self.wrong_operations[:1])
            return f"{answer} its outputs differ, so every operation was judged on the reference's inputs{wrong}"
        return f"{answer} it differs by {worst.max_error:.1e} of rms at most, {worst.allowed:.0e} allowed"

    def to_dict(self) -> dict:
        """Returns the answer for the JSON document."""
        return {
            "passed": self.passed,
            "judged_by": "outputs" if self.audit is None else "operations",
            "comparisons": [asdict(c) | {"passed": c.passed} for c in self.comparisons],
            "wrong_operations": [asdict(o) for o in self.wrong_operations],
        }


@dataclass(frozen=True)
class TwinNetwork:
    """The network that TensorRT parses from the float32 twin of a bundle.

    Attributes:
        bundle: a bundle whose cache is updated in place.
        weights: weights rounded to the bundle's dtype.
        seed: seed for the random inputs.
        parser: the TensorRT whose parser is used.
        scratch: folder for twins; it must exist as long as the network is used.
    """

    bundle: Bundle
    weights: WeightSource
    seed: int
    parser: str
    scratch: Path

    def open(self) -> Stepper:
        """Opens the network; one stepper runs all parts."""
        dtype = self.bundle.manifest.dtype

        def open_part(part: Bundle) -> InterpreterStepper:
            contract = part.manifest.contract.in_dtype(dtype, "fp32")
            return InterpreterStepper(twin_path(part, self.scratch), contract, choose_backend(self.parser))

        return open_parts(self.bundle, open_part, self.bundle.manifest.contract.in_dtype(dtype, "fp32"))

    def meaning(self, reference: Recording, record: Callable[[Stepper], Recording]) -> NetworkMeaning:
        """Compares the network with the definition.

        Args:
            reference: recording of the definition in float32.
            record: records a stepper in the same scenarios.
        """
        unit = self.bundle.manifest.unit
        stepper = self.open()
        try:
            recording = record(stepper)
        finally:
            stepper.close()
        comparisons = tuple(compare(reference, recording, self._allowed()))
        finite = all(np.isfinite(c.max_error) for c in comparisons)
        if all(c.passed for c in comparisons) or not finite or not unit.has_cache or self.bundle.manifest.parts:
            return NetworkMeaning(comparisons)
        return NetworkMeaning(comparisons, self._audit())

    def _allowed(self) -> Tolerance:
        fixed = tolerance(("eager", "interpreter"), self.bundle.manifest.unit, "fp32")
        return replace(fixed, allowed=LARGEST_OF_PARTS) if self.bundle.manifest.parts else fixed

    def _audit(self) -> BackendAudit:
        reference = make_reference(self.bundle.manifest.spec.in_dtype("fp32"), self.weights, self.seed)
        stepper = self.open()
        assert isinstance(stepper, InterpreterStepper), "a bundle in parts has no audit"
        observer = StepperObserver(stepper, reference.names)
        try:
            return audit(reference, observer)
        finally:
            observer.close()
