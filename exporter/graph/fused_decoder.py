"""The traced form: the same decoder with the standard's fused operators, in the fragments a graph is assembled from.

A graph is `Prologue`, `Embedding` (models), one `TracedBlock` a layer, and an epilogue. Each fragment is traced once by
torch.onnx.export; `assemble.py` joins them. Weights are held as the graph stores them, projections [in, out].
Symbolic operators compute nothing in PyTorch: these modules exist to be traced, the eager ones to be run.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from exporter.model.block import cache_rows, last_token, real_tokens, visibility
from exporter.spec.catalogue import ModelConfig

_symbolic = torch.onnx.ops.symbolic

MARKER_DOMAIN = "blockline"  # operators of this domain name a value and vanish on assembly


def named(name: str, x: Tensor) -> Tensor:
    """Gives a value its name in the graph."""
    return _symbolic(f"{MARKER_DOMAIN}::Name", (x,), {"name": name}, dtype=x.dtype, shape=x.shape)


def reshape(x: Tensor, target: list[int], shape: tuple) -> Tensor:
    """ONNX Reshape with a constant target (0 keeps a dimension), so that no shape arithmetic enters the graph."""
    return _symbolic("Reshape", (x, torch.tensor(target)), dtype=x.dtype, shape=shape)


def split(x: Tensor, widths: list[int]) -> tuple[Tensor, ...]:
    """ONNX Split of the last axis into parts of these widths."""
    shapes = [(*x.shape[:-1], width) for width in widths]
    parts = torch.onnx.ops.symbolic_multi_out(
        "Split", (x, torch.tensor(widths)), {"axis": -1}, dtypes=[x.dtype] * len(widths), shapes=shapes, version=18
    )
    return tuple(parts)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class TracedRMSNorm(nn.Module):
    """RMSNormalization-23; its statistics are float32 by the operator's default `stash_type`."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = parameter(hidden_size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return _symbolic(
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


class TracedPrepareQKV(nn.Module):
    """x [B, T, E], cos and sin float32 [B, T, D/2] → Q_r [B, H, T, D], K_r and V [B, K, T, D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.n_heads = {"q": config.n_heads, "k": config.n_kv_heads, "v": config.n_kv_heads}
        self.qkv_proj = Projection(config.hidden_size, sum(self.n_heads.values()) * config.head_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        projected = split(
            named("attention.qkv_proj", self.qkv_proj(x)), [n * self.config.head_dim for n in self.n_heads.values()]
        )
        queries, keys, values = (self.heads(letter, part) for letter, part in zip(self.n_heads, projected, strict=True))
        return self.rotate("q", queries, cos, sin), self.rotate("k", keys, cos, sin), values

    def heads(self, letter: str, x: Tensor) -> Tensor:
        n_heads = self.n_heads[letter]
        x = named(f"attention.{letter}_proj", x)
        shape = (x.shape[0], x.shape[1], n_heads, self.config.head_dim)
        split = named(f"attention.reshape_{letter}", reshape(x, [0, 0, n_heads, self.config.head_dim], shape))
        return named(f"attention.{letter}_heads", split.transpose(1, 2))

    def rotate(self, letter: str, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned = torch.onnx.ops.rotary_embedding(heads.float(), cos, sin, interleaved=True)
        return named(f"attention.rope_{letter}", turned.to(heads.dtype))


class TracedAttention(nn.Module):
    """Attention-23 with an explicit mask and native GQA; `float32` computes it between casts, whatever the graph's dtype."""

    def __init__(self, float32: bool = False) -> None:
        super().__init__()
        self.float32 = float32

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        dtype = queries.dtype
        if self.float32:
            queries, keys, values = queries.float(), keys.float(), values.float()
        heads = torch.onnx.ops.attention(queries, keys, values, mask)[0]
        return named("attention.heads", heads.to(dtype))


