"""TensorRT's attention as the interpreter computes it: products and softmax in float32, weights rounded to the values' dtype.

A fused kernel keeps scores and softmax in float32 and feeds the second product in the layer's dtype; so does this.
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


@dataclass(frozen=True)
class Attention:
    """One attention, read from its input layer.

    Attributes:
        name: of the attention's result in the graph, e.g. "blocks.0.attention.heads".
        mask: name of the mask tensor; None where there is none.
        causal_kind: "NONE", "UPPER_LEFT" (query t sees keys 0 … t) or "LOWER_RIGHT" (the last query sees all keys).
        key_lengths: name of the int32 [B] tensor of valid keys; None where there is none.
        softmax: False leaves the scores as they are.
    """

    name: str
    mask: str | None
    causal_kind: str
    key_lengths: str | None
    softmax: bool

    def compute(self, queries: Tensor, keys: Tensor, values: Tensor, others: dict[str, Tensor], see: See) -> Tensor:
        """queries [B, H, T, D], keys and values [B, K, L, D] → [B, H, T, D]; query head h reads KV head h // (H / K).

        Queries and keys arrive scaled: the parser multiplies both by the root of the scale. A query that sees no key gives
        NaN: what a kernel does there is not specified.
        """
        n_rep = queries.shape[1] // keys.shape[1]
        keys, wide_values = (widened(x).repeat_interleave(n_rep, dim=1) for x in (keys, values))
        scores = see(self._beside("scores"), widened(queries) @ keys.transpose(-2, -1))
        weights = self._masked(scores, others)
        if self.softmax:
            weights = torch.softmax(weights, dim=-1)
        return (widened(weights.to(values.dtype)) @ wide_values).to(queries.dtype)

    def _masked(self, scores: Tensor, others: dict[str, Tensor]) -> Tensor:
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
        """The name of one of its inner values, beside the result's own."""
        return f"{self.name.rpartition('.')[0]}.{value}" if "." in self.name else value


def read_attention(layer: Any, name: str) -> Attention:
    """Reads an attention through its input layer; packed, quantized and unknown causal forms are refused."""
    attention = layer.attention
    forms = [getattr(attention, form).name for form in ("query_form", "key_value_form") if hasattr(attention, form)]
    if set(forms) - {"PADDED_BHND"}:
        refuse(layer, f"forms {forms}", "PADDED_BHND")
    if getattr(attention, "normalization_quantize_scale", None) is not None:
        refuse(layer, "a quantized softmax", "an unquantized one")
    causal_kind = attention.causal_kind.name
    if causal_kind not in ("NONE", "UPPER_LEFT", "LOWER_RIGHT"):
        refuse(layer, f"causal kind {causal_kind}", "NONE, UPPER_LEFT or LOWER_RIGHT")
    lengths, mask = getattr(attention, "key_value_lengths", None), attention.mask
    return Attention(
        name=name,
        mask=mask.name if mask is not None else None,
        causal_kind=causal_kind,
        key_lengths=lengths.name if lengths is not None else None,
        softmax=attention.norm_op.name == "SOFTMAX",
    )
