"""Weights as integers of few bits with one scale for each block: rounding, packing and dequantizing.

Rounding is to nearest. For int4, several scales of a block are tried and the one with the least squared error is
taken: the largest weight may be clipped where that makes the others more precise. On SmolLM2 this lowers the KL
divergence by a fifth (0.41 to 0.33 nats). For uint4, whose range follows both ends of a block, it changes nothing
(0.27 and 0.28), and at 8 bits clipping never helps. Rounding reads only the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from exporter.model.weights import TORCH_DTYPES, WeightSource
from exporter.spec.weight_formats import WeightFormat, is_quantized

# Fractions of the largest weight of a block that the largest integer may represent.
CLIPPINGS = {"int4": (1.0, 0.96, 0.92, 0.88, 0.84, 0.8), "uint4": (1.0,), "int8": (1.0,), "uint8": (1.0,)}


@dataclass(frozen=True)
class Quantized:
    """A matrix [in, out] in integers.

    Attributes:
        values: int8 or uint8 [in, out], also where the integers have 4 bits.
        scales: [in / block, out] in the dtype of the graph.
        zero_points: int8 or uint8 [in / block, out]; None where all are 0.
    """

    values: Tensor
    scales: Tensor
    zero_points: Tensor | None

    def dequantized(self) -> Tensor:
        """Returns (value − zero point) · scale as DequantizeLinear does: [in, out] in the dtype of the scales."""
        blocks = self.values.reshape(self.scales.shape[0], -1, self.scales.shape[1]).float()
        if self.zero_points is not None:
            blocks = blocks - self.zero_points[:, None].float()
        return (blocks * self.scales[:, None].float()).to(self.scales.dtype).reshape(self.values.shape)


def quantize(weight: Tensor, weight_format: WeightFormat, dtype: str) -> Quantized:
    """Rounds a matrix.

    Args:
        weight: [in, out], finite, in any floating-point dtype; `in` is a multiple of the block size.
        weight_format: the integer format.
        dtype: dtype name of the scales.
    """
    blocks = weight.float().reshape(-1, weight_format.block_size, weight.shape[1])
    largest = blocks.abs().amax(1) if weight_format.symmetric else None
    low, high = blocks.amin(1).clamp(max=0), blocks.amax(1).clamp(min=0)
    lowest_integer, highest_integer = weight_format.range
    best: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    step = (largest if largest is not None else high - low) / highest_integer
    for clipping in CLIPPINGS[weight_format.dtype]:
        scale = _scales(step * clipping, TORCH_DTYPES[dtype])
        exact = scale.float()
        zero_point = (
            torch.zeros_like(exact)
            if weight_format.symmetric
            else (-low * clipping / exact).round().clamp(0, highest_integer)
        )
        values = (blocks / exact[:, None]).round_().add_(zero_point[:, None]).clamp_(lowest_integer, highest_integer)
        error = ((values - zero_point[:, None]) * exact[:, None]).sub_(blocks).square_().sum(1)
        if best is None:
            best = values, scale, zero_point, error
        else:
            better = error < best[3]
            best = (
                torch.where(better[:, None], values, best[0]),
                torch.where(better, scale, best[1]),
                torch.where(better, zero_point, best[2]),
                torch.where(better, error, best[3]),
            )
    assert best is not None
    integers = torch.int8 if weight_format.symmetric else torch.uint8
    zero_points = None if weight_format.symmetric else best[2].to(integers)
    return Quantized(best[0].to(integers).reshape(weight.shape), best[1], zero_points)


def _scales(steps: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the scales for steps float32 [in / block, out], at least the smallest scale that is exact in float32.

    Half has scales below its smallest normal number, 2**-24 apart. They are kept: all arithmetic is in float32, where
    they are normal. Such a scale is rounded up, because one rounded down would clip the largest weight of its block.
    """
    info = torch.finfo(dtype)
    scales = steps.to(dtype)
    if dtype != torch.float16:
        return scales.clamp(min=info.tiny)
    spacing = info.tiny * info.eps
    rounded_up = (steps / spacing).ceil().clamp(min=1) * spacing
    return torch.where(steps < info.tiny, rounded_up.to(dtype), scales)


def expected_error(weight: Tensor, weight_format: WeightFormat) -> Tensor:
    """Returns the sum of squared errors that rounding makes in each output, float64 [out], with exact scales.

    A value is off by a uniform part of a step, whose mean square is a twelfth of the squared step.

    Args:
        weight: [in, out], as `quantize` takes it.
        weight_format: the integer format.
    """
    blocks = weight.float().reshape(-1, weight_format.block_size, weight.shape[1])
    low, high = blocks.amin(1).clamp(max=0).double(), blocks.amax(1).clamp(min=0).double()
    span = torch.maximum(-low, high) if weight_format.symmetric else high - low
    return (span / weight_format.range[1]).square().sum(0) * (weight_format.block_size / 12)


def pack(integers: Tensor, bits: int) -> Tensor:
    """Returns integers as ONNX stores them, uint8 [n bytes]. Two of 4 bits share a byte, the first in the low half."""
    raw = integers.contiguous().view(torch.uint8).flatten()
    if bits == 8:
        return raw
    raw = nn.functional.pad(raw, (0, raw.numel() % 2))
    return (raw[0::2] & 0xF) | (raw[1::2] << 4)


def unpack(raw: Tensor, bits: int, symmetric: bool) -> Tensor:
    """The inverse of `pack`: returns int8 or uint8 [n], with an added 0 where an odd number was packed."""
    if bits == 4:
        raw = torch.stack((raw & 0xF, raw >> 4), dim=1).flatten()
        if symmetric:
            raw = ((raw ^ 8) - 8).view(torch.int8)  # extends the sign
    return raw.view(torch.int8) if symmetric else raw


class QuantizedWeights:
    """The weights of another source, rounded to an integer format, for the reference of a bundle in that format.

    A tied output head is rounded; the embedding is not.
    """

    def __init__(self, weights: WeightSource, weight_format: WeightFormat, dtype: str, tied: bool) -> None:
        self.description = weights.description
        self.has_own_head = True
        self._weights, self._format, self._dtype, self._tied = weights, weight_format, dtype, tied

    def read(self, name: str, columns: slice = slice(None), rows: slice = slice(None)) -> Tensor:
        if not is_quantized(name):
            return self._weights.read(name, columns, rows)
        source = "embedding.weight" if self._tied and name == "lm_head.weight" else name
        weight = self._weights.read(source, rows=rows)  # all inputs, because blocks run along them
        return quantize(weight.T, self._format.of(name), self._dtype).dequantized().T[:, columns]
