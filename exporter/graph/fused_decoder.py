"""The traced form: the same decoder with the fused operators of the standard, as the fragments of a graph.

A graph is `Prologue`, `Embedding` (models), one `TracedBlock` a layer, and an epilogue. torch.onnx.export traces each
fragment once, and `assemble.py` joins them. Weights have the layout that the graph stores: projections are [in, out].
Symbolic operators compute nothing in PyTorch: these modules are traced, the eager ones are run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from exporter.model.block import last_token
from exporter.spec.catalogue import ModelConfig

symbolic = torch.onnx.ops.symbolic

MARKER_DOMAIN = "blockline"  # operators of this domain name a value; they are removed after tracing


def named(name: str, x: Tensor) -> Tensor:
    """Gives a value its name in the graph, and returns it."""
    return symbolic(f"{MARKER_DOMAIN}::Name", (x,), {"name": name}, dtype=x.dtype, shape=x.shape)


def reshape(x: Tensor, target: list[int], shape: tuple) -> Tensor:
    """ONNX Reshape with a constant target (0 keeps a dimension), so that the graph has no shape arithmetic."""
    return symbolic("Reshape", (x, torch.tensor(target)), dtype=x.dtype, shape=shape)


def split(x: Tensor, widths: list[int]) -> tuple[Tensor, ...]:
    """ONNX Split of the last axis into tensors with these widths."""
    shapes = [(*x.shape[:-1], width) for width in widths]
    results = torch.onnx.ops.symbolic_multi_out(
        "Split", (x, torch.tensor(widths)), {"axis": -1}, dtypes=[x.dtype] * len(widths), shapes=shapes, version=18
    )
    return tuple(results)


def parameter(*shape: int) -> nn.Parameter:
    """A parameter that is traced and never filled."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class TracedRMSNorm(nn.Module):
    """RMSNormalization-23; its statistics are float32 by the operator's default `stash_type`."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = parameter(hidden_size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return symbolic(
            "RMSNormalization",
            (x, self.weight),
            {"axis": -1, "epsilon": self.eps},
            dtype=x.dtype,
            shape=x.shape,
            version=23,
        )


class Projection(nn.Module):
    """x @ weight with weight stored [in, out]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = parameter(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.weight)


