"""What each kind of TensorRT layer computes, in torch on the CPU. `LAYERS` at the end lists the kinds.

Each function below reads the properties of a layer and returns a function of the layer's input tensors. Values have the
dtype that the network gives them. Arithmetic on half or bfloat16 is done in float32 and rounded after each layer,
because TensorRT's kernels accumulate in float32. NVIDIA's operator documentation defines each kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engines.interpreter.reading import Unsupported, optional_dims, refuse

Compute = Callable[..., Tensor]  # takes the layer's inputs in order; a missing optional input is None

NARROW = (torch.float16, torch.bfloat16)


def widened(x: Tensor) -> Tensor:
    """Returns x in float32 where it is half or bfloat16. This is exact."""
    return x.float() if x.dtype in NARROW else x


def rounded(compute: Compute) -> Compute:
    """Makes a function compute in at least float32, and round once to the dtype of its first half or bfloat16 input."""

    def run(*inputs: Tensor) -> Tensor:
        dtype = next((x.dtype for x in inputs if x.dtype in NARROW), None)
        result = compute(*map(widened, inputs))
        return result.to(dtype) if dtype is not None and result.dtype == torch.float32 else result

    return run


# --- arithmetic ---------------------------------------------------------------------------------------------

ELEMENTWISE: dict[str, Compute] = {
    "SUM": torch.add,
    "PROD": torch.mul,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
    "SUB": torch.sub,
    "DIV": lambda a, b: torch.div(a, b) if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc"),
    "POW": torch.pow,
    "FLOOR_DIV": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "AND": torch.logical_and,
    "OR": torch.logical_or,
    "XOR": torch.logical_xor,
    "EQUAL": torch.eq,
    "GREATER": torch.gt,
    "LESS": torch.lt,
}
UNARY: dict[str, Compute] = {
    "EXP": torch.exp,
    "LOG": torch.log,
    "SQRT": torch.sqrt,
    "RECIP": torch.reciprocal,
    "ABS": torch.abs,
    "NEG": torch.neg,
    "SIN": torch.sin,
    "COS": torch.cos,
    "NOT": torch.logical_not,
    "CEIL": torch.ceil,
    "FLOOR": torch.floor,
    "SIGN": torch.sign,
    "ERF": torch.erf,
}
REDUCE: dict[str, Callable[[Tensor, list[int], bool], Tensor]] = {
    "SUM": lambda x, axes, keep: x.sum(axes, keepdim=keep),
    "AVG": lambda x, axes, keep: x.mean(axes, keepdim=keep),
    "MAX": lambda x, axes, keep: x.amax(axes, keepdim=keep),
    "MIN": lambda x, axes, keep: x.amin(axes, keepdim=keep),
}
ACTIVATION: dict[str, Compute] = {
    "RELU": torch.relu,
    "SIGMOID": torch.sigmoid,
    "TANH": torch.tanh,
}


def elementwise(layer: Any) -> Compute:
    return rounded(_one_of(ELEMENTWISE, layer, layer.op))


def unary(layer: Any) -> Compute:
    return rounded(_one_of(UNARY, layer, layer.op))


def activation(layer: Any) -> Compute:
    return rounded(_one_of(ACTIVATION, layer, layer.type))


def reduce(layer: Any) -> Compute:
    """Reduces the axes of the layer, which are bits of a mask."""
    function = _one_of(REDUCE, layer, layer.op)
    axes, keep_dims = [axis for axis in range(32) if layer.axes >> axis & 1], layer.keep_dims
    return rounded(lambda x: function(x, axes, keep_dims))


def matrix_multiply(layer: Any) -> Compute:
    operations = [operation.name for operation in (layer.op0, layer.op1)]
    if "VECTOR" in operations:
        refuse(layer, f"operations {operations}", "NONE or TRANSPOSE")
    transposed = [operation == "TRANSPOSE" for operation in operations]

    def compute(a: Tensor, b: Tensor) -> Tensor:
        a, b = (x.transpose(-2, -1) if flip else x for x, flip in zip((a, b), transposed, strict=True))
        return a @ b

    return rounded(compute)


def rotary_embedding(layer: Any) -> Compute:
    """Rotates x [B, H, T, D] by cos and sin [B, T, D/2]. Pairs are adjacent where interleaved, else D/2 apart."""
    if layer.rotary_embedding_dim or layer.num_inputs > 3:
        got = f"rotary_embedding_dim {layer.rotary_embedding_dim} and {layer.num_inputs} inputs"
        refuse(layer, got, "whole heads, and cos and sin for each token")
    interleaved = layer.interleaved

    def compute(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
        turned = first * cos - second * sin, first * sin + second * cos
        return torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)

    return rounded(compute)


def dequantize(layer: Any) -> Compute:
    """Returns x · scale. Along the axis that has fewer scales than values, each block of values has one scale."""
    if layer.num_inputs != 2:
        refuse(layer, f"{layer.num_inputs} inputs", "integers and scales, no zero points")

    def compute(x: Tensor, scale: Tensor) -> Tensor:
        for axis, (size, n_blocks) in enumerate(zip(x.shape, scale.shape, strict=True)):
            scale = scale.repeat_interleave(size // n_blocks, dim=axis)
        return (x.float() * scale.float()).to(scale.dtype)

    return compute


# --- shapes and movement ------------------------------------------------------------------------------------


def cast(layer: Any) -> Compute:
    dtype = torch_dtype(layer.to_type)
    return lambda x: x.to(dtype)


def shape(layer: Any) -> Compute:
    return lambda x: torch.tensor(x.shape, dtype=torch.int64)


def shuffle(layer: Any) -> Compute:
    """Transposes, reshapes and transposes again. A second input is the new shape."""
    rank = len(layer.get_input(0).shape)
    first, second = tuple(layer.first_transpose)[:rank], tuple(layer.second_transpose)
    target = optional_dims(layer.reshape_dims) if layer.num_inputs == 1 else None
    zero_copies = layer.zero_is_placeholder

    def compute(x: Tensor, wanted: Tensor | None = None) -> Tensor:
        x = x.permute(first)
        sizes = target if wanted is None else wanted.tolist()
        if sizes is not None:
            x = x.reshape([x.shape[axis] if size == 0 and zero_copies else size for axis, size in enumerate(sizes)])
        return x.permute(second[: x.dim()])

    return compute


def squeeze(layer: Any) -> Compute:
    """Removes the axes in the second input; without one, all axes of size 1."""
    return lambda x, axes=None: x.squeeze() if axes is None else x.squeeze([int(axis) for axis in axes.flatten()])


def unsqueeze(layer: Any) -> Compute:
    """Adds axes of size 1. The second input has their positions in the result."""

    def compute(x: Tensor, axes: Tensor) -> Tensor:
        rank = x.dim() + axes.numel()
        for axis in sorted(int(axis) % rank for axis in axes.flatten()):
            x = x.unsqueeze(axis)
        return x

    return compute


def slice_(layer: Any) -> Compute:
    """Slices x, in strict mode. Inputs may replace the layer's start, size, stride, fill value and axes."""
    if layer.mode.name != "STRICT_BOUNDS":
        refuse(layer, f"mode {layer.mode.name}", "STRICT_BOUNDS")
    held = [optional_dims(value) for value in (layer.start, layer.shape, layer.stride, None, layer.axes)]

    def compute(x: Tensor, *given: Tensor | None) -> Tensor:
        tensors = [*given, *[None] * (5 - len(given))]
        pairs = zip(held, tensors, strict=True)
        dims: list[Any] = [value if tensor is None else tensor.tolist() for value, tensor in pairs]
        starts, sizes, strides, _, axes = dims
        strides, axes = strides or [1] * len(starts), axes or range(len(starts))
        for start, size, stride, axis in zip(starts, sizes, strides, axes, strict=True):
            last = start + (size - 1) * stride
            if size and not 0 <= min(start, last) <= max(start, last) < x.shape[axis]:
                raise IndexError(f"{layer.name}: rows {start} … {last} of axis {axis}, which has {x.shape[axis]}")
            if stride == 1:
                x = x.narrow(axis, start, size)
            else:
                x = x.index_select(axis, torch.arange(size) * stride + start)
        return x

    return compute


