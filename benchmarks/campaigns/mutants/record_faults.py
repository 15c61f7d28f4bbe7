"""Faults of engine records, and of profiles that a user gives: every value changed, dropped or contradicted."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

# What a record says for people, and what the build was asked for. Nothing decides by it while the version is the same.
DESCRIPTIVE = {"portability", "build_seconds", "peak_memory_bytes", "options"}
KINDS = ("min", "opt", "max")
Path = tuple[Any, ...]


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


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(inner, (*path, key))
    else:
        yield path, value


def _keys(value: Any, path: Path = ()) -> Iterator[Path]:
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


def _with(record: dict, path: Path, value: Any) -> dict:
    changed = copy.deepcopy(record)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


def _without(record: dict, path: Path) -> dict:
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
