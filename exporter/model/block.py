"""The eager definition: one Llama decoder block and the model around it, in plain PyTorch.

This is the oracle. Every other form (the traced graph, onnxruntime, TensorRT) is right when it agrees with this file.

    x ─ attention_norm ─ prepare_qkv ─ update_cache ─ repeat_kv ─ attention ─ merge_project ─(+x)─ h
    h ─ ffn_norm ─ swiglu_mlp ─(+h)─ out

Shape letters: B batch, T new tokens, L total length read, C cache capacity, H query heads, K KV heads, D head_dim, E
hidden size, F width of the MLP, V vocabulary. `see` is called with every named value of the graph and returns the
value that is used from there on; by default it returns the value itself.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from exporter.model.observe import See, prefixed, unseen
from exporter.spec.catalogue import ModelConfig
from exporter.spec.rope import rotation_table
from exporter.spec.unit import Unit

# --- the components of a block ----------------------------------------------------------------------------------------


def at_least_float32(x: Tensor) -> Tensor:
    """Returns x in float32, or as it is in float64. Norms, rotation and softmax are computed in this dtype."""
    return x if x.dtype == torch.float64 else x.float()


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A projection without bias: its weight is [outputs, inputs], and it computes x @ W.T."""
    return nn.Linear(inputs, outputs, bias=False)


class RMSNorm(nn.Module):
    """x · rsqrt(mean(x²) + eps) in float32, cast back, times the weight (Zhang & Sennrich, 2019; order as in Llama)."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = at_least_float32(x)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


def rotate(heads: Tensor, R: Tensor) -> Tensor:
    """Turns each adjacent feature pair of every head, in float32.

    Args:
        heads: [B, H, T, D].
        R: cosine and sine, float32 [B, T, D/2, 2] or [T, D/2, 2].
    """
    pairs = torch.view_as_complex(at_least_float32(heads).unflatten(-1, (-1, 2)))
    turned = pairs * torch.view_as_complex(R.contiguous()).unsqueeze(-3)  # one rotation for all heads
    return torch.view_as_real(turned).flatten(-2).to(heads.dtype)


def prepare_qkv(
    x: Tensor, R: Tensor, q_proj: nn.Module, k_proj: nn.Module, v_proj: nn.Module, see: See = unseen
) -> tuple[Tensor, Tensor, Tensor]:
    """Projects x to queries, keys and values, splits them into heads, and rotates queries and keys.

    Args:
        x: [B, T, E].
        R: float32 [B, T, D/2, 2] or [T, D/2, 2].
        q_proj, k_proj, v_proj: the projections.
        see: the observer.

    Returns:
        Q_r [B, H, T, D], K_r [B, K, T, D] and V [B, K, T, D].
    """
    head_dim = 2 * R.shape[-2]

    q = see("attention.q_proj", q_proj(x))
    q = see("attention.reshape_q", q.unflatten(-1, (-1, head_dim)))
    q = see("attention.q_heads", q.transpose(1, 2))

    k = see("attention.k_proj", k_proj(x))
    k = see("attention.reshape_k", k.unflatten(-1, (-1, head_dim)))
    k = see("attention.k_heads", k.transpose(1, 2))

    v = see("attention.v_proj", v_proj(x))
    v = see("attention.reshape_v", v.unflatten(-1, (-1, head_dim)))
    v = see("attention.v_heads", v.transpose(1, 2))

    q_rotated = see("attention.rope_q", rotate(q, R))
    k_rotated = see("attention.rope_k", rotate(k, R))
    return q_rotated, k_rotated, v


def update_cache(cache: Tensor, new: Tensor, write_indices: Tensor) -> None:
    """Writes new [B, K, T, D] into cache [B, K, C, D] in place: row b starts at write_indices[b]. Rows must fit."""
    for row, start in enumerate(write_indices.tolist()):
        assert start + new.shape[2] <= cache.shape[2], "the caller checks capacity before the step"
        cache[row, :, start : start + new.shape[2]] = new[row]


def repeat_kv(x: Tensor, n_rep: int) -> Tensor:
    """x [B, S, K, D] → [B, S, K · n_rep, D]: KV head g fills slots g·n_rep to (g+1)·n_rep − 1; n_rep 1 returns x."""
    return x if n_rep == 1 else x.repeat_interleave(n_rep, dim=2)


def attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, see: See = unseen) -> Tensor:
    """softmax(Q Kᵀ / sqrt(D)) V over the visible keys: products and softmax in float32, cast back, times V.

    Args:
        queries: [B, H, T, D].
        keys: [B, K, L, D].
        values: [B, K, L, D].
        mask: bool [B, 1, T, L], True where query t may see key j.
        see: the observer.

    Returns:
        [B, H, T, D]. A query that sees no key returns 0.
    """
    n_rep = queries.shape[1] // keys.shape[1]
    keys = repeat_kv(keys.transpose(1, 2), n_rep).transpose(1, 2)
    values = repeat_kv(values.transpose(1, 2), n_rep).transpose(1, 2)
    scores = at_least_float32(queries) @ at_least_float32(keys).transpose(-2, -1) / math.sqrt(queries.shape[-1])
    scores = see("attention.scores", scores)
    weights = F.softmax(scores.masked_fill(~mask, -math.inf), dim=-1)
    weights = weights.masked_fill(~mask, 0.0)  # a row that sees nothing is 0/0 above
    return see("attention.heads", weights.to(values.dtype) @ values)


def merge_project(heads: Tensor, o_proj: nn.Module, see: See = unseen) -> Tensor:
    """H [B, H, T, D] → heads side by side [B, T, H·D] → output projection → delta_attn [B, T, E]."""
    merged = see("attention.merged", heads.transpose(1, 2).flatten(2))
    return see("attention.o_proj", o_proj(merged))


class SwiGLU(nn.Module):
    """The component swiglu_mlp: x [B, T, E] → down(silu(gate(x)) · up(x)) [B, T, E].

    From Shazeer, "GLU Variants Improve Transformer", 2020.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = linear(config.hidden_size, config.intermediate_size)
        self.up_proj = linear(config.hidden_size, config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor, see: See = unseen) -> Tensor:
        gate = see("mlp.gate_proj", self.gate_proj(x))
        activated = see("mlp.silu", F.silu(gate))
        up = see("mlp.up_proj", self.up_proj(x))
        product = see("mlp.product", activated * up)
        return see("mlp.down_proj", self.down_proj(product))


