"""Measures what a bundle's dtype and format cost. Nothing here decides whether the graph means what it should.

A half-precision graph rounds after every operation, and its values end at 65,504. Both are the price of the dtype, not
a fault of the graph: the errors are reported, and a user may set limits. Only two things always fail: a value that is
too large for the dtype, and a result that is not finite or not as the contract says.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor, nn

from exporter.bundle.bundle import Bundle
from exporter.bundle.tokenizer import encode, open_tokenizer
from exporter.common.errors import InputError
from exporter.measuring.agreement import Agreement, prompts
from exporter.measuring.named_values import is_float32
from exporter.model.observe import See, unseen
from exporter.spec.dtypes import LARGEST_HALF
from exporter.spec.graph_spec import GraphSpec
from exporter.spec.unit import Unit
from exporter.steppers.eager_stepper import EagerStepper
from exporter.steppers.protocol import HostCache
from exporter.validation.comparison import Comparison
from exporter.validation.cpu_graph import runs_as_twin
from exporter.validation.tolerances import VALIDATION_STAGE, Tolerance, tolerance

N_PROMPTS, N_TOKENS = 8, 12  # prompts, and tokens after each of them, on which agreement is measured
_RANDOM_PROMPT = 6  # tokens of a random prompt, for a model without a tokenizer


@dataclass(frozen=True)
class CostLimits:
    """What a user allows the dtype and the format of a whole model to cost; None limits nothing.

    Attributes:
        max_kl: largest KL divergence from the definition's next-token distribution at any position, in nats.
        min_agreement: least share of positions, 0 to 1, at which graph and definition find the same token most likely.
    """

    max_kl: float | None = None
    min_agreement: float | None = None

    def check(self, unit: Unit, by_layer: bool) -> None:
        """Checks that the limits can be applied.

        Raises:
            InputError: a limit is out of its range, or the agreement of this unit is not measured.
        """
        if self.max_kl is not None and not 0 <= self.max_kl < math.inf:
            raise InputError(f"max_kl: got {self.max_kl}, expected a number of nats from 0 on")
        if self.min_agreement is not None and not 0 <= self.min_agreement <= 1:
            raise InputError(f"min_agreement: got {self.min_agreement}, expected a share from 0 to 1")
        if self == CostLimits():
            return
        if unit.kind != "model":
            raise InputError(f"max_kl and min_agreement: got a {unit}, expected a whole model, which has tokens")
        if by_layer:
            raise InputError(
                "max_kl and min_agreement: got a validation by layer, which runs no whole model; "
                "validate as a whole or leave them out"
            )

    def failures(self, agreement: Agreement) -> list[str]:
        """Returns a sentence for each limit that the agreement does not keep."""
        lines = []
        if self.max_kl is not None and not agreement.largest_kl <= self.max_kl:
            lines.append(f"the largest KL divergence is {agreement.largest_kl:.2e} nats, {self.max_kl:g} allowed")
        if self.min_agreement is not None and not agreement.top1 >= self.min_agreement:
            lines.append(f"{agreement.top1:.1%} of tokens agree, at least {self.min_agreement:.1%} asked for")
        return lines


@dataclass
class LargestValues:
    """The largest absolute value of every named value; cast to a dtype of less range, it would overflow there.

    Attributes:
        sizes: by name. Values that are float32 in every bundle are left out.
    """

    sizes: dict[str, float] = field(default_factory=dict)

    def see(self, name: str, x: Tensor) -> Tensor:
        """Notes the size of one value and returns the value."""
        if x.is_floating_point() and not is_float32(name) and x.numel():
            low, high = x.aminmax()
            self.note(name, max(-float(low), float(high)))
        return x

    def note(self, name: str, size: float) -> None:
        """Notes the size of one value."""
        self.sizes[name] = max(self.sizes.get(name, 0.0), size)


class SizedStepper(EagerStepper):
    """The eager stepper; it notes the largest values of everything it runs.

    Attributes:
        largest: the largest values so far.
    """

    def __init__(self, spec: GraphSpec, module: nn.Module) -> None:
        super().__init__(spec, module)
        self.largest = LargestValues()

    def run(
        self, feeds: Mapping[str, np.ndarray], cache: HostCache | None = None, first_row: int = 0, see: See = unseen
    ) -> dict[str, np.ndarray]:
        outputs = super().run(feeds, cache, first_row, self.largest.see)
        for name, output in outputs.items():
            if name != "logits" and output.size:
                self.largest.note(name, float(np.abs(output).max()))
        return outputs


def usual_error(unit: Unit, dtype: str) -> Tolerance:
    """Returns the error that is usual with random weights, for a run in this dtype or what stands in for it."""
    return tolerance(("eager", "interpreter") if runs_as_twin(dtype) else VALIDATION_STAGE, unit, dtype)


@dataclass(frozen=True)
class Cost:
    """What the dtype and the format cost.

    Attributes:
        dtype: the bundle's dtype.
        candidate: what was run in the bundle's dtype, in words.
        comparisons: its outputs and cache rows compared with the definition in float32.
        usual: the error that is usual with random weights.
        largest: the largest values of the definition.
        agreement: agreement of tokens of a whole model; None for other units.
        agreement_with: what the tokens are compared with, in words.
        limits: limits that the user set.
    """

    dtype: str
    candidate: str
    comparisons: Sequence[Comparison]
    usual: Tolerance
    largest: LargestValues
    agreement: Agreement | None = None
    agreement_with: str | None = None
    limits: CostLimits = CostLimits()

    @property
    def max_error(self) -> float:
        return max(c.max_error for c in self.comparisons)

    @property
    def largest_value(self) -> tuple[str, float]:
        """The name and the size of the largest value."""
        return max(self.largest.sizes.items(), key=lambda item: item[1], default=("", 0.0))

    @property
    def failures(self) -> list[str]:
        """A sentence for everything that fails: overflow, results that are not finite, and the user's limits."""
        lines = []
        if self.dtype == "fp16":
            over = {name: size for name, size in self.largest.sizes.items() if not size <= LARGEST_HALF}
            lines += [
                f"{name} reaches {size:,.0f}, beyond the largest value of fp16, {LARGEST_HALF:,.0f}: a GPU would "
                "compute infinity there; export in bf16 or fp32"
                for name, size in over.items()
            ]
        lines += [
            f"{c.scenario}: {c.tensor} in {self.dtype} is not finite, or not of the shape and dtype of the contract"
            for c in self.comparisons
            if not np.isfinite(c.max_error)
        ]
        if self.agreement is not None:
            return lines + self.limits.failures(self.agreement)
        if self.limits != CostLimits():
            lines.append(f"agreement could not be measured: it needs more than {N_TOKENS} positions")
        return lines

    @property
    def warnings(self) -> list[str]:
        """A sentence for everything unusual that does not fail."""
        if self.usual.allowed < self.max_error < math.inf:
            return [
                f"the error in {self.dtype} is larger than is usual ({self.usual.allowed:.0e}): these weights amplify "
                "rounding; engines compare --audit shows where"
            ]
        return []

    def to_dict(self) -> dict:
        """Returns the section for report.json; numbers that are not finite are null."""
        errors: dict[str, float] = {}
        for c in self.comparisons:
            errors[c.scenario] = max(errors.get(c.scenario, 0.0), c.max_error)
        name, size = self.largest_value
        return {
            "passed": not self.failures,
            "dtype": self.dtype,
            "candidate": self.candidate,
            "max_error": _finite(self.max_error),
            "errors": {scenario: _finite(error) for scenario, error in errors.items()},
            "usual": dataclasses.asdict(self.usual),
            "largest_value": {"name": name, "value": _finite(size)},
            "headroom": _finite(LARGEST_HALF / size) if self.dtype == "fp16" and size else None,
            "agreement": None if self.agreement is None else dataclasses.asdict(self.agreement),
            "agreement_with": self.agreement_with,
            "limits": dataclasses.asdict(self.limits),
            "failures": self.failures,
            "warnings": self.warnings,
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def agreement_prompts(bundle: Bundle, seed: int) -> list[list[int]]:
    """Returns the token ids of some prompts: real text where the bundle has a tokenizer, else random ids.

    Prompts of a model whose cache grows are of one length, because such a graph has one past length.
    """
    manifest = bundle.manifest
    longest = max(1, manifest.max_positions - N_TOKENS)
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, manifest.config.vocab_size, (N_PROMPTS, min(_RANDOM_PROMPT, longest))).tolist()
    if "tokenizer.json" in manifest.files:
        tokenizer = open_tokenizer(bundle)
        encoded = [encode(tokenizer, prompt)[:longest] for prompt in prompts()[:N_PROMPTS]]
        if all(row and max(row) < manifest.config.vocab_size for row in encoded):
            rows = encoded
    if manifest.unit.cache == "growing":
        shortest = min(len(row) for row in rows)
        rows = [row[:shortest] for row in rows]
    return rows
