"""Changes engine records and profiles, one value at a time: opening, verifying or building must refuse them."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

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

# What a record says for people, and what the build was asked for. Nothing decides by it while the version is the same.
DESCRIPTIVE = {"portability", "build_seconds", "peak_memory_bytes", "options"}
KINDS = ("min", "opt", "max")
Place = tuple[Any, ...]


@dataclass(frozen=True)
class RecordMutation:
    """One change of an engine's record.

    Attributes:
        kind: the kind of fault, for counts.
        site: where it is, for reports.
        matters: whether something decides by the value.
        apply: returns the changed record.
    """

    kind: str
    site: str
    matters: bool
    apply: Callable[[dict], dict]


def record_faults(record: dict) -> Iterator[RecordMutation]:
    """Yields every change of one value of a record."""
    for path, value in _leaves(record):
        site = ".".join(map(str, path))
        matters = path[0] not in DESCRIPTIVE and path[-1] != "name"
        for other in _others(value):
            change = partial(_with, path=path, value=other)
            what = f"{site}: {json.dumps(other)[:60]} for {json.dumps(value)[:60]}"
            yield RecordMutation(f"record: {path[0]}", what, matters, change)
    for path in _keys(record):
        yield RecordMutation("record: a key missing", ".".join(map(str, path)), True, partial(_without, path=path))
    yield RecordMutation("record: a key too many", "notes", True, partial(_with, path=("notes",), value="x"))


def _leaves(value: Any, path: Place = ()) -> Iterator[tuple[Place, Any]]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(inner, (*path, key))
    else:
        yield path, value


def _keys(value: Any, path: Place = ()) -> Iterator[Place]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key)
            yield from _keys(inner, (*path, key))


def _others(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value, None]
    if isinstance(value, int | float):
        return [value + 1, value * 2, -1, str(value)]
    if value is None:
        return [0, "8.6"]
    last = "0" if value[-1:] != "0" else "1"
    return [value[:-1] + last, "", value.upper() + "X", 7]


def _with(record: dict, path: Place, value: Any) -> dict:
    changed = copy.deepcopy(record)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


def _without(record: dict, path: Place) -> dict:
    changed = copy.deepcopy(record)
    place = changed
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    return changed


# --- profiles ---------------------------------------------------------------------------------------------------------

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class ProfileTexts:
    """One profile as a user gives it: a shape for each input at min, opt and max."""

    min: Shapes
    opt: Shapes
    max: Shapes

    def texts(self) -> dict[str, tuple[str, ...]]:
        """Returns the arguments of a `BuildRequest`."""
        return {
            f"{kind}_shapes": (",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes.items()),)
            for kind, shapes in self.by_kind().items()
        }

    def by_kind(self) -> dict[str, Shapes]:
        return {kind: getattr(self, kind) for kind in KINDS}


def profile_faults(good: ProfileTexts) -> Iterator[tuple[str, str, ProfileTexts]]:
    """Yields kind, site and profile: one size changed, an input left out or added, or two shapes exchanged."""
    for kind, shapes in good.by_kind().items():
        for name, shape in shapes.items():
            for axis, size in enumerate(shape):
                for other in sorted({0, 1, size - 1, size + 1, 2 * size, 65} - {size, -1}):
                    changed = (*shape[:axis], other, *shape[axis + 1 :])
                    site = f"{kind} {name}: {list(changed)} for {list(shape)}"
                    yield "profile: a size", site, replace(good, **{kind: shapes | {name: changed}})
            rest = {key: value for key, value in shapes.items() if key != name}
            yield "profile: an input missing", f"{kind} {name}", replace(good, **{kind: rest})
            longer = shapes | {name: (*shape, 1)}
            yield "profile: an axis too many", f"{kind} {name}", replace(good, **{kind: longer})
        yield "profile: an unknown input", kind, replace(good, **{kind: shapes | {"mask": (1, 1)}})
    for first, second in (("min", "opt"), ("opt", "max"), ("min", "max")):
        swapped = {first: getattr(good, second), second: getattr(good, first)}
        yield "profile: two exchanged", f"{first} and {second}", replace(good, **swapped)


def texts_of(profiles: Any) -> list[ProfileTexts] | None:
    """Returns the profiles of a record as a user would give them; None where they are no profiles."""
    try:
        return [
            ProfileTexts(*({name: tuple(map(int, r[kind])) for name, r in profile["ranges"].items()} for kind in KINDS))
            for profile in profiles
            if not any(
                isinstance(size, str) for r in profile["ranges"].values() for shape in r.values() for size in shape
            )
        ] or None
    except (KeyError, TypeError, ValueError):
        return None


def contradiction(
    axes: Mapping[str, Sequence[int | str]], profile: ProfileTexts, capacity: int, steps: bool = True
) -> str | None:
    """Returns what contradicts itself in a profile; None where nothing does. This is the oracle of profiles.

    One symbol has one size over all inputs, a step reads what it writes and no more than the cache holds, and
    min ≤ opt ≤ max.

    Args:
        axes: the axes of each input, with a number for the capacity.
        profile: the profile.
        capacity: cache rows per sequence.
        steps: whether a step must read what it writes at min and opt; older records have profiles where it does not.
    """
    before: dict[str, int] = {}
    for kind, shapes in profile.by_kind().items():
        if set(shapes) != set(axes):
            return f"{kind}: inputs {sorted(set(shapes) ^ set(axes))}"
        sizes: dict[str, int] = {}
        for name, shape in shapes.items():
            if len(shape) != len(axes[name]):
                return f"{kind} {name}: {len(shape)} axes"
            for axis, size in zip(axes[name], shape, strict=True):
                if size < 1 or size != (axis if isinstance(axis, int) else sizes.setdefault(axis, size)):
                    return f"{kind} {name}: {axis} is {size}"
        total = sizes["total_sequence_length"]
        if total > capacity or (steps and sizes["sequence_length"] > total):
            return f"{kind}: {sizes}"
        if any(size < before.get(axis, 0) for axis, size in sizes.items()):
            return f"{kind}: {sizes} after {before}"
        before = sizes
    return None


# --- trials -----------------------------------------------------------------------------------------------------------

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
