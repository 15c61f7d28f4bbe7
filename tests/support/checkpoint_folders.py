"""Writes checkpoints with known weights in both formats.

Names and row orders are written out here, so that they are independent of the loaders.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from exporter.model.weights import RandomWeights, WeightSource
from exporter.spec.catalogue import ModelConfig
from exporter.spec.parameters import weight_shapes
from exporter.spec.unit import Unit


class Absent:
    def __repr__(self) -> str:
        return "ABSENT"  # the same in every process, because it stands in names of tests


ABSENT = Absent()  # an override that leaves the key out of config.json
LLAMA3_RULE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LAYER_PARTS = {
    "attention_norm": "input_layernorm",
    "attention.q_proj": "self_attn.q_proj",
    "attention.k_proj": "self_attn.k_proj",
    "attention.v_proj": "self_attn.v_proj",
    "attention.o_proj": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "mlp.gate_proj": "mlp.gate_proj",
    "mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
}
META_PARTS = {
    "attention.q_proj": "attention.wq",
    "attention.k_proj": "attention.wk",
    "attention.v_proj": "attention.wv",
    "attention.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
META_MODEL_PARTS = {"embedding": "tok_embeddings", "norm": "norm", "lm_head": "output"}
MODEL_PARTS = {"embedding": "model.embed_tokens", "norm": "model.norm", "lm_head": "lm_head"}


def write_huggingface(
    folder: Path,
    config: ModelConfig,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    source: WeightSource | None = None,
    **config_overrides: object,
) -> Path:
    """Writes config.json and safetensors, with an index where shards > 1, and returns the folder.

    The weights come from `source`, by default RandomWeights(config, seed).
    """
    folder.mkdir(parents=True)
    write_json(folder / "config.json", huggingface_config(config, **config_overrides))
    source = source or RandomWeights(config, seed)
    tensors = {}
    for name in canonical_names(config):
        tensor = source.read(name)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = half_split_pairs(tensor, config.head_dim)
        tensors[huggingface_name(name)] = tensor.to(dtype).contiguous()
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(tensors)}
    for shard in set(weight_map.values()):
        held = {name: tensor for name, tensor in tensors.items() if weight_map[name] == shard}
        save_file(held, folder / shard, metadata={"format": "pt"})
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    return folder


def huggingface_config(config: ModelConfig, **overrides: object) -> dict:
    """Returns the content of config.json in the older spelling. Overrides replace keys, and ABSENT removes one."""
    scaling = config.rope_scaling and {
        "type": "llama3",
        "factor": config.rope_scaling.factor,
        "low_freq_factor": config.rope_scaling.low_freq_factor,
        "high_freq_factor": config.rope_scaling.high_freq_factor,
        "original_max_position_embeddings": config.rope_scaling.original_context_length,
    }
    data = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "attention_bias": False,
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": 2,
    }
    return {key: value for key, value in (data | overrides).items() if value is not ABSENT}


def edit_config(folder: Path, config: ModelConfig, **overrides: object) -> None:
    """Replaces a folder's config.json by that of `huggingface_config`."""
    write_json(folder / "config.json", huggingface_config(config, **overrides))


def canonical_names(config: ModelConfig) -> list[str]:
    return list(weight_shapes(config, Unit("model", n_layers=config.n_layers)))


def huggingface_name(name: str) -> str:
    parts = name.removesuffix(".weight").split(".", 2)
    if parts[0] == "blocks":
        return f"model.layers.{parts[1]}.{LAYER_PARTS[parts[2]]}.weight"
    return f"{MODEL_PARTS[parts[0]]}.weight"


def meta_name(name: str) -> str:
    parts = name.removesuffix(".weight").split(".", 2)
    if parts[0] == "blocks":
        return f"layers.{parts[1]}.{META_PARTS.get(parts[2], parts[2])}.weight"
    return f"{META_MODEL_PARTS[parts[0]]}.weight"


def meta_shards(
    config: ModelConfig, source: WeightSource, shards: int, embedding_axis: int = 0
) -> list[dict[str, torch.Tensor]]:
    """Returns the weights of a source, split as a model-parallel run of `shards` saves them.

    They always have an output head.
    """
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(shards)]
    for name in dict.fromkeys((*canonical_names(config), "lm_head.weight")):
        tied = config.tie_word_embeddings and name == "lm_head.weight"
        tensor = source.read("embedding.weight" if tied else name)
        axis = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        axis = embedding_axis if name == "embedding.weight" else axis
        pieces = tensor.chunk(shards, axis) if tensor.dim() == 2 else [tensor] * shards
        for part, piece in zip(parts, pieces, strict=True):
            part[meta_name(name)] = piece.clone()
    return parts


def half_split_pairs(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorders Meta's rows (pairs 2i, 2i + 1) into Hugging Face's order (pairs i, i + D/2), head by head."""
    heads = weight.reshape(-1, head_dim, weight.shape[-1])
    return torch.cat([heads[:, 0::2], heads[:, 1::2]], dim=1).reshape(weight.shape)


def rewrite_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Lets `change` alter the tensors of a folder's model.safetensors."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def write_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data), encoding="utf-8")
