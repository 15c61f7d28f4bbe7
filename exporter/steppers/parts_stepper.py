"""The stepper of a unit in several graphs: each part runs in turn and passes its hidden states to the next."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from exporter.bundle.bundle import Bundle
from exporter.spec.tensors import Contract
from exporter.steppers.protocol import Cache, Stepper


class PartsCache(Cache):
    """The caches of all parts as one cache, with the tensors of the first part first.

    Attributes:
        parts: the cache of each part.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts
        self.n_rows, self.capacity = parts[0].n_rows, parts[0].capacity

    def zero(self, row: int, start: int, stop: int) -> None:
        for part in self.parts:
            part.zero(row, start, stop)

    def copy(self, source: int, destination: int, length: int) -> None:
        for part in self.parts:
            part.copy(source, destination, length)

    def read(self, row: int, length: int) -> list[np.ndarray]:
        return [array for part in self.parts for array in part.read(row, length)]

    def write(self, row: int, tensors: list[np.ndarray]) -> None:
        remaining = iter(tensors)
        for part in self.parts:
            part.write(row, [tensor for _, tensor in zip(part.read(row, 0), remaining, strict=False)])

    def free(self) -> None:
        with contextlib.ExitStack() as freeing:  # where one cannot be freed, the others still are
            for part in self.parts:
                freeing.callback(part.free)


Part = TypeVar("Part", bound=Stepper)


class PartsStepper(Stepper[PartsCache], Generic[Part]):
    """Runs a unit whose graphs are consecutive parts, all on one backend.

    Attributes:
        steppers: the stepper of each part, in order.
    """

    def __init__(self, contract: Contract, steppers: Sequence[Part]) -> None:
        self.contract, self.steppers = contract, list(steppers)
        self.backend = steppers[0].backend
        self.description = f"{steppers[0].description}, in {len(self.steppers)} parts"

    def new_cache(self, n_rows: int, capacity: int) -> PartsCache:
        with contextlib.ExitStack() as made:
            caches = []
            for stepper in self.steppers:
                caches.append(stepper.new_cache(n_rows, capacity))
                made.callback(caches[-1].free)
            made.pop_all()
        return PartsCache(caches)

    def run(
        self, feeds: Mapping[str, np.ndarray], cache: PartsCache | None = None, first_row: int = 0
    ) -> dict[str, np.ndarray]:
        assert cache is not None, "a component is one graph"
        return self.steppers[-1].run(self._advance(feeds, cache, first_row), cache.parts[-1], first_row)

    def _advance(self, feeds: Mapping[str, Any], cache: PartsCache, first_row: int) -> dict[str, Any]:
        """Runs all parts but the last, and returns the feeds of the last."""
        feeds = dict(feeds)
        for stepper, part in zip(self.steppers[:-1], cache.parts, strict=False):
            feeds["hidden_states"] = stepper.pass_on(feeds, part, first_row)
        return feeds

    def close(self) -> None:
        with contextlib.ExitStack() as closing:
            for stepper in self.steppers:
                closing.callback(stepper.close)


def open_parts(
    bundle: Bundle, open_part: Callable[[Bundle], Part], contract: Contract | None = None
) -> Part | PartsStepper[Part]:
    """Opens a bundle of one graph or several; when a part fails to open, the parts before it are closed.

    Args:
        bundle: the whole bundle.
        open_part: opens one graph, given its own bundle.
        contract: contract of all parts as one; None takes the bundle's.
    """
    if not bundle.manifest.parts:
        return open_part(bundle)
    with contextlib.ExitStack() as opened:
        steppers: list[Part] = []
        for part in bundle.parts:
            steppers.append(open_part(part))
            opened.callback(steppers[-1].close)
        opened.pop_all()
    return PartsStepper(contract or bundle.manifest.contract, steppers)
