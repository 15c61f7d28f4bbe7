"""The names of tensors in checkpoints: from a weight's canonical name to its name at Hugging Face and at Meta."""

from __future__ import annotations

import re

# Canonical name inside a block → (Hugging Face's name inside a layer, Meta's name inside a layer).
_LAYER_NAMES = {
    "attention_norm": ("input_layernorm", "attention_norm"),
    "attention.q_proj": ("self_attn.q_proj", "attention.wq"),
    "attention.k_proj": ("self_attn.k_proj", "attention.wk"),
    "attention.v_proj": ("self_attn.v_proj", "attention.wv"),
    "attention.o_proj": ("self_attn.o_proj", "attention.wo"),
    "ffn_norm": ("post_attention_layernorm", "ffn_norm"),
    "mlp.gate_proj": ("mlp.gate_proj", "feed_forward.w1"),
    "mlp.up_proj": ("mlp.up_proj", "feed_forward.w3"),
    "mlp.down_proj": ("mlp.down_proj", "feed_forward.w2"),
}
# Canonical name outside of the blocks → (Hugging Face's name, Meta's name).
_MODEL_NAMES = {
    "embedding": ("model.embed_tokens", "tok_embeddings"),
    "norm": ("model.norm", "norm"),
    "lm_head": ("lm_head", "output"),
}
# Tensors that some checkpoints store and that the config determines: RoPE's frequencies. They are ignored.
HUGGINGFACE_DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
META_DERIVED = "rope.freqs"


def huggingface_name(name: str) -> str:
    """Returns the name of a weight in a Hugging Face folder."""
    return _stored_name(name, "model.layers", 0)


def meta_name(name: str) -> str:
    """Returns the name of a weight in a Meta folder."""
    return _stored_name(name, "layers", 1)


def _stored_name(name: str, layers: str, column: int) -> str:
    module, _, kind = name.rpartition(".")  # kind: "weight", or "bias" where a projection has one
    if module in _MODEL_NAMES:
        return f"{_MODEL_NAMES[module][column]}.{kind}"
    _, layer, part = module.split(".", 2)
    return f"{layers}.{layer}.{_LAYER_NAMES[part][column]}.{kind}"
