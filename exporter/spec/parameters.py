"""The weights of a block as data, and the canonical name and shape of every weight of a unit.

A new weight of a block takes one line in BLOCK_WEIGHTS, a parameter in the eager and the traced module, and its name
in each checkpoint format. Reading, reordering, merging, storing and taking apart follow from BLOCK_WEIGHTS.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from exporter.spec.catalogue import ModelConfig
from exporter.spec.unit import Unit


@dataclass(frozen=True)
class BlockWeight:
    """One weight of a block.

    Attributes:
        name: canonical name inside the block, such as `attention.q_proj.weight`.
        component: the component that reads it. The two norms are components under their own names.
        axes: names of its sizes, outputs first: "hidden", "queries", "keys" or "mlp".
        rotated: whether RoPE turns its outputs. A checkpoint with half-split pairs then has its outputs in another
            order.
        merged_into: the projection that stores it side by side with others; None where it is stored by itself.
    """

    name: str
    component: str
    axes: tuple[str, ...]
    rotated: bool = False
    merged_into: str | None = None

    @property
    def module(self) -> str:
        """The name without its last part: `attention.q_proj` for `attention.q_proj.weight`."""
        return self.name.rpartition(".")[0]

    @property
    def stored_name(self) -> str:
        """The name, inside the block, of the stored tensor that holds it."""
        kind = self.name.rpartition(".")[2]
        return self.name if self.merged_into is None else f"{self.merged_into}.{kind}"

    def shape(self, config: ModelConfig) -> tuple[int, ...]:
        """[out, in] for projections, [E] for norms."""
        sizes = {
            "hidden": config.hidden_size,
            "queries": config.n_heads * config.head_dim,
            "keys": config.n_kv_heads * config.head_dim,
            "mlp": config.intermediate_size,
        }
        return tuple(sizes[axis] for axis in self.axes)


# In the order of a block's operations. Merged projections are one product: one read of their input, fewer operators.
BLOCK_WEIGHTS = (
    BlockWeight("attention_norm.weight", "attention_norm", ("hidden",)),
    BlockWeight("attention.q_proj.weight", "prepare_qkv", ("queries", "hidden"), True, "attention.qkv_proj"),
    BlockWeight("attention.k_proj.weight", "prepare_qkv", ("keys", "hidden"), True, "attention.qkv_proj"),
    BlockWeight("attention.v_proj.weight", "prepare_qkv", ("keys", "hidden"), False, "attention.qkv_proj"),
    BlockWeight("attention.o_proj.weight", "merge_project", ("hidden", "queries")),
    BlockWeight("ffn_norm.weight", "ffn_norm", ("hidden",)),
    BlockWeight("mlp.gate_proj.weight", "swiglu_mlp", ("mlp", "hidden"), False, "mlp.gate_up_proj"),
    BlockWeight("mlp.up_proj.weight", "swiglu_mlp", ("mlp", "hidden"), False, "mlp.gate_up_proj"),
    BlockWeight("mlp.down_proj.weight", "swiglu_mlp", ("hidden", "mlp")),
)
COMPONENT_OF_WEIGHT = {weight.module: weight.component for weight in BLOCK_WEIGHTS}
MERGED_WEIGHTS = {
    merged: tuple(weight.module for weight in BLOCK_WEIGHTS if weight.merged_into == merged)
    for merged in dict.fromkeys(weight.merged_into for weight in BLOCK_WEIGHTS)
    if merged is not None
}
ROPE_TABLES = ("rope.cos_table", "rope.sin_table")


def component_weights(component: str) -> tuple[BlockWeight, ...]:
    """The weights of a component unit. A block has two norms; the component `rms_norm` is the first of them."""
    owner = "attention_norm" if component == "rms_norm" else component
    return tuple(weight for weight in BLOCK_WEIGHTS if weight.component == owner)


def held_weights(stored: str) -> tuple[BlockWeight, ...]:
    """The weights that a stored tensor of a block holds, in order; empty for a name that no stored tensor has.

    Args:
        stored: name of the tensor inside the block, such as `attention.qkv_proj.weight`.
    """
    return tuple(weight for weight in BLOCK_WEIGHTS if weight.stored_name == stored)


def name_in_block(component: str, parameter: str) -> str:
    """The name, inside the block, of a parameter of a component's own module.

    Args:
        component: name of the component, such as `prepare_qkv`.
        parameter: name in the module: `q_proj.weight` in the eager one, `qkv_proj.weight` in the traced one.
    """
    weights = component_weights(component)
    names = dict.fromkeys(name for weight in weights for name in (weight.name, weight.stored_name))
    (name,) = (name for name in names if name.endswith(f".{parameter}"))
    return name


def split_name(name: str) -> tuple[str, str]:
    """A canonical name as its block and the name inside the block: `blocks.3` and `attention.q_proj.weight`.

    The block is "" for a weight outside of blocks.
    """
    prefix, number, rest = (*name.split(".", 2), "", "")[:3]
    return (f"{prefix}.{number}", rest) if prefix == "blocks" and rest else ("", name)


def renumbered(name: str, first_layer: int) -> str:
    """The canonical name of a weight of a graph or module that numbers its blocks from 0.

    Args:
        name: the name there.
        first_layer: index, in the model, of block 0 of the graph or module.
    """
    block, rest = split_name(name)
    number = block.removeprefix("blocks.")
    return f"blocks.{int(number) + first_layer}.{rest}" if number.isdecimal() else name


def is_rotated(name: str) -> bool:
    """Whether RoPE turns the outputs of a weight, by canonical name."""
    _, rest = split_name(name)
    return any(weight.rotated for weight in BLOCK_WEIGHTS if weight.name == rest)


def block_weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The weights of one block in the order of its operations: name inside the block → shape."""
    return {weight.name: weight.shape(config) for weight in BLOCK_WEIGHTS}


def weight_shapes(config: ModelConfig, unit: Unit) -> dict[str, tuple[int, ...]]:
    """Every stored weight of a unit: canonical name → shape. Blocks are numbered as in the whole model.

    A tied model has no `lm_head.weight`: its output head is `embedding.weight`.
    """
    return dict(_weights(config, unit))


def _weights(config: ModelConfig, unit: Unit) -> Iterator[tuple[str, tuple[int, ...]]]:
    if unit.kind == "model":
        yield "embedding.weight", (config.vocab_size, config.hidden_size)
    in_block = BLOCK_WEIGHTS if unit.component is None else component_weights(unit.component)
    for layer in range(unit.first_layer, unit.first_layer + unit.n_layers):
        for weight in in_block:
            yield f"blocks.{layer}.{weight.name}", weight.shape(config)
    if unit.kind == "model":
        yield "norm.weight", (config.hidden_size,)
        if not config.tie_word_embeddings:
            yield "lm_head.weight", (config.vocab_size, config.hidden_size)
