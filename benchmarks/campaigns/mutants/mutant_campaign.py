"""Chooses the mutants of a run from a seed, tries them in child processes, and counts what became of them."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.campaigns.children import run_in_child
from benchmarks.campaigns.mutants.good_units import GOOD_UNITS, GoodUnit, RealUnit, real_units
from benchmarks.campaigns.mutants.trials_of_graphs import GraphTrials, Outcome, caught_by_export
from benchmarks.campaigns.mutants.trials_of_networks import NetworkTrials
from benchmarks.campaigns.mutants.trials_of_records import ProfileTrials, RecordTrials
from benchmarks.campaigns.mutants.twin_oracle import LARGEST_EQUAL_CHANGE
from exporter.bundle.bundle import Bundle

NETWORKS = (  # one graph each, and no zero points, which TensorRT refuses
    *("block fp32", "block fp16", "block bf16", "stack fp32", "model fp16", "block fp16 in int8"),
    *("stack fp16 of 6 ill-conditioned layers", "attention fp16", "rms_norm fp16", "swiglu_mlp fp16"),
)
RECORDS = ("block fp16", "model fp16")
Trial = Callable[[], Outcome | None]


@dataclass(frozen=True)
class Job:
    """The trials of one good unit at one place.

    Attributes:
        unit: name of the good unit.
        good: the good unit.
        place: "graph", "network", "record" or "profile".
        per_kind: number of mutants of each kind.
        at_most: number of mutants; None for all that `per_kind` allows.
    """

    unit: str
    good: GoodUnit | RealUnit
    place: str
    per_kind: int
    at_most: int | None = None

    def trials(self, bundle: Bundle, scratch: Path, seed: int) -> list[Trial]:
        """Returns the trials, drawn from the seed, in an order of their own.

        Args:
            bundle: the good unit's bundle.
            scratch: folder for mutants.
            seed: seed of the run.
        """
        rng = random.Random(f"{seed}: {self.place} of {self.unit}")
        by_kind: dict[str, list[Trial]] = {}
        for kind, trial in self._all(bundle, scratch):
            by_kind.setdefault(kind, []).append(trial)
        drawn = [trial for found in by_kind.values() for trial in rng.sample(found, min(self.per_kind, len(found)))]
        return drawn if self.at_most is None else rng.sample(drawn, min(self.at_most, len(drawn)))

    def _all(self, bundle: Bundle, scratch: Path) -> Iterable[tuple[str, Trial]]:
        if self.place == "graph":
            graphs = GraphTrials(self.unit, self.good, bundle, scratch)
            return [(entry[2].kind, partial(graphs.run, *entry)) for entry in graphs.mutations()]
        assert isinstance(self.good, GoodUnit), "the real model is tried as a graph only"
        if self.place == "network":
            networks = NetworkTrials(self.unit, self.good, bundle, scratch)
            return [(mutation.kind, partial(networks.run, mutation)) for mutation in networks.mutations()]
        if self.place == "record":
            records = RecordTrials(self.unit, bundle, scratch / "engine")
            return [(mutation.kind, partial(records.run, mutation)) for mutation in records.mutations()]
        profiles = ProfileTrials(self.unit, bundle)
        return [(profile[0], partial(profiles.run, profile)) for profile in profiles.mutations()]


def jobs(per_kind: int, names: Iterable[str] = tuple(GOOD_UNITS), at_most: int | None = None) -> list[Job]:
    """Returns the jobs of tiny units: every graph, and for some units the network, engine records and profiles."""
    found = []
    for name in names:
        places = {"graph": True, "network": name in NETWORKS, "record": name in RECORDS, "profile": name in RECORDS}
        for place in (place for place, is_there in places.items() if is_there):
            several = per_kind if place in ("graph", "network") else 10 * per_kind  # those have few kinds
            found.append(Job(name, GOOD_UNITS[name], place, several, at_most))
    return found


def real_jobs(checkpoint: Path, at_most: int) -> list[Job]:
    """Returns the jobs of the real model, with a sample of `at_most` mutants each."""
    return [Job(name, unit, "graph", 1, at_most) for name, unit in real_units(checkpoint).items()]


def run_jobs(chosen: list[Job], seed: int, say: Callable[[str], None] = lambda line: None) -> dict:
    """Runs jobs one after the other.

    Args:
        chosen: the jobs.
        seed: seed of the choice of mutants.
        say: called with a line about each job, and one about each mutant that passed wrongly.

    Returns:
        The counts and the survivors, as in the record.
    """
    outcomes: list[Outcome] = []
    good: dict[str, Bundle] = {}
    with tempfile.TemporaryDirectory() as root:
        for number, job in enumerate(chosen):
            started, scratch = time.perf_counter(), Path(root) / str(number)
            scratch.mkdir()
            if job.unit not in good:
                good[job.unit] = job.good.export(Path(root) / f"good {len(good)}")
                if isinstance(job.good, GoodUnit):
                    caught_by, said = caught_by_export(good[job.unit], job.good)
                    assert caught_by is None, f"{job.unit}, which is good, was caught by {caught_by}: {said}"
            found = _run_job(job, good[job.unit], scratch, seed)
            outcomes += found
            for outcome in found:
                if outcome.passed_wrongly:
                    say(f"passed: {outcome.unit}, {outcome.kind}, {outcome.site}: changes {outcome.change:.1e} of rms")
            wrong = sum(outcome.passed_wrongly for outcome in found)
            took = time.perf_counter() - started
            say(f"{job.place} of {job.unit}: {len(found)} mutants, {wrong} passed wrongly, {took:.0f} s")
    return summary(outcomes, good, {job.unit: job.good for job in chosen})


def _run_job(job: Job, bundle: Bundle, scratch: Path, seed: int) -> list[Outcome]:
    """Runs the trials of a job in a child. Where the child crashes, the next one goes on after the mutant at fault."""
    results = scratch / "results.jsonl"
    results.touch()

    def work() -> None:
        done = len(results.read_text().splitlines())
        for trial in job.trials(bundle, scratch, seed)[done:]:
            outcome = trial()
            line = None if outcome is None else outcome.to_dict()
            with open(results, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    while (code := run_in_child(work)) != 0:
        crash = Outcome(job.unit, job.place, "a crash", "unknown", float("inf"), f"exit code {code}", None, "")
        with open(results, "a", encoding="utf-8") as file:
            file.write(json.dumps(crash.to_dict()) + "\n")
        if len(results.read_text().splitlines()) > 10_000:
            raise RuntimeError(f"{job.place} of {job.unit}: every child crashes, the last one with exit code {code}")
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    return [Outcome.from_dict(line) for line in lines if line is not None]


# --- counts -----------------------------------------------------------------------------------------------------------


def summary(outcomes: list[Outcome], good: dict[str, Bundle], units: dict[str, GoodUnit | RealUnit]) -> dict:
    """Returns counts by place, kind, dtype and unit, and every mutant that no check caught."""
    dtypes = {name: bundle.manifest.dtype for name, bundle in good.items()}
    survivors = [outcome for outcome in outcomes if outcome.caught_by is None]
    return {
        "mutants": len(outcomes),
        "compute something else": sum(outcome.is_other for outcome in outcomes),
        "passed wrongly": sum(outcome.passed_wrongly for outcome in outcomes),
        "caught by": dict(Counter(outcome.caught_by for outcome in outcomes if outcome.caught_by).most_common()),
        "by place": _counts(outcomes, lambda outcome: outcome.family),
        "by dtype": _counts(outcomes, lambda outcome: dtypes[outcome.unit]),
        "by unit": _counts(outcomes, lambda outcome: outcome.unit),
        "by kind": _counts(outcomes, lambda outcome: outcome.kind),
        "wrongly passed": [outcome.to_dict() for outcome in survivors if outcome.is_other],
        "equivalent survivors": [
            {**outcome.to_dict(), "reason": reason(outcome)} for outcome in survivors if not outcome.is_other
        ],
    }


def _counts(outcomes: list[Outcome], of: Callable[[Outcome], str]) -> dict[str, dict[str, int]]:
    found: dict[str, Counter] = {}
    for outcome in outcomes:
        counts = found.setdefault(of(outcome), Counter(mutants=0, other=0, caught=0, passed_wrongly=0))
        counts["mutants"] += 1
        counts["other"] += outcome.is_other
        counts["caught"] += outcome.caught_by is not None
        counts["passed_wrongly"] += outcome.passed_wrongly
    return {name: dict(counts) for name, counts in found.items()}


REASONS = {  # kind → why a mutant of that kind may compute the same
    "inputs swapped": "the operator commutes",
    "an attribute missing": "the value is the operator's default, or near it",
    "a constant changed": "the size is inferred, or the bound is beyond what a step reads",
    "eps changed": "eps is small beside the mean square of the values",
    "another value read": "both values agree where outputs are read",
    "a node removed": "the values differ only where outputs are discarded",
    "a layer removed": "the layer passes its input on, or changes only what is discarded",
    "another operator": "both operators agree on these values",
    "another operation": "both operations agree on these values",
}


def reason(outcome: Outcome) -> str:
    """Returns why a survivor is equivalent: what its kind suggests, and what the oracle measured."""
    if outcome.family in ("record", "profile"):
        return outcome.where
    measured = "no output of any scenario changes by a bit"
    if outcome.change:
        measured = (
            f"no output changes by more than {outcome.change:.1e} of rms, {LARGEST_EQUAL_CHANGE:.0e} is the limit"
        )
    suggested = REASONS.get(outcome.kind.removeprefix("network: "))
    return measured if suggested is None else f"{suggested}: {measured}"
