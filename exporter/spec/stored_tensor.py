"""One tensor of model.onnx.data: its name, dtype and shape, and the weights that it holds."""

from __future__ import annotations

from dataclasses import dataclass

from exporter.spec.dtypes import stored_bytes


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of model.onnx.data.

    Attributes:
        name: name of the initializer in the graph.
        weights: canonical names of the weights it holds, side by side where several are merged. A RoPE table has its
            own name.
        dtype: dtype name of the stored values.
        shape: the stored shape.
        transposed: whether the stored shape is [in, out], where a weight is [out, in].
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
