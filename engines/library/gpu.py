"""Asks the CUDA driver which GPUs it sees. This needs no package, and works on machines without a driver."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


@dataclass(frozen=True)
class Gpu:
    """One visible GPU: its name and its compute capability, such as "9.0"."""

    name: str
    compute_capability: str


def visible_gpus() -> list[Gpu]:
    """The GPUs that this process can use; empty without a driver or a device."""
    cuda = _driver()
    if cuda is None:
        return []
    count = ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    return [_describe(cuda, index) for index in range(count.value)]


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA version that the driver supports, such as (13, 0); None without a driver."""
    cuda, version = _driver(), ctypes.c_int()
    if cuda is None or cuda.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _describe(cuda: ctypes.CDLL, index: int) -> Gpu:
    device, name, value = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    numbers = []
    for attribute in (_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR):
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        numbers.append(str(value.value))
    return Gpu(name.value.decode(), ".".join(numbers))