def concatenation(layer: Any) -> Compute:
    axis = layer.axis
    return lambda *parts: torch.cat(parts, dim=axis)


def gather(layer: Any) -> Compute:
    """Gathers slices along an axis (DEFAULT), single elements (ELEMENT), or by index tuples in each batch row (ND)."""
    axis, mode, batch_dims = layer.axis, layer.mode.name, layer.num_elementwise_dims
    if mode == "ELEMENT":
        return lambda data, indices: data.gather(axis, indices.long())
    if mode == "DEFAULT" and batch_dims == 0:
        return lambda data, indices: data.index_select(axis, indices.flatten().long()).reshape(
            *data.shape[:axis], *indices.shape, *data.shape[axis + 1 :]
        )
    if mode == "ND" and batch_dims == 1:

        def compute(data: Tensor, indices: Tensor) -> Tensor:
            pairs = zip(data, indices, strict=True)
            return torch.stack([row[tuple(index.long().movedim(-1, 0))] for row, index in pairs])

        return compute
    got = f"mode {mode} with {batch_dims} elementwise dimensions"
    return refuse(layer, got, "DEFAULT with 0, ELEMENT, or ND with 1")


def fill(layer: Any) -> Compute:
    """Makes start + step · i along one axis (LINSPACE). Inputs may replace the layer's size, start and step."""
    if layer.operation.name != "LINSPACE":
        refuse(layer, f"operation {layer.operation.name}", "LINSPACE")
    dtype, held = torch_dtype(layer.to_type), (optional_dims(layer.shape), layer.alpha, layer.beta)

    def compute(*given: Tensor | None) -> Tensor:
        tensors = [*given, *[None] * (3 - len(given))]
        pairs = zip(held, tensors, strict=True)
        size, start, step = (value if tensor is None else tensor.flatten().tolist() for value, tensor in pairs)
        if len(size) != 1:
            raise Unsupported(f"{layer.name}: FILL of shape {size}, expected one axis")
        start, step = (x[0] if isinstance(x, list) else x for x in (start, step))
        return (torch.arange(size[0]) * step + start).to(dtype)

    return compute


