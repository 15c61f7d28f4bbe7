"""The interface of all steppers: a stepper runs one step on feeds and cache rows, and owns the memory of its caches.

A stepper does not check its feeds. The runtime checks before each step that they keep the contract and fit the cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from exporter.spec.dtypes import numpy_dtype
from exporter.spec.tensors import BATCH, CAPACITY, Contract


class Cache(ABC):
    """The keys and values of every layer, all zero at first.

    Past and present of a tensor share one buffer [rows, K, C, D] in the bundle's dtype.

    Attributes:
        n_rows: number of sequences.
        capacity: number of tokens that each row has space for.
    """

    n_rows: int
    capacity: int

    @abstractmethod
    def zero(self, row: int, start: int, stop: int) -> None:
        """Sets tokens start … stop − 1 of one row to zero in every layer."""

    def free(self) -> None:  # noqa: B027 - not abstract on purpose: host memory frees itself
        """Frees the memory; the cache cannot be used afterwards."""

    @abstractmethod
    def copy(self, source: int, destination: int, length: int) -> None:
        """Copies the first `length` tokens of one row to another, in every layer."""

    @abstractmethod
    def read(self, row: int, length: int) -> list[np.ndarray]:
        """Returns a copy of the first `length` tokens of one row: key and value of each layer, [K, length, D] each."""

    @abstractmethod
    def write(self, row: int, tensors: list[np.ndarray]) -> None:
        """Writes tensors that `read` returned to the start of a row."""


class HostCache(Cache):
    """A cache in the host's memory.

    Attributes:
        arrays: key and value of each layer, [rows, K, C, D] in the bundle's dtype.
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
    """A stepper that can read inputs in device memory and leave outputs there, in tensors of its own kind."""

    @abstractmethod
    def import_tensor(self, x: Any) -> Any:
        """Returns another library's tensor, by DLPack and without a copy; reads wait for its producer."""

    @abstractmethod
    def to_host(self, tensor: Any) -> np.ndarray:
        """Returns a copy in host memory."""

    @abstractmethod
    def run_on_device(self, feeds: Mapping[str, Any], cache: Any, first_row: int = 0) -> dict[str, Any]:
        """Runs one step like `Stepper.run`; the first input may be in device memory.

        Each output is in device memory of its own.
        """

    @abstractmethod
    def join(self, tensors: Sequence[Any]) -> Any:
        """Returns a new tensor on the device with the tensors one after another along their first axis."""


OwnCache = TypeVar("OwnCache", bound=Cache)


class Stepper(ABC, Generic[OwnCache]):
    """Runs steps of one graph over caches of its own kind.

    Attributes:
        backend: "eager", "onnxruntime", "tensorrt" or "interpreter".
        description: backend, version and device in words.
        contract: inputs and outputs of the graph.
        max_seq_len: the most new tokens of a sequence that one step takes; None means any number.
    """

    backend: str
    description: str
    contract: Contract
    max_seq_len: int | None = None

    @abstractmethod
    def new_cache(self, n_rows: int, capacity: int) -> OwnCache:
        """Returns a new cache, all zero, in the memory that this stepper computes in."""

    @abstractmethod
    def run(
        self, feeds: Mapping[str, np.ndarray], cache: OwnCache | None = None, first_row: int = 0
    ) -> dict[str, np.ndarray]:
        """Runs one step and returns the outputs by name, without the cache's.

        Args:
            feeds: every input of the contract except past tensors, by name; their batch is B.
            cache: the cache, whose rows first_row … first_row + B − 1 are updated in place; None for a component.
            first_row: the first cache row of the step.
        """

    def pass_on(self, feeds: Mapping[str, Any], cache: OwnCache, first_row: int = 0) -> Any:
        """Runs a step of a part that other parts follow; returns its hidden states.

        The next part's stepper is of the same kind and takes them as its `hidden_states` without a copy.
        """
        return self.run(feeds, cache, first_row)["hidden_states_out"]

    def close(self) -> None:
        """Frees everything that the stepper owns; it cannot be used afterwards."""
