"""The dtypes of graphs, under the names that the command line, numpy and ONNX give them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from exporter.common.errors import InputError


@dataclass(frozen=True)
class DType:
    """One floating-point type under its three names."""

    name: str  # on the command line and in manifests
    numpy: np.dtype
    onnx: int  # onnx.TensorProto.DataType

    @property
    def n_bytes(self) -> int:
        return self.numpy.itemsize


DTYPES = {
    "fp16": DType("fp16", np.dtype(np.float16), 10),
    "fp32": DType("fp32", np.dtype(np.float32), 1),
    "bf16": DType("bf16", np.dtype(ml_dtypes.bfloat16), 16),
}
LARGEST_HALF = 65504.0  # the largest finite value of fp16
ONNX_TYPES = {
    "int64": 7,
    "bool": 9,
    "int8": 3,
    "uint8": 2,
    "int4": 22,
    "uint4": 21,
    **{dtype.name: dtype.onnx for dtype in DTYPES.values()},
}
ONNX_NAMES = {number: name for name, number in ONNX_TYPES.items()}
_BITS = {
    "int64": 64,
    "bool": 8,
    "int8": 8,
    "uint8": 8,
    "int4": 4,
    "uint4": 4,
    **{dtype.name: 8 * dtype.n_bytes for dtype in DTYPES.values()},
}


def stored_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor in a file, by its dtype's name; two integers of 4 bits share a byte."""
    return -(-math.prod(shape) * _BITS[dtype] // 8)


def numpy_dtype(name: str) -> np.dtype:
    """Returns the numpy dtype for the dtype name of a tensor spec. "fp64" is for references only; no graph has it."""
    return DTYPES[name].numpy if name in DTYPES else np.dtype({"fp64": "float64"}.get(name, name))


def lookup_dtype(name: str) -> DType:
    """Returns the dtype with that name.

    Raises:
        InputError: no dtype has that name; the message lists the names.
    """
    if name not in DTYPES:
        raise InputError(f"dtype: got {name!r}, expected one of {', '.join(DTYPES)}")
    return DTYPES[name]