class TracedMergeProject(nn.Module):
    """H [B, H, T, D] → delta_attn [B, T, E]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.o_proj = Projection(config.n_heads * config.head_dim, config.hidden_size)

    def forward(self, heads: Tensor) -> Tensor:
        width = heads.shape[1] * heads.shape[3]
        moved = heads.transpose(1, 2)
        merged = named("attention.merged", reshape(moved, [0, 0, width], (moved.shape[0], moved.shape[1], width)))
        return named("attention.o_proj", self.o_proj(merged))


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


class TracedBlock(nn.Module):
    """One block; its cache update is TensorScatter-24, whose present output shares past's memory."""

    def __init__(self, config: ModelConfig, float32_attention: bool) -> None:
        super().__init__()
        self.attention_norm = TracedRMSNorm(config.hidden_size, config.norm_eps)
        self.prepare_qkv = TracedPrepareQKV(config)
        self.attention = TracedAttention(float32_attention)
        self.merge_project = TracedMergeProject(config)
        self.ffn_norm = TracedRMSNorm(config.hidden_size, config.norm_eps)
        self.swiglu_mlp = TracedSwiGLU(config)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        visible: Tensor,
        total: Tensor,
        write_indices: Tensor,
        past_key: Tensor,
        past_value: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys, values = self.prepare_qkv(named("attention_norm", self.attention_norm(x)), cos, sin)
        present_key = self.update(past_key, keys, write_indices)
        present_value = self.update(past_value, values, write_indices)
        keys = named("attention.keys", self.read(present_key, total, visible.shape[-1]))
        values = named("attention.values", self.read(present_value, total, visible.shape[-1]))
        return self.after_cache(x, queries, keys, values, visible), present_key, present_value

    def after_cache(self, x: Tensor, queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
        h = named("attention.residual", x + self.merge_project(self.attention(queries, keys, values, visible)))
        return named("mlp.residual", h + self.swiglu_mlp(named("ffn_norm", self.ffn_norm(h))))

    @staticmethod
    def update(past: Tensor, new: Tensor, write_indices: Tensor) -> Tensor:
        return _symbolic(
            "TensorScatter", (past, new, write_indices), {"axis": 2}, dtype=past.dtype, shape=past.shape, version=24
        )

    @staticmethod
    def read(present: Tensor, total: Tensor, total_length: int) -> Tensor:
        """The first `total` int64 [1] rows of the cache: the step's cost follows the tokens in use, not the allocation."""
        shape = (present.shape[0], present.shape[1], total_length, present.shape[3])
        return _symbolic(
            "Slice", (present, torch.tensor([0]), total, torch.tensor([2])), dtype=present.dtype, shape=shape
        )


class GrowingBlock(TracedBlock):
    """One block over a cache that grows: present [B, K, P + T, D] is past [B, K, P, D] with the new rows after it."""

    def forward(  # type: ignore[override] # its graph has other inputs, and each is traced by itself
        self, x: Tensor, cos: Tensor, sin: Tensor, visible: Tensor, past_key: Tensor, past_value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys, values = self.prepare_qkv(named("attention_norm", self.attention_norm(x)), cos, sin)
        keys, values = (
            self.append(past_key, keys, visible.shape[-1]),
            self.append(past_value, values, visible.shape[-1]),
        )
        return self.after_cache(x, queries, keys, values, visible), keys, values

    @staticmethod
    def append(past: Tensor, new: Tensor, total_length: int) -> Tensor:
        shape = (past.shape[0], past.shape[1], total_length, past.shape[3])
        return _symbolic("Concat", (past, new), {"axis": 2}, dtype=past.dtype, shape=shape)


class Prologue(nn.Module):
    """What all blocks share, computed once a step: rotation, visibility, total length, and which tokens are real."""

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        super().__init__()
        self.rope_cos = parameter(2 * max_positions, config.head_dim // 2)
        self.rope_sin = parameter(2 * max_positions, config.head_dim // 2)

    def forward(self, position_ids: Tensor, write_indices: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        rows = cache_rows(write_indices, position_ids.shape[1])
        real = real_tokens(attention_mask, rows)
        total = _symbolic("Shape", (attention_mask,), {"start": 1, "end": 2}, dtype=torch.int64, shape=(1,))
        return (
            *self.rotation(position_ids),
            named("attention_mask.visible", visibility(attention_mask, rows, real)),
            named("attention_mask.total_length", total),
            named("attention_mask.real", real),
        )

    def rotation(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return named("rope.cos", F.embedding(position_ids, self.rope_cos)), named(
            "rope.sin", F.embedding(position_ids, self.rope_sin)
        )


class GrowingPrologue(Prologue):
    """The prologue over a cache that grows: every row's first new token goes to row P = total length − T."""

    def forward(self, position_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override] # as in GrowingBlock
        batch, length = position_ids.shape
        past_len = attention_mask.shape[1] - length
        rows = cache_rows(torch.full((1,), past_len), length).expand(batch, length)
        visible = visibility(attention_mask, rows, real_tokens(attention_mask, rows))
        return (*self.rotation(position_ids), named("attention_mask.visible", visible))


class Embedding(nn.Module):
    """input_ids [B, T] → hidden states [B, T, E]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = parameter(config.vocab_size, config.hidden_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        return named("embedding", F.embedding(input_ids, self.weight))


class ZeroPads(nn.Module):
    """The epilogue of a block or stack: hidden states [B, T, E] with padded tokens zeroed."""

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        return torch.where(real[:, :, None], x, torch.zeros((), dtype=x.dtype))


class Head(nn.Module):
    """The epilogue of a model: final norm and output head, in float32 at the end. The head's weight is [V, E], so that a
    tied model stores one matrix; Gemm reads it transposed. A matrix of its own in integers is `transposed`, as projections are."""

    def __init__(self, config: ModelConfig, logits: str, transposed: bool) -> None:
        super().__init__()
        self.config, self.logits, self.transposed = config, logits, transposed
        self.norm = TracedRMSNorm(config.hidden_size, config.norm_eps)
        shape = (config.vocab_size, config.hidden_size)
        self.weight = parameter(*(shape[::-1] if transposed else shape))

    def forward(self, x: Tensor, write_indices: Tensor | None = None, attention_mask: Tensor | None = None) -> Tensor:
        """x [B, T, E] → logits; `write_indices` [B] and `attention_mask` [B, L] say which token is the last where that is asked for."""
        batch, length, hidden = x.shape
        if self.logits == "last":
            assert attention_mask is not None and write_indices is not None, "they are inputs of such a head"
            last = last_token(attention_mask, write_indices)[:, None]
            x = named(
                "last_token", _symbolic("GatherND", (x, last), {"batch_dims": 1}, dtype=x.dtype, shape=(batch, hidden))
            )
        x = named("norm", self.norm(x))
        if self.transposed:
            return named("lm_head", torch.matmul(x, self.weight)).float()
        if self.logits == "last":
            return self.project(x, batch).float()
        flat = reshape(x, [-1, hidden], (batch * length, hidden))
        logits = self.project(flat, batch * length)
        # the batch and sequence sizes are read back from x, whose rows were flattened
        sizes = _symbolic("Shape", (x,), {"start": 0, "end": 2}, dtype=torch.int64, shape=(2,))
        target = torch.cat([sizes, torch.tensor([self.config.vocab_size])])
        return _symbolic(
            "Reshape", (logits, target), dtype=x.dtype, shape=(batch, length, self.config.vocab_size)
        ).float()

    def project(self, x: Tensor, rows: int) -> Tensor:
        product = _symbolic(
            "Gemm", (x, self.weight), {"transB": 1}, dtype=x.dtype, shape=(rows, self.config.vocab_size)
        )
        return named("lm_head", product)


class TracedRepeatKV(nn.Module):
    """x [B, S, K, D] → y [B, S, H, D]: each head expanded n_rep times in place. Only a component graph holds this."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        config = self.config
        batch, length, kv_heads, head_dim = x.shape
        grouped = _symbolic(
            "Unsqueeze", (x, torch.tensor([3])), dtype=x.dtype, shape=(batch, length, kv_heads, 1, head_dim)
        )
        repeats = (batch, length, kv_heads, config.n_rep, head_dim)
        copies = _symbolic("Expand", (grouped, torch.tensor([1, 1, 1, config.n_rep, 1])), dtype=x.dtype, shape=repeats)
        return reshape(copies, [0, 0, config.n_heads, head_dim], (batch, length, config.n_heads, head_dim))


class ComponentPrepareQKV(TracedPrepareQKV):
    """`prepare_qkv` with the rotation as one tensor R float32 [T, D/2, 2], as the component's contract has it."""

    def forward(self, x: Tensor, R: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override] # as in GrowingBlock
        batch = x.shape[0]
        cos, sin = (R[None, :, :, part].expand(batch, -1, -1) for part in (0, 1))
        return super().forward(x, cos, sin)


def traced_component(config: ModelConfig, name: str, float32_attention: bool) -> nn.Module:
    """The traced form of one component, with the inputs and outputs of the contract."""
    return {
        "prepare_qkv": lambda: ComponentPrepareQKV(config),
        "repeat_kv": lambda: TracedRepeatKV(config),
        "attention": lambda: TracedAttention(float32_attention),
        "merge_project": lambda: TracedMergeProject(config),
        "swiglu_mlp": lambda: TracedSwiGLU(config),
        "rms_norm": lambda: TracedRMSNorm(config.hidden_size, config.norm_eps),
    }[name]()
