"""Writes a checkpoint as a GGUF file for llama.cpp: in float32 or float16, or quantized by llama.cpp itself.

GGUF stores the rows of Q and K in Meta's order (adjacent pairs). Our weight sources give them in that order.
"""

from __future__ import annotations

import time
from pathlib import Path

import gguf

from benchmarks.machine.processes import measure_command
from benchmarks.peers.environments import SCRIPTS, prepare
from exporter.checkpoint.formats import open_checkpoint
from exporter.spec.catalogue import ModelConfig
from exporter.spec.parameters import weight_shapes
from exporter.spec.unit import Unit

TYPES = {"F32": gguf.GGMLQuantizationType.F32, "F16": gguf.GGMLQuantizationType.F16}
BLOCK_NAMES = {
    "attention_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "attention.q_proj": "attn_q",
    "attention.k_proj": "attn_k",
    "attention.v_proj": "attn_v",
    "attention.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
MODEL_NAMES = {"embedding": "token_embd", "norm": "output_norm", "lm_head": "output"}


def make(checkpoint: Path, file: Path, kind: str) -> dict:
    """Writes `file`; returns the seconds that it took and, where llama.cpp quantized it, the peak memory.

    Args:
        checkpoint: a checkpoint folder.
        file: path of the GGUF file.
        kind: a name in `TYPES`, or any type that llama.cpp's quantizer knows.

    Raises:
        PeerMissing: llama.cpp is missing.
        RuntimeError: llama.cpp refused to quantize.
    """
    if kind in TYPES:
        started = time.perf_counter()
        convert(checkpoint, file, kind)
        return {"seconds": round(time.perf_counter() - started, 2)}
    whole = file.with_suffix(".f32")
    convert(checkpoint, whole, "F32")
    script = str(SCRIPTS / "llama_cpp_quantize.py")
    figures = measure_command([str(prepare("llama_cpp")), script, str(whole), str(file), kind])
    whole.unlink()
    return figures


def convert(checkpoint: Path, file: Path, kind: str) -> None:
    """Writes a checkpoint's weights and geometry; norms stay float32. It writes no tokenizer."""
    opened = open_checkpoint(checkpoint)
    config = opened.config
    if config.rope_scaling is not None:
        raise RuntimeError(
            f"{checkpoint}: got scaled RoPE frequencies, expected plain ones; this converter writes no scaling"
        )
    writer = gguf.GGUFWriter(file, "llama")
    add_geometry(writer, config)
    writer.add_tokenizer_model("no_vocab")
    for name in weight_shapes(config, Unit("model", n_layers=config.n_layers)):
        weight = opened.weights.read(name).float().numpy()
        writer.add_tensor(gguf_name(name), weight.astype("float16") if kind == "F16" and weight.ndim == 2 else weight)
    finish(writer)


def add_geometry(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    """Adds the sizes of the model and the constants of its norms and its rotation."""
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.n_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)


def finish(writer: gguf.GGUFWriter) -> None:
    """Writes everything that was added and closes the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """Returns GGUF's name for a weight that has this name in the contract."""
    stem = name.removesuffix(".weight")
    if stem in MODEL_NAMES:
        return f"{MODEL_NAMES[stem]}.weight"
    _, layer, rest = stem.split(".", 2)
    return f"blk.{layer}.{BLOCK_NAMES[rest]}.weight"
