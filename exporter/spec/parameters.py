"""The canonical name and shape of every weight."""

from __future__ import annotations

from collections.abc import Iterator

from exporter.spec.catalogue import ModelConfig
from exporter.spec.unit import Unit

COMPONENT_OF_WEIGHT = {  # a block's weights, in the order of its operations, and the component that owns each
    "attention_norm": "attention_norm",
    "attention.q_proj": "prepare_qkv",
    "attention.k_proj": "prepare_qkv",
    "attention.v_proj": "prepare_qkv",
    "attention.o_proj": "merge_project",
    "ffn_norm": "ffn_norm",
    "mlp.gate_proj": "swiglu_mlp",
    "mlp.up_proj": "swiglu_mlp",
    "mlp.down_proj": "swiglu_mlp",
}
MERGED_WEIGHTS = {  # projections of one input, stored side by side and computed as one product: one pass over it, and fewer operators
    "attention.qkv_proj": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}

ROPE_TABLES = ("rope.cos_table", "rope.sin_table")


def block_weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """One block's weights in the order of its operations: name inside the block → shape, [out, in] for projections."""
    E, F = config.hidden_size, config.intermediate_size
    queries, keys = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    shapes = {
        "attention_norm": (E,),
        "attention.q_proj": (queries, E),
        "attention.k_proj": (keys, E),
        "attention.v_proj": (keys, E),
        "attention.o_proj": (E, queries),
        "ffn_norm": (E,),
        "mlp.gate_proj": (F, E),
        "mlp.up_proj": (F, E),
        "mlp.down_proj": (E, F),
    }
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def weight_shapes(config: ModelConfig, unit: Unit) -> dict[str, tuple[int, ...]]:
    """Every stored weight of a unit: canonical name → shape. Blocks are numbered as in the whole model.

    A tied model has no `lm_head.weight`: its output head is `embedding.weight`.
    """
    return dict(_weights(config, unit))


def _weights(config: ModelConfig, unit: Unit) -> Iterator[tuple[str, tuple[int, ...]]]:
    if unit.kind == "model":
        yield "embedding.weight", (config.vocab_size, config.hidden_size)
    owner = "attention_norm" if unit.component == "rms_norm" else unit.component
    for layer in range(unit.first_layer, unit.first_layer + unit.n_layers):
        for name, shape in block_weight_shapes(config).items():
            if unit.kind != "component" or COMPONENT_OF_WEIGHT[name.removesuffix(".weight")] == owner:
                yield f"blocks.{layer}.{name}", shape
    if unit.kind == "model":
        yield "norm.weight", (config.hidden_size,)
        if not config.tie_word_embeddings:
            yield "lm_head.weight", (config.vocab_size, config.hidden_size)
