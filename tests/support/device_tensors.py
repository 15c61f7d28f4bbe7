"""Tensors of another library in the memory of the CUDA double."""

from __future__ import annotations

import numpy as np

from engines.library.dlpack import CUDA, DeviceTensor
from tests.support.doubles.cuda_double import CudaDouble


class Foreign:
    """A tensor of another library, which has only the methods of DLPack."""

    def __init__(self, inner, device=None):
        self._inner, self._device = inner, device

    def __dlpack_device__(self):
        return self._device or self._inner.__dlpack_device__()

    def __dlpack__(self, *, stream=None):
        return self._inner.__dlpack__()


def on_device(cuda: CudaDouble, array: np.ndarray) -> Foreign:
    """The array in the double's device memory, as a tensor of another library."""
    address = cuda.allocate(array.nbytes)
    cuda.view(address, array.nbytes)[:] = np.frombuffer(array.tobytes(), np.uint8)
    return Foreign(DeviceTensor(address, array.shape, array.dtype, None, CUDA))


def from_device(cuda: CudaDouble, tensor: DeviceTensor) -> np.ndarray:
    return cuda.view(tensor.address, tensor.nbytes).view(tensor.dtype).reshape(tensor.shape).copy()
