"""Optimization profiles: the shapes that an engine accepts. They come from axis names and limits, or from texts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from exporter.common.errors import BundleError, InputError
from exporter.spec.catalogue import LARGEST_COUNT, short
from exporter.spec.limits import DEFAULT_CACHE_CAPACITY
from exporter.spec.tensors import BATCH, SEQUENCE, TOTAL, TensorSpec

DEFAULT_MAX_BATCH = 4
DEFAULT_MAX_SEQ_LEN = 512

KNOWN_AXES = (BATCH, SEQUENCE, TOTAL)  # dynamic axes whose ranges follow from the limits

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Range:
    """Smallest, most likely and largest shape of one input. TensorRT optimizes for the most likely one."""

    min: Shape
    opt: Shape
    max: Shape

    def to_dict(self) -> dict:
        return {"min": list(self.min), "opt": list(self.opt), "max": list(self.max)}


@dataclass(frozen=True)
class Profile:
    """One profile: a name for messages, and the range of every input."""

    name: str
    ranges: dict[str, Range]

    def to_dict(self) -> dict:
        return {"name": self.name, "ranges": {name: r.to_dict() for name, r in self.ranges.items()}}


def default_profiles(
    axes: Mapping[str, Sequence[int | str]], max_batch: int, max_seq_len: int, cache_capacity: int | None
) -> list[Profile]:
    """Returns two profiles for one engine: decode (T = 1) and prefill (T = 1 … max_seq_len).

    Batch and total length are dynamic in both. A graph without a sequence axis gets one profile.

    Args:
        axes: input name → number or symbol of each axis; the capacity is already a number.
        max_batch: largest number of sequences in one step.
        max_seq_len: largest number of new tokens of a sequence in one step, without the cached ones.
        cache_capacity: largest number of tokens that a step reads. None is for a graph without a cache, which reads up
            to the larger of 2,048 and max_seq_len.

    Raises:
        InputError: a limit is below 1, max_seq_len is larger than the capacity, or the range of an axis is unknown.
    """
    for name, value in (("max_batch", max_batch), ("max_seq_len", max_seq_len), ("cache_capacity", cache_capacity)):
        if value is not None and not 1 <= value <= LARGEST_COUNT:
            raise InputError(f"profile {name}: got {short(value)}, expected 1 to {LARGEST_COUNT:,}")
    if cache_capacity is not None and max_seq_len > cache_capacity:
        expected = f"at most the cache capacity {cache_capacity}"
        raise InputError(
            f"profile max_seq_len: got {max_seq_len}, expected {expected}; lower it, or raise cache_capacity"
        )
    symbols = {axis for shape in axes.values() for axis in shape if isinstance(axis, str)}
    unknown = sorted(symbols - set(KNOWN_AXES))
    if unknown:
        expected, fix = ", ".join(KNOWN_AXES), "give min_shapes, opt_shapes and max_shapes"
        raise InputError(f"profile: got axes {unknown} of unknown range, expected some of {expected}; {fix}")
    longest = max(DEFAULT_CACHE_CAPACITY, max_seq_len) if cache_capacity is None else cache_capacity
    most_new = {"decode": 1, "prefill": max_seq_len} if SEQUENCE in symbols else {"all": 1}
    profiles = []
    for name, seq_len in most_new.items():
        likely = max(longest // 2, seq_len)  # a step reads its own tokens too
        sizes = {
            BATCH: (1, max_batch, max_batch),
            SEQUENCE: (1, seq_len, seq_len),
            TOTAL: (1, likely, longest),
        }
        profiles.append(Profile(name, _ranges(axes, sizes)))
    return profiles


def _ranges(axes: Mapping[str, Sequence[int | str]], sizes: Mapping[str, tuple[int, int, int]]) -> dict[str, Range]:
    return {
        name: Range(
            *(tuple(sizes[axis][which] if isinstance(axis, str) else axis for axis in shape) for which in range(3))
        )
        for name, shape in axes.items()
    }


def parse_shapes(text: str) -> dict[str, Shape]:
    """Reads shapes as trtexec writes them, `x:1x16,mask:1x32`, or as Polygraphy writes them, `x:[1,16],mask:[1,32]`.

    Raises:
        InputError: the text has another form, or one name twice.
    """
    shapes: dict[str, Shape] = {}
    for entry in re.split(r",(?![^\[]*\])", text):  # at commas outside of brackets
        match = re.fullmatch(r"\s*([^\s\[\];,]+):(?:(\d+(?:x\d+)*)|\[\s*(\d+(?:\s*,\s*\d+)*)\s*\])\s*", entry)
        if match is None:
            expected = "NAME:1x16 as in trtexec or NAME:[1,16] as in Polygraphy"
            raise InputError(f"shapes: got {short(entry)}, expected {expected}")
        if match[1] in shapes:
            raise InputError(f"shapes: {match[1]} is given twice in {text!r}")
        if any(len(size) > 10 for size in re.findall(r"\d+", match[2] or match[3])):
            raise InputError(f"shapes: got {short(entry)}, expected sizes below 2³¹")
        shapes[match[1]] = tuple(int(size) for size in re.findall(r"\d+", match[2] or match[3]))
    return shapes


def explicit_profiles(
    axes: Mapping[str, Sequence[int | str]], minima: Sequence[str], optima: Sequence[str], maxima: Sequence[str]
) -> list[Profile]:
    """Returns profiles from the user's own shapes: the n-th text of each list makes the n-th profile.

    Raises:
        InputError: the lists differ in length, an input is missing or unknown, min ≤ opt ≤ max is wrong, one axis has
            different sizes in two inputs, or a step has more new tokens than it reads.
    """
    if not len(minima) == len(optima) == len(maxima):
        got = f"{len(minima)} min_shapes, {len(optima)} opt_shapes and {len(maxima)} max_shapes"
        raise InputError(f"profiles: got {got}, expected as many of each")
    return [
        Profile(f"profile {index}", _explicit_ranges(axes, texts, index))
        for index, texts in enumerate(zip(minima, optima, maxima, strict=True))
    ]


def _explicit_ranges(
    axes: Mapping[str, Sequence[int | str]], texts: tuple[str, str, str], index: int
) -> dict[str, Range]:
    minima, optima, maxima = (parse_shapes(text) for text in texts)
    dynamic = {name for name, shape in axes.items() if any(isinstance(axis, str) for axis in shape)}
    for kind, shapes in (("min", minima), ("opt", optima), ("max", maxima)):
        unknown, missing = sorted(set(shapes) - set(axes)), sorted(dynamic - set(shapes))
        if unknown or missing:
            problem = f"unknown inputs {unknown}, missing inputs {missing}"
            raise InputError(f"profile {index} {kind}: {problem}; the graph has {sorted(axes)}")
    ranges = {}
    for name, shape in axes.items():
        fixed = tuple(
            axis for axis in shape if isinstance(axis, int)
        )  # the whole shape of an input that may be missing
        ranges[name] = Range(*(shapes.get(name, fixed) for shapes in (minima, optima, maxima)))
        _check_range(f"profile {index} {name}", shape, ranges[name])
    for kind in ("min", "opt", "max"):
        _check_sizes(f"profile {index} {kind}", axes, {name: getattr(r, kind) for name, r in ranges.items()})
    return ranges


def _check_sizes(subject: str, axes: Mapping[str, Sequence[int | str]], shapes: Mapping[str, Shape]) -> None:
    """Checks that every axis has one size in all inputs, and that a step reads at least its own tokens.

    TensorRT builds other profiles too, and no step can run in them.

    Raises:
        InputError: an axis has two sizes, or there are more new tokens than the step reads.
    """
    known: dict[str, tuple[int, str]] = {}  # axis → its size, and the first input that has it
    for name, shape in axes.items():
        for axis, size in zip(shape, shapes[name], strict=True):
            if not isinstance(axis, str) or not axis:  # axes without a name have nothing to do with each other
                continue
            first, owner = known.setdefault(axis, (size, name))
            if first != size:
                got = f"{first} in {owner} and {size} in {name}"
                raise InputError(f"{subject} {axis}: got {got}, expected one size; no step could run")
    if SEQUENCE in known and TOTAL in known:
        (new, writer), (read, reader) = known[SEQUENCE], known[TOTAL]
        if new > read:
            got = f"{new} new tokens in {writer} and {read} tokens to read in {reader}"
            raise InputError(
                f"{subject}: got {got}, expected at most as many new ones; a step reads its own tokens too"
            )


def _check_range(subject: str, shape: Sequence[int | str], r: Range) -> None:
    for sizes in (r.min, r.opt, r.max):
        fits = len(sizes) == len(shape)
        if not fits or any(isinstance(axis, int) and axis != size for axis, size in zip(shape, sizes, strict=True)):
            raise InputError(f"{subject}: got shape {list(sizes)}, expected {list(shape)}")
    for low, middle, high in zip(r.min, r.opt, r.max, strict=True):
        if not 1 <= low <= middle <= high <= LARGEST_COUNT:
            got = f"min {list(r.min)}, opt {list(r.opt)}, max {list(r.max)}"
            raise InputError(f"{subject}: got {got}, expected 1 ≤ min ≤ opt ≤ max < 2³¹")


def check_capacity(profiles: Sequence[Profile], axes: Mapping[str, Sequence[int | str]], cache_capacity: int) -> None:
    """Checks that no profile allows a step to read or write beyond the cache.

    Raises:
        InputError: one does; the message has the profile, its length and the capacity.
    """
    does = {TOTAL: "reads", SEQUENCE: "writes"}
    for profile in profiles:
        for name, shape in axes.items():
            for axis, most in zip(shape, profile.ranges[name].max, strict=True):
                if axis in does and most > cache_capacity:
                    problem = f"it {does[axis]} up to {most} cached tokens, the cache capacity is {cache_capacity}"
                    fix = f"lower {name} in max_shapes or raise cache_capacity"
                    raise InputError(f"{profile.name}: {problem}; {fix}")


def largest_size(axis: str, inputs: Sequence[TensorSpec], maxima: Sequence[Mapping[str, Sequence[int]]]) -> int:
    """Returns the largest size of a dynamic axis that an engine takes, in the profile that takes most.

    Args:
        axis: the symbol of the axis.
        inputs: the inputs of the graph.
        maxima: for each profile, input name → largest shape. A profile takes what all its inputs take.

    Raises:
        BundleError: a profile has no shape of an input, or a shape with another number of axes.
    """
    most = 0
    for number, shapes in enumerate(maxima):
        for spec in inputs:
            if len(shapes.get(spec.name, ())) != len(spec.axes):
                got, expected = list(shapes.get(spec.name, ())), list(spec.axes)
                raise BundleError(f"profile {number} {spec.name}: got {short(got)}, expected {expected}; build again")
        sizes = [shapes[spec.name][i] for spec in inputs for i, symbol in enumerate(spec.axes) if symbol == axis]
        most = max(most, min(sizes))
    return most
