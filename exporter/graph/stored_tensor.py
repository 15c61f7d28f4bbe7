"""One tensor of model.onnx.data: its name, dtype, shape, and the weights that it holds."""

from __future__ import annotations

from dataclasses import dataclass

from exporter.spec.dtypes import stored_bytes


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of model.onnx.data.

    Attributes:
        name: the initializer's name in the graph.
        weights: canonical names of the weights it holds, side by side where several are merged; its own name for a RoPE table.
        dtype: dtype name it is stored in.
        shape: as stored; transposed says that this is the weights' shape reversed.
        transposed: the graph stores block projections [in, out]; a weight is [out, in].
        role: which tensor of a weight in integers it is, one of QUANTIZED_TENSORS; "" where it is the weight itself.
    """

    name: str
    weights: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    transposed: bool
    role: str = ""

    @property
    def n_bytes(self) -> int:
        return stored_bytes(self.dtype, self.shape)
