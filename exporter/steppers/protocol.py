"""What every stepper offers: run a step on feeds and cache rows, and own the memory its cache lives in.

A stepper trusts its caller: feeds obey the contract and fit the cache. The runtime checks that before each step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import numpy as np

from exporter.spec.dtypes import numpy_dtype
from exporter.spec.tensors import BATCH, CAPACITY, Contract


class Cache(ABC):
    """Past and present of every layer, one buffer each: [rows, K, C, D] in the bundle's dtype, zeroed when made.

    Attributes:
        n_rows: sequences it holds.
        capacity: tokens each row can hold.
    """

    n_rows: int
    capacity: int

    @abstractmethod
    def zero(self, row: int, start: int, stop: int) -> None:
        """Zeroes tokens start … stop − 1 of one row in every layer."""

    def free(self) -> None:  # noqa: B027 - not abstract on purpose: host memory frees itself
        """Gives the memory back; the cache cannot be used afterwards."""

    @abstractmethod
    def copy(self, source: int, destination: int, length: int) -> None:
        """Copies the first `length` tokens of one row to another, in every layer."""

    @abstractmethod
    def read(self, row: int, length: int) -> list[np.ndarray]:
        """A copy of the first `length` tokens of one row: key, value of each layer, [K, length, D] each."""

    @abstractmethod
    def write(self, row: int, tensors: list[np.ndarray]) -> None:
        """Puts back what `read` gave, at the row's start."""


class HostCache(Cache):
    """A cache in the host's memory.

    Attributes:
        arrays: key and value of each layer, [rows, K, C, D].
    """

    def __init__(self, contract: Contract, n_rows: int, capacity: int) -> None:
        self.n_rows, self.capacity = n_rows, capacity
        self.arrays = [
            np.zeros(spec.shape({BATCH: n_rows, CAPACITY: capacity}), numpy_dtype(spec.dtype))
            for spec in contract.cache_specs
        ]

    def zero(self, row: int, start: int, stop: int) -> None:
        for array in self.arrays:
            array[row, :, start:stop] = 0

    def copy(self, source: int, destination: int, length: int) -> None:
        for array in self.arrays:
            array[destination, :, :length] = array[source, :, :length]

    def read(self, row: int, length: int) -> list[np.ndarray]:
        return [array[row, :, :length].copy() for array in self.arrays]

    def write(self, row: int, tensors: list[np.ndarray]) -> None:
        for array, tensor in zip(self.arrays, tensors, strict=True):
            array[row, :, : tensor.shape[1]] = tensor


class OnDevice(ABC):
    """What a stepper adds that can take inputs from device memory and leave outputs there. Tensors and caches are its own kind."""

    @abstractmethod
    def import_tensor(self, x: Any) -> Any:
        """Takes another library's tensor by DLPack, ordered after what its producer has queued; nothing is copied."""

    @abstractmethod
    def to_host(self, tensor: Any) -> np.ndarray:
        """A copy in host memory."""

    @abstractmethod
    def run_on_device(self, feeds: Mapping[str, Any], cache: Any, first_row: int = 0) -> dict[str, Any]:
        """As `Stepper.run`, with a first input that may lie on the device and outputs that stay there, in memory of their own."""


OwnCache = TypeVar("OwnCache", bound=Cache)


class Stepper(ABC, Generic[OwnCache]):
    """Runs steps of one graph, over caches of its own kind.

    Attributes:
        backend: "eager", "onnxruntime", "tensorrt" or "interpreter".
        description: backend, version and device in words, for reports.
        contract: inputs and outputs of the graph.
    """

    backend: str
    description: str
    contract: Contract

    @abstractmethod
    def new_cache(self, n_rows: int, capacity: int) -> OwnCache:
        """A zeroed cache in the memory this stepper computes in."""

    @abstractmethod
    def run(
        self, feeds: Mapping[str, np.ndarray], cache: OwnCache | None = None, first_row: int = 0
    ) -> dict[str, np.ndarray]:
        """Runs one step and returns the outputs by name, cache outputs left out.

        Args:
            feeds: every input of the contract except past tensors, by name; their batch is B.
            cache: updated in place, rows first_row … first_row + B − 1; None for a component.
            first_row: the first cache row that takes part.
        """

    def pass_on(self, feeds: Mapping[str, Any], cache: OwnCache, first_row: int = 0) -> Any:
        """Runs a step of a part that others follow: returns its hidden states in the form that the next part's stepper, one of
        the same kind, takes as its `hidden_states` without a copy."""
        return self.run(feeds, cache, first_row)["hidden_states_out"]

    def close(self) -> None:
        """Frees what the stepper holds; it cannot be used afterwards."""