def traced_prepare_qkv(
    x: Tensor, cos: Tensor, sin: Tensor, qkv_proj: nn.Module, config: ModelConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Projects x to queries, keys and values by one product, splits them into heads, and rotates queries and keys.

    Args:
        x: [B, T, E].
        cos, sin: float32 [B, T, D/2].
        qkv_proj: the three projections side by side.
        config: the geometry.

    Returns:
        Q_r [B, H, T, D], K_r [B, K, T, D] and V [B, K, T, D].
    """
    widths = [n_heads * config.head_dim for n_heads in (config.n_heads, config.n_kv_heads, config.n_kv_heads)]
    q, k, v = split(named("attention.qkv_proj", qkv_proj(x)), widths)

    q = named("attention.q_proj", q)
    q = named("attention.reshape_q", _split_heads(q, config.n_heads, config.head_dim))
    q = named("attention.q_heads", q.transpose(1, 2))

    k = named("attention.k_proj", k)
    k = named("attention.reshape_k", _split_heads(k, config.n_kv_heads, config.head_dim))
    k = named("attention.k_heads", k.transpose(1, 2))

    v = named("attention.v_proj", v)
    v = named("attention.reshape_v", _split_heads(v, config.n_kv_heads, config.head_dim))
    v = named("attention.v_heads", v.transpose(1, 2))

    q_rotated = named("attention.rope_q", _rotate(q, cos, sin))
    k_rotated = named("attention.rope_k", _rotate(k, cos, sin))
    return q_rotated, k_rotated, v


def _split_heads(x: Tensor, n_heads: int, head_dim: int) -> Tensor:
    return reshape(x, [0, 0, n_heads, head_dim], (x.shape[0], x.shape[1], n_heads, head_dim))


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.onnx.ops.rotary_embedding(heads.float(), cos, sin, interleaved=True).to(heads.dtype)


def traced_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, float32: bool) -> Tensor:
    """Attention-23 with an explicit mask and native GQA; with `float32`, its inputs and result are cast."""
    dtype = queries.dtype
    if float32:
        queries, keys, values = queries.float(), keys.float(), values.float()
    heads = torch.onnx.ops.attention(queries, keys, values, mask)[0]
    return named("attention.heads", heads.to(dtype))


def traced_merge_project(heads: Tensor, o_proj: nn.Module) -> Tensor:
    """H [B, H, T, D] → delta_attn [B, T, E]."""
    width = heads.shape[1] * heads.shape[3]
    moved = heads.transpose(1, 2)
    merged = named("attention.merged", reshape(moved, [0, 0, width], (moved.shape[0], moved.shape[1], width)))
    return named("attention.o_proj", o_proj(merged))


class TracedSwiGLU(nn.Module):
    """x [B, T, E] → delta_mlp [B, T, E]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.width = config.intermediate_size
        self.gate_up_proj = Projection(config.hidden_size, 2 * self.width)
        self.down_proj = Projection(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = split(named("mlp.gate_up_proj", self.gate_up_proj(x)), [self.width, self.width])
        activated = named("mlp.silu", F.silu(named("mlp.gate_proj", gate)))
        product = named("mlp.product", activated * named("mlp.up_proj", up))
        return named("mlp.down_proj", self.down_proj(product))


class TracedProjections(nn.Module):
    """The projections of a block's attention, the first three as one."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
        self.qkv_proj = Projection(config.hidden_size, width)
        self.o_proj = Projection(config.n_heads * config.head_dim, config.hidden_size)


class CacheForm(ABC):
    """How a graph takes and returns its cache. Equal forms trace equal graphs.

    Attributes:
        past_axis: the symbol of a past tensor's rows.
        step_inputs: names of the graph inputs that the prologue reads, in order.
        step_values: names of the values that the prologue computes, in order.
        block_inputs: names of the inputs and values of the step that a block reads after `cos`, `sin` and `visible`.
    """

    past_axis: str
    step_inputs: tuple[str, ...]
    step_values: tuple[str, ...]
    block_inputs: tuple[str, ...]

    @abstractmethod
    def prologue(self, tables: RopeTables, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Computes the step's values from the step's inputs."""

    @abstractmethod
    def update(self, past: Tensor, new: Tensor, total_length: int, *shared: Tensor) -> Tensor:
        """Returns the present of one tensor: past with the new rows [B, K, T, D] in it.

        Args:
            past: [B, K, C or P, D].
            new: [B, K, T, D].
            total_length: L, the rows in use after the update.
            shared: the block's inputs after `visible`.
        """

    @abstractmethod
    def rows_in_use(self, name: str, present: Tensor, total_length: int, *shared: Tensor) -> Tensor:
        """Returns the rows that attention reads, [B, K, L, D].

        Args:
            name: name of the result, where it is another value than `present`.
            present: [B, K, C or L, D].
            total_length: L.
            shared: the block's inputs after `visible`.
        """


class TracedBlock(nn.Module):
    """One block over a cache of any form."""

    def __init__(self, config: ModelConfig, float32_attention: bool, cache: CacheForm) -> None:
        super().__init__()
        self.config, self.float32_attention, self.cache = config, float32_attention, cache
        self.attention_norm = TracedRMSNorm(config.hidden_size, config.norm_eps)
        self.attention = TracedProjections(config)
        self.ffn_norm = TracedRMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = TracedSwiGLU(config)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, visible: Tensor, *shared_and_past: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns hidden states [B, T, E] and the present of keys and of values.

        Args:
            x: hidden states [B, T, E].
            cos, sin: float32 [B, T, D/2].
            visible: bool [B, 1, T, L].
            shared_and_past: what the form of the cache reads beside them, then the past of keys and of values.
        """
        *shared, past_key, past_value = shared_and_past
        total_length = visible.shape[-1]
        normed = named("attention_norm", self.attention_norm(x))
        queries, keys, values = traced_prepare_qkv(normed, cos, sin, self.attention.qkv_proj, self.config)

        present_key = self.cache.update(past_key, keys, total_length, *shared)
        present_value = self.cache.update(past_value, values, total_length, *shared)
        keys = self.cache.rows_in_use("attention.keys", present_key, total_length, *shared)
        values = self.cache.rows_in_use("attention.values", present_value, total_length, *shared)

        heads = traced_attention(queries, keys, values, visible, self.float32_attention)
        delta = traced_merge_project(heads, self.attention.o_proj)
        h = named("attention.residual", x + delta)

        normed = named("ffn_norm", self.ffn_norm(h))
        delta = self.mlp(normed)
        return named("mlp.residual", h + delta), present_key, present_value


class RopeTables(nn.Module):
    """Cosine and sine of every position, float32 [2N, D/2] each."""

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        super().__init__()
        self.cos_table = parameter(2 * max_positions, config.head_dim // 2)
        self.sin_table = parameter(2 * max_positions, config.head_dim // 2)

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """position_ids int64 [B, T] → cos and sin float32 [B, T, D/2]."""
        cos = named("rope.cos", F.embedding(position_ids, self.cos_table))
        sin = named("rope.sin", F.embedding(position_ids, self.sin_table))
        return cos, sin


class Prologue(nn.Module):
    """Computes the values that all blocks share, once a step: rotation, visibility, and values for the cache."""

    def __init__(self, config: ModelConfig, max_positions: int, cache: CacheForm) -> None:
        super().__init__()
        self.rope = RopeTables(config, max_positions)
        self.cache = cache

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self.cache.prologue(self.rope, *inputs)


class Embedding(nn.Module):
    """input_ids [B, T] → hidden states [B, T, E]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = parameter(config.vocab_size, config.hidden_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        return named("embedding", F.embedding(input_ids, self.weight))


class ZeroPads(nn.Module):
    """The epilogue of a block or stack: zeroes padded tokens of hidden states [B, T, E]."""

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        return torch.where(real[:, :, None], x, torch.zeros((), dtype=x.dtype))


class Head(nn.Module):
    """The epilogue of a model: final norm and output head, with float32 logits.

    The weight of the head is [V, E], so that a tied model stores one matrix; Gemm reads it transposed. A head in
    integers is a separate matrix and `transposed`, as projections are.
    """

    def __init__(self, config: ModelConfig, logits: str, transposed: bool) -> None:
        super().__init__()
        self.config, self.logits, self.transposed = config, logits, transposed
        self.norm = TracedRMSNorm(config.hidden_size, config.norm_eps)
        shape = (config.vocab_size, config.hidden_size)
        self.weight = parameter(*(shape[::-1] if transposed else shape))

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """Returns float32 logits: [B, V] with logits "last", else [B, T, V].

        Args:
            x: hidden states [B, T, E].
            real: bool [B, T]; with logits "last" only.
        """
        batch, length, hidden = x.shape
        if self.logits == "last":
            assert real is not None, "it is an input of such a head"
            last = last_token(real)[:, None]
            x = symbolic("GatherND", (x, last), {"batch_dims": 1}, dtype=x.dtype, shape=(batch, hidden))
            x = named("last_token", x)
        x = named("norm", self.norm(x))
        if self.transposed:
            return named("lm_head", torch.matmul(x, self.weight)).float()
        if self.logits == "last":
            return self.project(x, batch).float()
        flat = reshape(x, [-1, hidden], (batch * length, hidden))
        logits = self.project(flat, batch * length)
        # the flattened logits take the batch and sequence sizes of x again
        sizes = symbolic("Shape", (x,), {"start": 0, "end": 2}, dtype=torch.int64, shape=(2,))
        target = torch.cat([sizes, torch.tensor([self.config.vocab_size])])
        return symbolic(
            "Reshape", (logits, target), dtype=x.dtype, shape=(batch, length, self.config.vocab_size)
        ).float()

    def project(self, x: Tensor, rows: int) -> Tensor:
        product = symbolic("Gemm", (x, self.weight), {"transB": 1}, dtype=x.dtype, shape=(rows, self.config.vocab_size))
        return named("lm_head", product)
