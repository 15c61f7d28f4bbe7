"""The traced form of each component as a module of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from exporter.graph.fused_decoder import (
    TracedProjections,
    TracedRMSNorm,
    TracedSwiGLU,
    reshape,
    symbolic,
    traced_attention,
    traced_merge_project,
    traced_prepare_qkv,
)
from exporter.spec.catalogue import ModelConfig


class TracedRepeatKV(nn.Module):
    """x [B, S, K, D] → y [B, S, H, D]: repeats each head n_rep times in place. Only a component graph has it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        config = self.config
        batch, length, kv_heads, head_dim = x.shape
        grouped = symbolic(
            "Unsqueeze", (x, torch.tensor([3])), dtype=x.dtype, shape=(batch, length, kv_heads, 1, head_dim)
        )
        repeats = (batch, length, kv_heads, config.n_rep, head_dim)
        copies = symbolic("Expand", (grouped, torch.tensor([1, 1, 1, config.n_rep, 1])), dtype=x.dtype, shape=repeats)
        return reshape(copies, [0, 0, config.n_heads, head_dim], (batch, length, config.n_heads, head_dim))


class TracedPrepareQKV(nn.Module):
    """`prepare_qkv` with the rotation as one tensor R float32 [T, D/2, 2], as the contract of the component has it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.qkv_proj = TracedProjections(config).qkv_proj

    def forward(self, x: Tensor, R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cos = R[None, :, :, 0].expand(x.shape[0], -1, -1)
        sin = R[None, :, :, 1].expand(x.shape[0], -1, -1)
        return traced_prepare_qkv(x, cos, sin, self.qkv_proj, self.config)


class TracedAttention(nn.Module):
    """`attention` as a component of its own."""

    def __init__(self, float32: bool) -> None:
        super().__init__()
        self.float32 = float32

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        return traced_attention(queries, keys, values, mask, self.float32)


class TracedMergeProject(nn.Module):
    """`merge_project` as a component of its own."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.o_proj = TracedProjections(config).o_proj

    def forward(self, heads: Tensor) -> Tensor:
        return traced_merge_project(heads, self.o_proj)


def traced_component(config: ModelConfig, name: str, float32_attention: bool) -> nn.Module:
    """Returns the traced form of one component, with the inputs and outputs of the contract."""
    modules: dict[str, Callable[[], nn.Module]] = {
        "prepare_qkv": lambda: TracedPrepareQKV(config),
        "repeat_kv": lambda: TracedRepeatKV(config),
        "attention": lambda: TracedAttention(float32_attention),
        "merge_project": lambda: TracedMergeProject(config),
        "swiglu_mlp": lambda: TracedSwiGLU(config),
        "rms_norm": lambda: TracedRMSNorm(config.hidden_size, config.norm_eps),
    }
    return modules[name]()
