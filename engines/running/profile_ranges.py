"""The shapes that the optimization profiles of an engine take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from exporter.common.errors import InputError
from exporter.spec.tensors import TensorSpec

Shape = tuple[int, ...]


class ProfileRanges:
    """Smallest, likely and largest shape of each input, for each profile of an engine."""

    def __init__(self, engine: Any, inputs: Sequence[TensorSpec]) -> None:
        self._ranges = [
            {
                spec.name: [tuple(shape) for shape in engine.get_tensor_profile_shape(spec.name, index)]
                for spec in inputs
            }
            for index in range(engine.num_optimization_profiles)
        ]

    def __len__(self) -> int:
        return len(self._ranges)

    @property
    def maxima(self) -> list[dict[str, Shape]]:
        """The largest shape of each input, for each profile."""
        return [{name: shapes[2] for name, shapes in ranges.items()} for ranges in self._ranges]

    def first(self, shapes: Mapping[str, Shape]) -> int:
        """The first profile that takes these shapes. Decode comes first, because it is optimized for one token.

        Raises:
            InputError: no profile takes them; the message has the tensor, its shape and the range of each profile.
        """
        for index, ranges in enumerate(self._ranges):
            if all(_inside(shape, ranges[name]) for name, shape in shapes.items()):
                return index
        outside = (n for n, s in shapes.items() if not any(_inside(s, ranges[n]) for ranges in self._ranges))
        name = next(outside)
        allowed = " or ".join(f"{list(ranges[name][0])} to {list(ranges[name][2])}" for ranges in self._ranges)
        problem = f"got shape {list(shapes[name])}, expected {allowed}, the engine's profiles"
        raise InputError(f"{name}: {problem}; give smaller steps, or build for larger ones")

    def longest_decode(self, mask_shape: Shape) -> int | None:
        """Returns the longest mask of the first profile that takes a step of one token with this mask, or None."""
        tokens = (mask_shape[0], 1)
        for ranges in self._ranges:
            if _inside(tokens, ranges["position_ids"]) and _inside(mask_shape, ranges["attention_mask"]):
                return ranges["attention_mask"][2][1]
        return None


def _inside(shape: Shape, limits: Sequence[Shape]) -> bool:
    low, _, high = limits
    return len(shape) == len(low) and all(a <= size <= b for a, size, b in zip(low, shape, high, strict=True))