def select(layer: Any) -> Compute:
    return torch.where


def kv_cache_update(layer: Any) -> Compute:
    """Writes update [B, K, T, D] into cache [B, K, C, D] in place at write_indices[b], without rows outside of it."""
    if layer.cache_mode.name != "LINEAR" or layer.update_form.name != "PADDED_BHND":
        refuse(layer, f"mode {layer.cache_mode.name} and form {layer.update_form.name}", "LINEAR and PADDED_BHND")

    def compute(cache: Tensor, update: Tensor, write_indices: Tensor) -> Tensor:
        capacity, length = cache.shape[2], update.shape[2]
        for row, start in enumerate(write_indices.tolist()):
            first, last = max(start, 0), min(start + length, capacity)
            if first < last:
                cache[row, :, first:last] = update[row, :, first - start : last - start]
        return cache

    return compute


LAYERS: dict[str, Callable[[Any], Compute]] = {
    "ACTIVATION": activation,
    "CAST": cast,
    "CONCATENATION": concatenation,
    "DEQUANTIZE": dequantize,
    "ELEMENTWISE": elementwise,
    "FILL": fill,
    "GATHER": gather,
    "KV_CACHE_UPDATE": kv_cache_update,
    "MATRIX_MULTIPLY": matrix_multiply,
    "REDUCE": reduce,
    "ROTARY_EMBEDDING": rotary_embedding,
    "SELECT": select,
    "SHAPE": shape,
    "SHUFFLE": shuffle,
    "SLICE": slice_,
    "SQUEEZE": squeeze,
    "UNARY": unary,
    "UNSQUEEZE": unsqueeze,
}


def _one_of(table: dict[str, Any], layer: Any, operation: Any) -> Any:
    """The entry of an operation in a table.

    Raises:
        Unsupported: there is none.
    """
    if operation.name not in table:
        refuse(layer, f"operation {operation.name}", f"one of {', '.join(table)}")
    return table[operation.name]


_TORCH_DTYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT64": torch.int64,
    "INT32": torch.int32,
    "BOOL": torch.bool,
    "INT8": torch.int8,
    "INT4": torch.int8,
}


def torch_dtype(dtype: Any) -> torch.dtype:
    """Returns the torch dtype for a TensorRT dtype."""
    if dtype.name not in _TORCH_DTYPES:
        raise Unsupported(f"dtype {dtype.name}: expected one of {', '.join(_TORCH_DTYPES)}")
    return _TORCH_DTYPES[dtype.name]
