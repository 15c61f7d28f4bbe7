"""Faults of the stored weights: wrong values, orders and layouts; wrong integers, scales, zero points and tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from benchmarks.campaigns.mutants.drafts import Draft, Mutation
from exporter.spec.parameters import ROPE_TABLES

Change = Callable[[np.ndarray], np.ndarray]  # takes a float64 copy of a tensor and returns its new values


def weight_faults(draft: Draft) -> Iterator[Mutation]:
    """Yields the faults of every stored tensor."""
    for name, tensor in draft.stored.items():
        shape, role = tuple(tensor.dims), name.rpartition(".")[2]
        if role == "integers":
            yield from _integer_faults(draft, name)
        elif role == "zero_points":
            yield from _zero_point_faults(name)
        elif role == "scales":
            yield from _floats(name, _SCALES)
        elif name in ROPE_TABLES:
            yield from _floats(name, _TABLES)
        elif len(shape) == 1:
            yield from _floats(name, _VECTORS)
        elif len(shape) == 2:
            square = shape[0] == shape[1] and name != "embedding.weight"
            yield from _floats(name, _MATRICES | ({"one weight transposed": np.transpose} if square else {}))


def _floats(name: str, changes: dict[str, Change]) -> Iterator[Mutation]:
    for kind, change in changes.items():
        yield Mutation(kind, name, partial(_change, name=name, change=change))


def _change(draft: Draft, name: str, change: Change) -> None:
    array = draft.array(name)
    array[:] = change(array.astype(np.float64)).astype(array.dtype)


def _times(factor: float) -> Change:
    return lambda x: x * factor


def _with(place: tuple | int | slice, factor: float) -> Change:
    """Multiplies some elements."""

    def change(x: np.ndarray) -> np.ndarray:
        x[place] *= factor
        return x

    return change


def _exchanged(first: int, second: int, axis: int) -> Change:
    def change(x: np.ndarray) -> np.ndarray:
        moved = np.moveaxis(x, axis, 0)
        moved[[first, second]] = moved[[second, first]]
        return x

    return change


def _halves_exchanged(x: np.ndarray) -> np.ndarray:
    """Exchanges the halves of the outputs: gate and up, the heads of attention, or the halves of a vector."""
    return np.roll(x, x.shape[-1] // 2, axis=-1)


def _last_output_zero(x: np.ndarray) -> np.ndarray:
    x[..., -1] = 0
    return x


def _in_half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float64)


def _half_split_rows(x: np.ndarray) -> np.ndarray:
    """Orders the first 16 outputs as Hugging Face does: the features of a head 0, 2, 4, … and then 1, 3, 5, …"""
    x[..., :16] = np.concatenate([x[..., :16:2], x[..., 1:16:2]], axis=-1)
    return x


_MATRICES: dict[str, Change] = {
    "a weight × 1.01": _times(1.01),
    "a weight negated": _times(-1.0),
    "one output × 1.01": _with((..., slice(0, 1)), 1.01),
    "one output negated": _with((..., slice(2, 3)), -1.0),
    "one input left out": _with((slice(3, 4),), 0.0),
    "the last output left out": _last_output_zero,
    "outputs moved by one": partial(np.roll, shift=1, axis=-1),
    "inputs moved by one": partial(np.roll, shift=1, axis=0),
    "two outputs exchanged": _exchanged(0, 1, -1),
    "two inputs exchanged": _exchanged(4, 9, 0),
    "halves exchanged": _halves_exchanged,
    "a head in the other order": _half_split_rows,
}
_VECTORS: dict[str, Change] = {
    "a norm's weight dropped": np.ones_like,
    "a norm's weight × 1.01": _times(1.01),
    "one element × 1.01": _with(0, 1.01),
    "one element zero": _with(5, 0.0),
    "a norm's weight reversed": np.flip,
    "a norm's weight moved by one": partial(np.roll, shift=1),
}
_TABLES: dict[str, Change] = {
    "a table off by one": partial(np.roll, shift=1, axis=0),
    "a table in half": _in_half,
    "a table × 1.01": _times(1.01),
    "a table's pairs moved by one": partial(np.roll, shift=1, axis=1),
    "two rows of a table exchanged": _exchanged(20, 21, 0),
    "two late rows of a table exchanged": _exchanged(-9, -8, 0),
    "one element of a table negated": _with((37, 0), -1.0),
    "a table that ends early": _with((slice(-16, None),), 0.0),
}
_SCALES: dict[str, Change] = {
    "scales × 1.01": _times(1.01),
    "scales of two blocks exchanged": partial(np.roll, shift=1, axis=0),
    "scales of two outputs exchanged": _exchanged(0, 1, -1),
    "scales moved by one output": partial(np.roll, shift=1, axis=-1),
    "one scale doubled": _with((0, 0), 2.0),
    "scales of one block equal": lambda x: np.broadcast_to(x[:, :1], x.shape),
}


# --- integers ---------------------------------------------------------------------------------------------------------


def _integer_faults(draft: Draft, name: str) -> Iterator[Mutation]:
    width = draft.stored[name].dims[1]
    is_packed = len(draft.raw(name)) * 2 == np.prod(draft.stored[name].dims)
    row = width // 2 if is_packed else width  # bytes of one input
    changes: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "integers moved by one": partial(np.roll, shift=1),
        "integers moved by one input": partial(np.roll, shift=row),
        "the top bit flipped": lambda raw: raw ^ (0x88 if is_packed else 0x80),
        "the lowest bit dropped": lambda raw: raw & (0xEE if is_packed else 0xFE),
        "an input left out": lambda raw: np.where(np.arange(len(raw)) // row == 3, 0, raw),
    }
    if is_packed:
        changes["nibbles exchanged"] = lambda raw: (raw >> 4) | (raw << 4)
    for kind, change in changes.items():
        yield Mutation(f"integers: {kind}", name, partial(_change_raw, name=name, change=change))


def _zero_point_faults(name: str) -> Iterator[Mutation]:
    changes: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "plus one": lambda raw: raw + 1,
        "of the middle": lambda raw: np.full_like(raw, 0x88),
        "of 0": np.zeros_like,
        "moved by one": partial(np.roll, shift=1),
    }
    for kind, change in changes.items():
        yield Mutation(f"zero points {kind}", name, partial(_change_raw, name=name, change=change))


def _change_raw(draft: Draft, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    raw = draft.raw(name)
    raw[:] = change(raw.copy()).astype(np.uint8)
