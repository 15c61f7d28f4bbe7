"""Which GPUs the CUDA driver sees, asked of the driver itself: no package is needed, and none is loaded where there is no driver."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


@dataclass(frozen=True)
class Gpu:
    """One visible GPU: its name and compute capability, such as "9.0"."""

    name: str
    compute_capability: str


def visible_gpus() -> list[Gpu]:
    """The GPUs that this process can use; empty without a driver or a device."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    return [_describe(cuda, index) for index in range(count.value)]


def _describe(cuda: ctypes.CDLL, index: int) -> Gpu:
    device, name, value = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    numbers = []
    for attribute in (_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR):
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        numbers.append(str(value.value))
    return Gpu(name.value.decode(), ".".join(numbers))
