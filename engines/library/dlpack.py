"""Shares device tensors with other libraries through DLPack. Hidden states and logits stay on the device.

The structs have the layout of the DLPack specification, version 0.8 (`DLManagedTensor`). Every `from_dlpack` reads it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from exporter.common.errors import InputError

CPU, CUDA = 1, 2  # DLDeviceType
_CODES = {"i": 0, "u": 1, "f": 2}  # numpy's kind → DLDataTypeCode; bfloat16 has a code of its own
_BFLOAT = 4
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_NAME, _USED_NAME = b"dltensor", b"used_dltensor"


class _Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("index", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("n_axes", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_DLManagedTensor))
_DLManagedTensor._fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]

_api = ctypes.pythonapi
_api.PyCapsule_New.restype = ctypes.py_object
_api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
_api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_api.PyCapsule_SetName.restype = ctypes.c_int
_api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]

_exported: dict[int, tuple] = {}  # address of an exported struct → what must live until its consumer is done


class _Memory:
    """Calls `release` once, when the last reference to the memory is gone."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release

    def __del__(self) -> None:
        self._release()


class DeviceTensor:
    """A contiguous tensor in device memory; a consumer takes it with `from_dlpack(tensor)`.

    Attributes:
        address: address of the first element.
        shape: size of each axis.
        dtype: numpy dtype of the elements.
    """

    def __init__(self, address: int, shape: tuple[int, ...], dtype: np.dtype, memory: Any, device: int = CUDA) -> None:
        self.address, self.shape, self.dtype = address, tuple(shape), np.dtype(dtype)
        self._memory, self._device = memory, device

    @classmethod
    def owning(cls, address: int, shape: tuple[int, ...], dtype: np.dtype, release: Callable[[], None]) -> DeviceTensor:
        """Returns a tensor that calls `release` when the tensor, its parts and its consumers are gone."""
        return cls(address, shape, dtype, _Memory(release))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def part(self, index: int, length: int | None = None) -> DeviceTensor:
        """Returns element `index` of the first axis, cut to `length` along the next axis.

        The part is contiguous and shares the memory of the tensor.
        """
        stride = int(np.prod(self.shape[1:])) * self.dtype.itemsize
        shape = self.shape[1:] if length is None else (length, *self.shape[2:])
        return DeviceTensor(self.address + index * stride, shape, self.dtype, self._memory, self._device)

    def elements(self, start: int, stop: int) -> DeviceTensor:
        """Returns elements start … stop − 1 of the first axis. They share the memory of the tensor."""
        stride = int(np.prod(self.shape[1:])) * self.dtype.itemsize
        shape = (min(stop, self.shape[0]) - start, *self.shape[1:])
        return DeviceTensor(self.address + start * stride, shape, self.dtype, self._memory, self._device)

    def whole(self, *axes: int) -> DeviceTensor:
        """Returns the tensor with shape `axes` that begins at the same address. This tensor is the first part of it."""
        return DeviceTensor(self.address, axes, self.dtype, self._memory, self._device)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device, 0

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        """Returns a capsule for any consumer. The data are ready, because a session waits for the end of its step."""
        shape = (ctypes.c_int64 * self.ndim)(*self.shape)
        code = _BFLOAT if self.dtype == _BFLOAT16 else _CODES[self.dtype.kind]
        device, dtype = _Device(self._device, 0), _DataType(code, self.dtype.itemsize * 8, 1)
        managed = _DLManagedTensor(_DLTensor(self.address, device, self.ndim, dtype, shape, None, 0), None, _delete)
        _exported[ctypes.addressof(managed)] = (managed, shape, self._memory)
        return _api.PyCapsule_New(ctypes.addressof(managed), _NAME, None)


@dataclass(frozen=True)
class DeviceRows:
    """Sequences `[T, E]` on the device. A step copies them into one batch `[B, width, E]`, padded on the right."""

    rows: list[DeviceTensor]
    width: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), self.width, *self.rows[0].shape[1:])


@_Deleter
def _delete(managed: Any) -> None:
    _exported.pop(ctypes.addressof(managed.contents), None)


def is_device_tensor(x: Any) -> bool:
    """Whether an object is a tensor in CUDA memory that supports DLPack."""
    device = getattr(x, "__dlpack_device__", None)
    return device is not None and int(device()[0]) == CUDA


def import_tensor(x: Any, stream: int, device: int = 0) -> DeviceTensor:
    """Takes a CUDA tensor from another library without a copy. `stream` waits for what the producer has queued.

    Args:
        x: the tensor.
        stream: handle of the stream that reads it.
        device: index of the device that reads it.

    Raises:
        InputError: the tensor is on another device, it is not contiguous, or no graph takes its dtype.
    """
    if isinstance(x, DeviceTensor):
        return x
    place = int(x.__dlpack_device__()[1])
    if place != device:
        raise InputError(
            f"device tensor: got one on CUDA device {place}, expected one on device {device}, where the engine is; "
            "copy it there"
        )
    capsule = x.__dlpack__(stream=stream)
    managed = _DLManagedTensor.from_address(_api.PyCapsule_GetPointer(capsule, _NAME))
    _api.PyCapsule_SetName(capsule, _USED_NAME)
    memory = _Memory(lambda: managed.deleter(ctypes.byref(managed)) if managed.deleter else None)
    tensor = managed.tensor
    shape = tuple(tensor.shape[axis] for axis in range(tensor.n_axes))
    if tensor.strides:
        for axis, size in enumerate(shape):
            if size > 1 and tensor.strides[axis] != int(np.prod(shape[axis + 1 :])):
                problem = f"got shape {list(shape)} with gaps between its elements"
                raise InputError(f"device tensor: {problem}, expected a contiguous one")
    address = (tensor.data or 0) + tensor.byte_offset
    return DeviceTensor(address, shape, _numpy_dtype(tensor.dtype), memory, tensor.device.kind)


def _numpy_dtype(dtype: _DataType) -> np.dtype:
    if (dtype.code, dtype.bits, dtype.lanes) == (_BFLOAT, 16, 1):
        return _BFLOAT16
    kinds = {code: kind for kind, code in _CODES.items()}
    if dtype.lanes != 1 or dtype.code not in kinds or dtype.bits % 8:
        got = f"DLPack type code {dtype.code} with {dtype.bits} bits"
        raise InputError(f"device tensor: got {got}, expected integers or floating point")
    return np.dtype(f"{kinds[dtype.code]}{dtype.bits // 8}")
