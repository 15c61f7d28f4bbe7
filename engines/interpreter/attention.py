"""TensorRT's attention, computed by the interpreter.

Products and softmax are in float32, and the attention weights are rounded to the dtype of the values. A fused kernel of
TensorRT does the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engines.interpreter.layers import widened
from engines.interpreter.reading import refuse
from exporter.model.observe import See

CAUSAL_KINDS = ("NONE", "UPPER_LEFT", "LOWER_RIGHT")


@dataclass(frozen=True)
class AttentionOperation:
    """One attention, read from its input layer.

    Attributes:
        name: name of the attention's result in the graph, e.g. "blocks.0.attention.heads".
        mask: name of the mask tensor, bool or floating point [B, 1 or H, T, L]; None where there is none.
        causal_kind: one of `CAUSAL_KINDS`. With "UPPER_LEFT" query t sees keys 0 … t, with "LOWER_RIGHT" the last query
            sees all keys.
        key_lengths: name of the int32 [B] tensor with the number of valid keys; None where there is none.
        softmax: whether the scores go through a softmax.
    """

    name: str
    mask: str | None
    causal_kind: str
    key_lengths: str | None
    softmax: bool

    def compute(self, queries: Tensor, keys: Tensor, values: Tensor, others: dict[str, Tensor], see: See) -> Tensor:
        """Computes the attention. Query head h reads KV head h // (H / K).

        Args:
            queries: [B, H, T, D]. The parser has multiplied queries and keys by the square root of the scale.
            keys, values: [B, K, L, D].
            others: tensors by name, with the mask and the key lengths among them.
            see: called with the scores; its result is used instead of them.

        Returns:
            [B, H, T, D] in the dtype of the queries. A query that sees no key gives NaN, because TensorRT does not
            define the result.
        """
        n_rep = queries.shape[1] // keys.shape[1]
        keys, wide_values = (widened(x).repeat_interleave(n_rep, dim=1) for x in (keys, values))
        scores = see(self._beside("scores"), widened(queries) @ keys.transpose(-2, -1))
        weights = self._masked(scores, others)
        if self.softmax:
            weights = torch.softmax(weights, dim=-1)
        return (widened(weights.to(values.dtype)) @ wide_values).to(queries.dtype)

    def _masked(self, scores: Tensor, others: dict[str, Tensor]) -> Tensor:
        """The scores [B, H, T, L] with -inf where a query does not see a key."""
        n_queries, n_keys = scores.shape[-2:]
        if self.mask is not None:
            mask = others[self.mask]
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + widened(mask)
        if self.causal_kind != "NONE":
            offset = n_keys - n_queries if self.causal_kind == "LOWER_RIGHT" else 0
            seen = torch.arange(n_keys) <= torch.arange(n_queries)[:, None] + offset
            scores = scores.masked_fill(~seen, -math.inf)
        if self.key_lengths is not None:
            valid = torch.arange(n_keys) < others[self.key_lengths][:, None, None, None]
            scores = scores.masked_fill(~valid, -math.inf)
        return scores

    def _beside(self, value: str) -> str:
        """The name of an inner value; only the last part differs from the name of the result."""
        return f"{self.name.rpartition('.')[0]}.{value}" if "." in self.name else value


def read_attention(layer: Any, name: str) -> AttentionOperation:
    """Reads an attention from its input layer.

    Raises:
        Unsupported: the attention is packed or quantized, or its causal kind is unknown.
    """
    attention = layer.attention
    forms = [getattr(attention, form).name for form in ("query_form", "key_value_form") if hasattr(attention, form)]
    if set(forms) - {"PADDED_BHND"}:
        refuse(layer, f"forms {forms}", "PADDED_BHND")
    if getattr(attention, "normalization_quantize_scale", None) is not None:
        refuse(layer, "a quantized softmax", "an unquantized one")
    causal_kind = attention.causal_kind.name
    if causal_kind not in CAUSAL_KINDS:
        refuse(layer, f"causal kind {causal_kind}", f"one of {', '.join(CAUSAL_KINDS)}")
    lengths, mask = getattr(attention, "key_value_lengths", None), attention.mask
    return AttentionOperation(
        name=name,
        mask=mask.name if mask is not None else None,
        causal_kind=causal_kind,
        key_lengths=lengths.name if lengths is not None else None,
        softmax=attention.norm_op.name == "SOFTMAX",
    )
