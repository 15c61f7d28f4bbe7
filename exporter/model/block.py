"""The eager definition: one Llama decoder block and the model around it, in plain PyTorch.

This is the oracle. Every other form (the traced graph, onnxruntime, TensorRT) is right when it agrees with this file.

    x ─ attention_norm ─ prepare_qkv ─ cache update ─ repeat_kv ─ attention ─ merge_project ─(+x)─ h
    h ─ ffn_norm ─ swiglu_mlp ─(+h)─ out

Shape letters: B batch, T new tokens, L total length read, C cache capacity, H query heads, K KV heads, D head_dim, E hidden.
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


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, where it is narrower: norms, rotation and softmax are computed there. float64 stays, as a finer reference."""
    return x if x.dtype == torch.float64 else x.float()


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A bias-free projection; its weight is [outputs, inputs] and applied as x @ W.T."""
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
    """Turns each adjacent feature pair of heads [B, H, T, D] by R float32 [B, T, D/2, 2] or [T, D/2, 2] (cos, sin), in float32."""
    pairs = torch.view_as_complex(at_least_float32(heads).unflatten(-1, (-1, 2)))
    turned = pairs * torch.view_as_complex(R.contiguous()).unsqueeze(-3)  # one rotation for all heads
    return torch.view_as_real(turned).flatten(-2).to(heads.dtype)


class PrepareQKV(nn.Module):
    """x [B, T, E] and R float32 [B, T, D/2, 2] or [T, D/2, 2] → Q_r [B, H, T, D], K_r [B, K, T, D], V [B, K, T, D] (not rotated)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = linear(config.hidden_size, config.n_heads * config.head_dim)
        self.k_proj = linear(config.hidden_size, config.n_kv_heads * config.head_dim)
        self.v_proj = linear(config.hidden_size, config.n_kv_heads * config.head_dim)

    def forward(self, x: Tensor, R: Tensor, see: See = unseen) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys, values = (self.heads(letter, x, see) for letter in "qkv")
        return see("attention.rope_q", rotate(queries, R)), see("attention.rope_k", rotate(keys, R)), values

    def heads(self, letter: str, x: Tensor, see: See) -> Tensor:
        projected = see(f"attention.{letter}_proj", self.get_submodule(f"{letter}_proj")(x))
        split = see(f"attention.reshape_{letter}", projected.unflatten(-1, (-1, self.head_dim)))
        return see(f"attention.{letter}_heads", split.transpose(1, 2))


def update_cache(cache: Tensor, new: Tensor, write_indices: Tensor) -> None:
    """Writes new [B, K, T, D] into cache [B, K, C, D] in place: row b starts at write_indices[b]. Rows must fit."""
    for row, start in enumerate(write_indices.tolist()):
        assert start + new.shape[2] <= cache.shape[2], "the caller checks capacity before the step"
        cache[row, :, start : start + new.shape[2]] = new[row]


def repeat_kv(x: Tensor, n_rep: int) -> Tensor:
    """x [B, S, K, D] → [B, S, K · n_rep, D]: KV head g fills slots g·n_rep … (g+1)·n_rep − 1; n_rep 1 returns x itself."""
    return x if n_rep == 1 else x.repeat_interleave(n_rep, dim=2)


class RepeatKV(nn.Module):
    """`repeat_kv` as a component of its own."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_rep = config.n_rep

    def forward(self, x: Tensor) -> Tensor:
        return repeat_kv(x, self.n_rep)


class Attention(nn.Module):
    """softmax(Q Kᵀ / sqrt(D)) V over the visible keys: products and softmax in float32, cast back, times V.

    Q_r [B, H, T, D]; keys, values [B, K, L, D]; mask bool [B, 1, T, L], True where query t may see key j → H [B, H, T, D].
    A query that sees no key returns 0.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_rep = config.n_rep

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, see: See = unseen) -> Tensor:
        keys, values = (repeat_kv(x.transpose(1, 2), self.n_rep).transpose(1, 2) for x in (keys, values))
        scores = at_least_float32(queries) @ at_least_float32(keys).transpose(-2, -1) / math.sqrt(queries.shape[-1])
        scores = see("attention.scores", scores)
        weights = F.softmax(scores.masked_fill(~mask, -math.inf), dim=-1)
        weights = weights.masked_fill(~mask, 0.0)  # a row that sees nothing is 0/0 above
        return see("attention.heads", weights.to(values.dtype) @ values)