# --- the block --------------------------------------------------------------------------------------------------------


class AttentionProjections(nn.Module):
    """The four projections of a block's attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.q_proj = linear(config.hidden_size, config.n_heads * config.head_dim)
        self.k_proj = linear(config.hidden_size, config.n_kv_heads * config.head_dim)
        self.v_proj = linear(config.hidden_size, config.n_kv_heads * config.head_dim)
        self.o_proj = linear(config.n_heads * config.head_dim, config.hidden_size)


class Block(nn.Module):
    """One decoder block over its own two cache tensors, which it updates in place."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = AttentionProjections(config)
        self.ffn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(
        self,
        x: Tensor,
        R: Tensor,
        past_key: Tensor,
        past_value: Tensor,
        write_indices: Tensor,
        visible: Tensor,
        see: See = unseen,
    ) -> Tensor:
        """Returns hidden states [B, T, E].

        Args:
            x: hidden states [B, T, E].
            R: rotation of every token, float32 [B, T, D/2, 2].
            past_key, past_value: the cache, [B, K, C, D] each, updated in place.
            write_indices: int64 [B], the first cache row that each sequence writes.
            visible: bool [B, 1, T, L], which key each query sees.
            see: the observer.
        """
        projections = self.attention
        normed = see("attention_norm", self.attention_norm(x))
        queries, keys, values = prepare_qkv(normed, R, projections.q_proj, projections.k_proj, projections.v_proj, see)

        update_cache(past_key, keys, write_indices)
        update_cache(past_value, values, write_indices)
        total_length = visible.shape[-1]
        keys = see("attention.keys", past_key[:, :, :total_length])
        values = see("attention.values", past_value[:, :, :total_length])

        heads = attention(queries, keys, values, visible, see)
        delta = merge_project(heads, projections.o_proj, see)
        h = see("attention.residual", x + delta)

        normed = see("ffn_norm", self.ffn_norm(h))
        delta = self.mlp(normed, see)
        return see("mlp.residual", h + delta)


