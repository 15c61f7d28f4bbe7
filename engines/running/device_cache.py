"""The KV cache in device memory."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence

import numpy as np

from engines.library.cuda import Cuda
from exporter.spec.dtypes import numpy_dtype
from exporter.spec.tensors import BATCH, CAPACITY, TensorSpec
from exporter.steppers.protocol import Cache


class DeviceCache(Cache):
    """A cache in device memory. Each cache tensor [rows, K, C, D] has one buffer, aligned to 256 bytes.

    Attributes:
        n_rows: number of rows.
        capacity: tokens that a row has space for.
        addresses: address of each cache tensor, in the order of the contract.
        serial: a number that no other cache of this process has.
    """

    _serials = itertools.count()

    def __init__(self, cuda: Cuda, specs: Sequence[TensorSpec], n_rows: int, capacity: int) -> None:
        self.n_rows, self.capacity = n_rows, capacity
        self._cuda, self._specs = cuda, specs
        self.serial = next(self._serials)
        self.addresses: list[int] = []
        cuda.use_device()
        try:
            for spec in specs:
                self.addresses.append(cuda.allocate(n_rows * self._row_bytes(spec)))
        except BaseException:
            self.free()
            raise

    def _row_shape(self, spec: TensorSpec) -> tuple[int, ...]:
        return spec.shape({BATCH: self.n_rows, CAPACITY: self.capacity})[1:]

    def _token_bytes(self, spec: TensorSpec) -> int:
        return self._row_shape(spec)[2] * numpy_dtype(spec.dtype).itemsize

    def _row_bytes(self, spec: TensorSpec) -> int:
        return math.prod(self._row_shape(spec)) * numpy_dtype(spec.dtype).itemsize

    def row_addresses(self, row: int) -> list[int]:
        """Returns the address of a row in each cache tensor. A step binds the address of its first row."""
        tensors = zip(self.addresses, self._specs, strict=True)
        return [address + row * self._row_bytes(spec) for address, spec in tensors]

    def zero(self, row: int, start: int, stop: int) -> None:
        if stop <= start:
            return
        self._cuda.use_device()
        for address, spec in zip(self.row_addresses(row), self._specs, strict=True):
            token, n_heads = self._token_bytes(spec), self._row_shape(spec)[0]
            self._cuda.zero(address + start * token, self.capacity * token, (stop - start) * token, n_heads)
        self._cuda.synchronize()

    def copy(self, source: int, destination: int, length: int) -> None:
        if length == 0:
            return
        self._cuda.use_device()
        for to, at, spec in zip(self.row_addresses(destination), self.row_addresses(source), self._specs, strict=True):
            token = self._token_bytes(spec)
            self._cuda.copy(to, at, self.capacity * token, length * token, self._row_shape(spec)[0])
        self._cuda.synchronize()

    def read(self, row: int, length: int) -> list[np.ndarray]:
        self._cuda.use_device()
        whole = [np.empty(self._row_shape(spec), numpy_dtype(spec.dtype)) for spec in self._specs]
        for array, address in zip(whole, self.row_addresses(row), strict=True):
            self._cuda.download(array, address)
        self._cuda.synchronize()
        return [np.ascontiguousarray(array[:, :length]) for array in whole]

    def write(self, row: int, tensors: list[np.ndarray]) -> None:
        whole = self.read(row, self.capacity)
        for array, tensor, address in zip(whole, tensors, self.row_addresses(row), strict=True):
            array[:, : tensor.shape[1]] = tensor
            self._cuda.upload(address, array)
        self._cuda.synchronize()

    def free(self) -> None:
        self._cuda.use_device()
        free_all(self._cuda, self.addresses)


def free_all(cuda: Cuda, addresses: list[int]) -> None:
    """Frees all buffers of a list and empties it, also where one of them raises."""
    with contextlib.ExitStack() as freeing:
        while addresses:
            freeing.callback(cuda.free, addresses.pop())