class MergeProject(nn.Module):
    """H [B, H, T, D] → merged field [B, T, H·D] → output projection → delta_attn [B, T, E]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.o_proj = linear(config.n_heads * config.head_dim, config.hidden_size)

    def forward(self, heads: Tensor, see: See = unseen) -> Tensor:
        merged = see("attention.merged", heads.transpose(1, 2).flatten(2))
        return see("attention.o_proj", self.o_proj(merged))


class SwiGLU(nn.Module):
    """x [B, T, E] → down(silu(gate(x)) · up(x)) [B, T, E] (Shazeer, "GLU Variants Improve Transformer", 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = linear(config.hidden_size, config.intermediate_size)
        self.up_proj = linear(config.hidden_size, config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor, see: See = unseen) -> Tensor:
        gate = see("mlp.silu", F.silu(see("mlp.gate_proj", self.gate_proj(x))))
        product = see("mlp.product", gate * see("mlp.up_proj", self.up_proj(x)))
        return see("mlp.down_proj", self.down_proj(product))


class Block(nn.Module):
    """One decoder block over its own two cache tensors, which it updates in place."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.prepare_qkv = PrepareQKV(config)
        self.attention = Attention(config)
        self.merge_project = MergeProject(config)
        self.ffn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.swiglu_mlp = SwiGLU(config)

    def forward(
        self,
        x: Tensor,
        R: Tensor,
        past: tuple[Tensor, Tensor],
        write_indices: Tensor,
        visible: Tensor,
        see: See = unseen,
    ) -> Tensor:
        """x [B, T, E], R [B, T, D/2, 2], past key and value [B, K, C, D], visible [B, 1, T, L] → [B, T, E]."""
        queries, keys, values = self.prepare_qkv(see("attention_norm", self.attention_norm(x)), R, see)
        for cache, new in zip(past, (keys, values), strict=True):
            update_cache(cache, new, write_indices)
        keys, values = (
            see(f"attention.{name}", cache[:, :, : visible.shape[-1]])
            for name, cache in zip(("keys", "values"), past, strict=True)
        )
        heads = self.attention(queries, keys, values, visible, see)
        h = see("attention.residual", x + self.merge_project(heads, see))
        return see("mlp.residual", h + self.swiglu_mlp(see("ffn_norm", self.ffn_norm(h)), see))


def cache_rows(write_indices: Tensor, sequence_length: int) -> Tensor:
    """The cache row of every token of the step: int64 [B, T]."""
    return write_indices[:, None] + torch.arange(sequence_length)


def real_tokens(attention_mask: Tensor, rows: Tensor) -> Tensor:
    """Which tokens of the step are real: bool [B, T], True where the mask allows the token's own cache row."""
    total_length = attention_mask.shape[1]
    own = attention_mask.gather(1, rows.clamp(max=total_length - 1))  # a pad's row may lie beyond what the step reads
    return (own == 1) & (rows < total_length)


def visibility(attention_mask: Tensor, rows: Tensor, real: Tensor) -> Tensor:
    """Which key each query sees: bool [B, 1, T, L], by cache row and never by position.

    A padded query also sees masked keys: its output is discarded, and no engine then meets an empty softmax, whose NaN
    would be cached and leak through the mask of the next block.
    """
    causal = torch.arange(attention_mask.shape[1]) <= rows[:, :, None]
    return (causal & ((attention_mask[:, None, :] == 1) | ~real[:, :, None]))[:, None]


class Decoder(nn.Module):
    """The unit block, stack or model: blocks over an in-place cache, and for a model the embedding and head around them."""

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
        """One step. `past` holds key and value of each layer, [B, K, C, D] each, updated in place.

        x is int64 [B, T] token ids for a model, else hidden states [B, T, E]. Returns hidden states [B, T, E] with padded
        tokens zeroed, or float32 logits: [B, V] of each row's last real token, [B, T, V] with logits "all".
        """
        rows = cache_rows(write_indices, position_ids.shape[1])
        real = see("attention_mask.real", real_tokens(attention_mask, rows))
        visible = see("attention_mask.visible", visibility(attention_mask, rows, real))
        R = torch.stack(
            [see(f"rope.{part}", self.rotation[position_ids][..., i]) for i, part in enumerate(("cos", "sin"))], dim=-1
        )
        h = see("embedding", self.embedding(x)) if self.unit.kind == "model" else x
        for layer, block in enumerate(self.blocks):
            h = block(h, R, past[2 * layer : 2 * layer + 2], write_indices, visible, prefixed(f"blocks.{layer}.", see))
        if self.unit.kind != "model":
            return see("hidden_states_out", h.masked_fill(~real[:, :, None], 0.0))
        if self.unit.logits == "last":
            h = see("last_token", h[torch.arange(len(h)), last_token(attention_mask, write_indices)])
        return see("logits", at_least_float32(see("lm_head", self.lm_head(see("norm", self.norm(h))))))


def last_token(attention_mask: Tensor, write_indices: Tensor) -> Tensor:
    """Index within the step of each row's last real token: int64 [B]."""
    rows = torch.arange(attention_mask.shape[1])
    return (rows * attention_mask).amax(-1) - write_indices


def component(config: ModelConfig, name: str) -> nn.Module:
    """The module of one component, by its name in the contract."""
    if name == "rms_norm":
        return RMSNorm(config.hidden_size, config.norm_eps)
    return {
        "prepare_qkv": PrepareQKV,
        "repeat_kv": RepeatKV,
        "attention": Attention,
        "merge_project": MergeProject,
        "swiglu_mlp": SwiGLU,
    }[name](config)


_MODULE_OF_COMPONENT = {"prepare_qkv": "attention", "merge_project": "attention", "swiglu_mlp": "mlp"}


def canonical_name(unit: Unit, parameter: str) -> str:
    """The contract's name of a parameter of this unit's eager module, e.g. `blocks.3.attention.q_proj.weight`."""
    if unit.kind == "component":
        parameter = f"blocks.0.{'attention_norm' if unit.component == 'rms_norm' else unit.component}.{parameter}"
    parts = parameter.split(".")
    if parts[0] == "blocks":
        parts[1] = str(int(parts[1]) + unit.first_layer)
        parts[2] = _MODULE_OF_COMPONENT.get(parts[2], parts[2])
    return ".".join(parts)


def eager_module(config: ModelConfig, unit: Unit, max_positions: int) -> nn.Module:
    """The eager module of a unit with unfilled weights; create it under `torch.device("meta")` to allocate none."""
    return component(config, unit.component) if unit.component is not None else Decoder(config, unit, max_positions)
