"""How matrices are stored in integers: bits, blocks, scales and zero points."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from exporter.common.errors import InputError
from exporter.common.plain_numbers import make_plain
from exporter.spec.catalogue import ModelConfig
from exporter.spec.limits import is_count

WEIGHT_FORMATS = ("int8", "int4", "uint8", "uint4")
# The roles of the tensors that DequantizeLinear computes a weight from, in its order.
QUANTIZED_TENSORS = ("integers", "scales", "zero_points")


@dataclass(frozen=True)
class WeightFormat:
    """An integer format of matrices: few bits, with one scale for each block of inputs.

    A weight is (integer − zero point) · scale. Blocks run along the inputs of a matrix, and scales are in the dtype
    of the graph. Activations, norms, the embedding and the cache stay in that dtype. The output head always has 8
    bits (`of`): at 4 it costs more agreement than all blocks together, and saves little.

    Attributes:
        dtype: "int8" and "int4" have zero points of 0, as TensorRT needs; "uint8" and "uint4" have one zero point a
            block.
        block_size: number of weights of one output that share a scale. The kernels of onnxruntime need a power of two
            of at least 16.
    """

    dtype: str
    block_size: int = 32

    def __post_init__(self) -> None:
        make_plain(self, "block_size")

    @property
    def bits(self) -> int:
        return 4 if self.dtype.endswith("4") else 8

    @property
    def symmetric(self) -> bool:
        return not self.dtype.startswith("u")

    def of(self, weight: str) -> WeightFormat:
        """Returns the format of one weight, by canonical name."""
        return replace(self, dtype=self.dtype.replace("4", "8")) if weight == "lm_head.weight" else self

    @property
    def range(self) -> tuple[int, int]:
        """The least and the largest integer."""
        return (-(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1) if self.symmetric else (0, 2**self.bits - 1)

    def tensors(self, shape: tuple[int, int], dtype: str) -> dict[str, tuple[str, tuple[int, int]]]:
        """The tensors of a weight in the order that DequantizeLinear reads them: role → dtype name and shape.

        Args:
            shape: shape of the weight in the graph, [in, out].
            dtype: dtype name of the graph.
        """
        by_block = (shape[0] // self.block_size, shape[1])
        stored = [(self.dtype, shape), (dtype, by_block), *([] if self.symmetric else [(self.dtype, by_block)])]
        return dict(zip(QUANTIZED_TENSORS, stored, strict=False))

    def check(self, config: ModelConfig) -> None:
        """Refuses a format without a kernel, or whose blocks do not divide the inputs of every matrix.

        Raises:
            InputError: the message names the value and one that fits.
        """
        if self.dtype not in WEIGHT_FORMATS:
            raise InputError(f"weights: got {self.dtype!r}, expected one of {', '.join(WEIGHT_FORMATS)}")
        size = self.block_size
        if not is_count(size) or size < 16 or size & (size - 1):
            raise InputError(f"block size: got {size!r}, expected a power of two of at least 16")
        widths = {config.hidden_size, config.n_heads * config.head_dim, config.intermediate_size}
        if any(width % size for width in widths):
            largest = math.gcd(*widths) & -math.gcd(*widths)
            fix = (
                f"use {largest} or a smaller power of two"
                if largest >= 16
                else "this model has no such size: export it without a weight format"
            )
            raise InputError(
                f"block size: got {size}, which does not divide the matrices' inputs {sorted(widths)}; {fix}"
            )


def is_quantized(name: str) -> bool:
    """Whether an integer format covers a weight, by canonical name: projections and the output head."""
    return name.endswith("_proj.weight") or name == "lm_head.weight"
