"""Tries one mutant of an engine's record or of a profile: opening, verifying or building must refuse it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.campaigns.mutants.record_faults import (
    ProfileTexts,
    RecordMutation,
    contradiction,
    profile_faults,
    record_faults,
    texts_of,
)
from benchmarks.campaigns.mutants.trials_of_graphs import Outcome
from benchmarks.campaigns.mutants.trials_of_networks import PARSER
from engines.building.build import build_bundle
from engines.building.preparation import BuildRequest, prepare_bundle
from engines.library.backend import choose_backend
from engines.library.gpu import Gpu
from engines.library.usable_engines import check_engine, check_lineage, check_runnable
from engines.network.source import Axes, input_axes, load_source
from exporter.bundle.bundle import ENGINES_FILE, Bundle
from exporter.bundle.engine_records import read_records
from exporter.common.errors import CheckFailed, InputError
from exporter.graph.fixed_capacity import fix_capacity
from exporter.validation.verify import verify_bundle

CAPACITY, MAX_BATCH, MAX_SEQ_LEN = 64, 2, 8
HERE = [Gpu("a GPU", "9.0")]  # the machine of the campaign has none


def fixed_axes(good: Bundle) -> Axes:
    """Returns the axes of a graph's inputs at the capacity of the campaign."""
    model = load_source(good.graph_path)
    fix_capacity(model, CAPACITY)
    return input_axes(model)


class RecordTrials:
    """The trials of the engine and the profiles of one good unit, whose graph is one.

    Attributes:
        name: name of the good unit.
        folder: folder of a copy of its bundle with an engine; each trial writes its engines.json again.
    """

    def __init__(self, name: str, good: Bundle, folder: Path) -> None:
        self.name, self.folder = name, folder
        shutil.copytree(good.folder, folder)
        build_bundle(Bundle.open(folder), choose_backend(PARSER), BuildRequest(MAX_BATCH, MAX_SEQ_LEN, CAPACITY))
        self._axes = fixed_axes(good)
        self._document = json.loads((folder / ENGINES_FILE).read_text(encoding="utf-8"))

    def mutations(self) -> Iterator[RecordMutation]:
        yield from record_faults(self._document["engines"][0])

    def run(self, mutation: RecordMutation) -> Outcome:
        changed = self._document | {"engines": [mutation.apply(self._document["engines"][0])]}
        (self.folder / ENGINES_FILE).write_text(json.dumps(changed), encoding="utf-8")
        caught_by, said = caught_by_opening(self.folder)
        found, where = self._judge(mutation, changed["engines"][0])
        return Outcome(self.name, "record", mutation.kind, mutation.site, found, where, caught_by, said[:200])

    def _judge(self, mutation: RecordMutation, changed: dict) -> tuple[float, str]:
        """Returns infinity for a change that something decides by, else 0, and why."""
        if not mutation.matters:
            return 0.0, "nothing decides by it; it is there for people"
        if mutation.kind == "record: profiles" and (shapes := texts_of(changed["profiles"])) is not None:
            found = [contradiction(self._axes, profile, CAPACITY, steps=False) for profile in shapes]
            if found == [None] * len(found):
                return 0.0, "the runtime reads the sizes from the engine itself, and these contradict nothing"
        return float("inf"), "something decides by it"


def caught_by_opening(folder: Path) -> tuple[str | None, str]:
    """Returns what refuses a bundle with an engine, and the first line of what it says."""
    backend = choose_backend(PARSER)
    try:
        bundle = Bundle.open(folder)
        for record in read_records(folder):
            check_engine(folder, record, verify="full")
            check_lineage(bundle, record)
            check_runnable(record, backend.name, backend.version, HERE)
            record.decode_capacity()
    except InputError as error:
        return "opening an engine", str(error).partition("\n")[0]
    try:
        verify_bundle(folder).check()
    except (InputError, CheckFailed) as error:
        return "verify", str(error).partition("\n")[0]
    return None, ""


@dataclass
class ProfileTrials:
    """The trials of the profiles of one good unit, whose graph is one.

    Attributes:
        name: name of the good unit.
        good: its bundle.
    """

    name: str
    good: Bundle

    def __post_init__(self) -> None:
        self._axes = fixed_axes(self.good)

    def mutations(self) -> Iterator[tuple[str, str, ProfileTexts]]:
        sizes = ((1, 1, 1), (MAX_BATCH, 4, 16), (MAX_BATCH, MAX_SEQ_LEN, CAPACITY))
        names = ("batch_size", "sequence_length", "total_sequence_length")
        shapes = [
            {
                name: tuple(known[axis] if isinstance(axis, str) else axis for axis in axes)
                for name, axes in self._axes.items()
            }
            for known in (dict(zip(names, size, strict=True)) for size in sizes)
        ]
        good = ProfileTexts(*shapes)
        assert contradiction(self._axes, good, CAPACITY) is None, "the good profile is good"
        yield from profile_faults(good)

    def run(self, mutation: tuple[str, str, ProfileTexts]) -> Outcome:
        kind, site, profile = mutation
        problem = contradiction(self._axes, profile, CAPACITY)
        caught_by, said = None, ""
        try:
            prepare_bundle(self.good, choose_backend(PARSER), BuildRequest(cache_capacity=CAPACITY, **profile.texts()))
        except InputError as error:
            caught_by, said = "build", str(error).partition("\n")[0]
        found = 0.0 if problem is None else float("inf")
        return Outcome(self.name, "profile", kind, site, found, problem or "nothing contradicts", caught_by, said[:200])
