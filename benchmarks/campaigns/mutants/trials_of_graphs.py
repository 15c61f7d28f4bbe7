"""Tries one mutant of a graph: the oracle says if it computes something else; the checks of an export must notice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.campaigns.mutants.decoder_faults import decoder_faults
from benchmarks.campaigns.mutants.drafts import Draft, Mutation, write_mutant
from benchmarks.campaigns.mutants.good_units import GoodUnit, RealUnit
from benchmarks.campaigns.mutants.operator_faults import operator_faults
from benchmarks.campaigns.mutants.twin_oracle import LARGEST_EQUAL_CHANGE, Outputs, change, twin_outputs
from benchmarks.campaigns.mutants.weight_faults import weight_faults
from exporter.bundle.bundle import Bundle
from exporter.common.errors import CheckFailed, InputError
from exporter.graph.contract_check import graph_problems
from exporter.validation.bundle_validation import check_meaning

FAMILIES = {"graph": operator_faults, "decoder": decoder_faults, "weights": weight_faults}


@dataclass(frozen=True)
class Outcome:
    """What became of one mutant.

    Attributes:
        unit: name of the good unit.
        family, kind, site: what was changed, and where.
        change: largest change of an output of the float32 twin, relative to its rms; infinite where the twin does not
            run or a value is not finite.
        where: the scenario and the tensor of that change, or why the twin does not run.
        caught_by: the check that found the mutant; None where all passed it.
        said: the first line of what the check said.
    """

    unit: str
    family: str
    kind: str
    site: str
    change: float
    where: str
    caught_by: str | None
    said: str

    @property
    def is_other(self) -> bool:
        """Whether the mutant computes something else."""
        return not self.change <= LARGEST_EQUAL_CHANGE

    @property
    def passed_wrongly(self) -> bool:
        return self.is_other and self.caught_by is None

    def to_dict(self) -> dict:
        return {
            "unit": self.unit,
            "family": self.family,
            "kind": self.kind,
            "site": self.site,
            "change": float(f"{self.change:.3g}") if self.change < float("inf") else None,
            "where": self.where,
            "caught_by": self.caught_by,
            "said": self.said,
        }

    @classmethod
    def from_dict(cls, data: dict) -> Outcome:
        return cls(**(data | {"change": float("inf") if data["change"] is None else data["change"]}))


def caught_by_export(bundle: Bundle, unit: GoodUnit | RealUnit) -> tuple[str | None, str]:
    """Returns which check of an export or of an opening finds a bundle wrong, and the first line of what it says.

    An export checks the graph's contract and validates it with the weights that it was made from. The form of the graph
    is checked whenever a bundle is opened, by `validate` too.
    """
    for part in bundle.parts:
        problems = graph_problems(part.graph_path, part.manifest.contract)
        if problems:
            return "contract", problems[0]
    try:
        meaning = check_meaning(bundle, unit.weights)
        if not meaning.passed:
            return "validation", meaning.failures[0]
        Bundle.open(bundle.folder)
    except CheckFailed as error:
        return "validation", str(error).partition("\n")[0]
    except InputError as error:
        return "refusal", str(error).partition("\n")[0]
    except Exception as error:  # a check must end in an error of its own
        return None, f"{type(error).__name__}: {error}"
    return None, ""


@dataclass
class GraphTrials:
    """The trials of one good unit.

    Attributes:
        name, unit: the good unit.
        good: its bundle.
        scratch: folder for mutants.
    """

    name: str
    unit: GoodUnit | RealUnit
    good: Bundle
    scratch: Path
    _drafts: list[Draft] = field(init=False)
    _outputs: Outputs = field(init=False)

    def __post_init__(self) -> None:
        self._drafts = [Draft.read(part) for part in self.good.parts]
        self._outputs = twin_outputs(self.good.manifest, self._drafts)

    def mutations(self) -> Iterator[tuple[str, int, Mutation]]:
        """Yields family, part and mutation, everything that can be planted into this unit."""
        for part, draft in enumerate(self._drafts):
            for family, faults in FAMILIES.items():
                yield from ((family, part, mutation) for mutation in faults(draft))

    def run(self, family: str, part: int, mutation: Mutation) -> Outcome:
        """Plants one mutation and asks the oracle and the checks."""
        draft = self._drafts[part].copy()
        mutation.apply(draft)
        drafts = [*self._drafts[:part], draft, *self._drafts[part + 1 :]]
        try:
            found, where = change(self._outputs, twin_outputs(self.good.manifest, drafts))
        except Exception as error:  # whatever a broken graph makes of onnxruntime's steppers
            found, where = float("inf"), str(error).partition("\n")[0]
        mutant = write_mutant(self.good, self.scratch / "mutant", part, draft)
        caught_by, said = caught_by_export(mutant, self.unit)
        site = mutation.site if len(self._drafts) == 1 else f"part {part + 1}: {mutation.site}"
        return Outcome(self.name, family, mutation.kind, site, found, where[:200], caught_by, said[:200])
