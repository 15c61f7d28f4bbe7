"""Each component of a block as a module of its own, and the eager module of any unit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from exporter.model.block import (
    AttentionProjections,
    Decoder,
    RMSNorm,
    SwiGLU,
    attention,
    merge_project,
    prepare_qkv,
    repeat_kv,
)
from exporter.model.observe import See, unseen
from exporter.spec.catalogue import ModelConfig
from exporter.spec.parameters import name_in_block, renumbered
from exporter.spec.unit import Unit


class PrepareQKV(nn.Module):
    """`prepare_qkv` with its three projections."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        projections = AttentionProjections(config)
        self.q_proj, self.k_proj, self.v_proj = projections.q_proj, projections.k_proj, projections.v_proj

    def forward(self, x: Tensor, R: Tensor, see: See = unseen) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, E] and R float32 [T, D/2, 2] → Q_r [B, H, T, D], K_r [B, K, T, D] and V [B, K, T, D]."""
        return prepare_qkv(x, R, self.q_proj, self.k_proj, self.v_proj, see)


class MergeProject(nn.Module):
    """`merge_project` with its projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.o_proj = AttentionProjections(config).o_proj

    def forward(self, heads: Tensor, see: See = unseen) -> Tensor:
        """H [B, H, T, D] → delta_attn [B, T, E]."""
        return merge_project(heads, self.o_proj, see)


class WithoutWeights(nn.Module):
    """A component that is a function alone."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


OBSERVED = (Decoder, PrepareQKV, MergeProject, SwiGLU)  # modules that call an observer; others are one operation


def component(config: ModelConfig, name: str) -> nn.Module:
    """Returns the module of one component, by its name in the contract."""
    modules: dict[str, Callable[[], nn.Module]] = {
        "prepare_qkv": lambda: PrepareQKV(config),
        "repeat_kv": lambda: WithoutWeights(partial(repeat_kv, n_rep=config.n_rep)),
        "attention": lambda: WithoutWeights(attention),
        "merge_project": lambda: MergeProject(config),
        "swiglu_mlp": lambda: SwiGLU(config),
        "rms_norm": lambda: RMSNorm(config.hidden_size, config.norm_eps),
    }
    return modules[name]()


def eager_module(config: ModelConfig, unit: Unit, max_positions: int) -> nn.Module:
    """Returns the eager module of a unit; under `torch.device("meta")` it allocates no weights."""
    return component(config, unit.component) if unit.component is not None else Decoder(config, unit, max_positions)


def canonical_name(unit: Unit, parameter: str) -> str:
    """The canonical name of a parameter of this unit's eager module, such as `blocks.3.attention.q_proj.weight`."""
    if unit.component is not None:
        parameter = f"blocks.0.{name_in_block(unit.component, parameter)}"
    return renumbered(parameter, unit.first_layer)