# --- the model around the blocks --------------------------------------------------------------------------------------


def cache_rows(write_indices: Tensor, sequence_length: int) -> Tensor:
    """The cache row of every token of the step: int64 [B, T]."""
    return write_indices[:, None] + torch.arange(sequence_length)


def real_tokens(attention_mask: Tensor, rows: Tensor) -> Tensor:
    """Which tokens of the step are real: bool [B, T], True where the mask allows the token's own cache row."""
    total_length = attention_mask.shape[1]
    own = attention_mask.gather(1, rows.clamp(max=total_length - 1))  # the row of a pad may be beyond the rows read
    return (own == 1) & (rows < total_length)


def visibility(attention_mask: Tensor, rows: Tensor, real: Tensor) -> Tensor:
    """Which key each query sees: bool [B, 1, T, L], by cache row and never by position.

    A padded query also sees masked keys. Its output is discarded, and no engine then meets an empty softmax, whose NaN
    would be cached and leak through the mask of the next block.
    """
    causal = torch.arange(attention_mask.shape[1]) <= rows[:, :, None]
    return (causal & ((attention_mask[:, None, :] == 1) | ~real[:, :, None]))[:, None]


def last_token(real: Tensor) -> Tensor:
    """Index within the step of each row's last real token: int64 [B]. A row without a real token has index 0.

    Args:
        real: bool [B, T].
    """
    return (torch.arange(real.shape[1]) * real.long()).amax(-1)


class Decoder(nn.Module):
    """A block, stack or model: blocks over an in-place cache, and for a model the embedding and head around them."""

    rotation: Tensor

    def __init__(self, config: ModelConfig, unit: Unit, max_positions: int) -> None:
        super().__init__()
        self.unit = unit
        self.register_buffer("rotation", torch.from_numpy(rotation_table(config, max_positions)), persistent=False)
        self.blocks = nn.ModuleList(Block(config) for _ in range(unit.n_layers))
        if unit.kind == "model":
            self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
            self.norm = RMSNorm(config.hidden_size, config.norm_eps)
            self.lm_head = linear(config.hidden_size, config.vocab_size)
            if config.tie_word_embeddings:
                self.lm_head.weight = self.embedding.weight

    def forward(
        self,
        x: Tensor,
        position_ids: Tensor,
        write_indices: Tensor,
        attention_mask: Tensor,
        *past: Tensor,
        see: See = unseen,
    ) -> Tensor:
        """Runs one step.

        Args:
            x: token ids int64 [B, T] for a model, else hidden states [B, T, E].
            position_ids: int64 [B, T].
            write_indices: int64 [B], the first cache row that each sequence writes.
            attention_mask: int64 [B, L], 1 for cache rows that may be read.
            past: key and value of each layer, [B, K, C, D] each, updated in place.
            see: the observer.

        Returns:
            Hidden states [B, T, E] with padded tokens zeroed; for a model float32 logits, [B, V] of each row's last
            real token or, with logits "all", [B, T, V]. A row without a real token has the logits of its first token,
            which are finite and mean nothing.
        """
        rows = cache_rows(write_indices, position_ids.shape[1])
        real = see("attention_mask.real", real_tokens(attention_mask, rows))
        visible = see("attention_mask.visible", visibility(attention_mask, rows, real))
        cos = see("rope.cos", self.rotation[position_ids][..., 0])
        sin = see("rope.sin", self.rotation[position_ids][..., 1])
        R = torch.stack([cos, sin], dim=-1)

        h = see("embedding", self.embedding(x)) if self.unit.kind == "model" else x
        for layer, block in enumerate(self.blocks):
            past_key, past_value = past[2 * layer], past[2 * layer + 1]
            h = block(h, R, past_key, past_value, write_indices, visible, prefixed(f"blocks.{layer}.", see))

        if self.unit.kind != "model":
            return see("hidden_states_out", h.masked_fill(~real[:, :, None], 0.0))
        if self.unit.logits == "last":
            h = see("last_token", h[torch.arange(len(h)), last_token(real)])
        normed = see("norm", self.norm(h))
        logits = see("lm_head", self.lm_head(normed))
        return see("logits", at_least_float32(logits))
