"""Measures the export of a large checkpoint: time compared with a plain copy, peak memory, and compilation in parts.

python -m benchmarks.own.large_checkpoint [--layers N] [--keep]     writes benchmarks/records/checkpoints.json

The command generates the checkpoint in build/: the geometry of Llama 3 8B in sharded bf16 safetensors, 16 GB with
32 layers. build/ needs about three times that size. Export (not validated) and copy both begin with the checkpoint out
of memory and end with the data on disk.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.machine.description import machine, stamp
from benchmarks.machine.processes import measure
from exporter.spec.catalogue import CATALOGUE, ModelConfig
from exporter.spec.parameters import weight_shapes
from exporter.spec.unit import Unit

RECORD = Path(__file__).parents[1] / "records" / "checkpoints.json"
FOLDER = Path("build/benchmark-checkpoint")
SHARD_BYTES = 4 << 30
PARTS = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.q_proj": "self_attn.q_proj",
    "attention.k_proj": "self_attn.k_proj",
    "attention.v_proj": "self_attn.v_proj",
    "attention.o_proj": "self_attn.o_proj",
    "mlp.gate_proj": "mlp.gate_proj",
    "mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
}
MODEL_PARTS = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}


def generate_checkpoint(
    folder: Path, config: ModelConfig, shard_bytes: int = SHARD_BYTES, dtype: torch.dtype = torch.bfloat16
) -> int:
    """Writes a sharded Hugging Face folder of random weights, shard by shard; returns the tensors' bytes."""
    folder.mkdir(parents=True)
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(_shards(config, shard_bytes, dtype)):
        name = f"model-{number:05}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
        total += sum(tensor.nbytes for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _shards(config: ModelConfig, shard_bytes: int, dtype: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    noise = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0))
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for offset, (name, shape) in enumerate(weight_shapes(config, Unit("model", n_layers=config.n_layers)).items()):
        count = torch.Size(shape).numel()
        values = noise.roll(offset * 997)
        values = values.mul(shape[-1] ** -0.5) if len(shape) == 2 else values.mul(0.1).add(1.0)
        tensor = values.to(dtype).repeat(-(-count // len(noise)))[:count].reshape(shape).contiguous()
        if size and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[_stored_name(name)] = tensor
        size += tensor.nbytes
    yield shard


def _stored_name(name: str) -> str:
    if name in MODEL_PARTS:
        return MODEL_PARTS[name]
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{layer}.{PARTS[rest.removesuffix('.weight')]}.weight"


def forget(folder: Path) -> None:
    """Takes a folder's files out of the page cache, so that the next read comes from the disk."""
    os.sync()
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy_seconds(source: Path, target: Path) -> float:
    """Returns the wall time of copying a folder to disk; removes the copy."""
    started = time.perf_counter()
    shutil.copytree(source, target)
    os.sync()
    seconds = time.perf_counter() - started
    shutil.rmtree(target)
    return seconds


def run(config: ModelConfig, folder: Path, shard_bytes: int = SHARD_BYTES, validated: bool = True) -> dict:
    """Generates the checkpoint where it is missing, copies it, exports it and validates the bundle layer by layer."""
    checkpoint, bundle = folder / "checkpoint", folder / "bundle"
    if not (checkpoint / "model.safetensors.index.json").is_file():
        shutil.rmtree(checkpoint, ignore_errors=True)
        generate_checkpoint(checkpoint, config, shard_bytes)
    n_bytes = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    forget(checkpoint)
    seconds = copy_seconds(checkpoint, folder / "copy")
    forget(checkpoint)
    model = ("--checkpoint", str(checkpoint), "--unit", "model")
    export = measure("exporter", "export", *model, "--no-validate", "-o", str(bundle))
    figures = {
        "checkpoint_bytes": n_bytes,
        "copy_seconds": round(seconds, 2),
        "export": export,
        "throughput_of_copy": round(seconds / export["seconds"], 3),
    }
    if validated:
        figures["validation by layer"] = measure("exporter", "validate", str(bundle), "--by-layer")
        figures["validation_max_error"] = json.loads((bundle / "report.json").read_text())["validation"]["meaning"][
            "max_error"
        ]
    shutil.rmtree(bundle)
    return figures


def run_in_parts(folder: Path, budget_gib: float) -> dict:
    """Exports the checkpoint in parts that fit a memory budget and compiles each part; needs no GPU."""
    checkpoint, bundle = folder / "checkpoint", folder / "parts"
    model = ("--checkpoint", str(checkpoint), "--unit", "model", "--part-budget", str(budget_gib))
    export = measure("exporter", "export", *model, "--no-validate", "-o", str(bundle))
    build = measure("engines", "build", str(bundle), "--backend", "tensorrt-rtx", "--cache-capacity", "2048")
    parts = json.loads((bundle / "manifest.json").read_text())["parts"]
    engines = sum(path.stat().st_size for path in bundle.rglob("*.engine"))
    shutil.rmtree(bundle)
    return {
        "budget_bytes": int(budget_gib * 2**30),
        "parts": parts,
        "export": export,
        "build": build,
        "engine_bytes": engines,
    }


def main() -> None:
    prog, description = "python -m benchmarks.own.large_checkpoint", __doc__.splitlines()[0]
    add = (parser := argparse.ArgumentParser(prog=prog, description=description)).add_argument
    add("--layers", type=int, default=32, metavar="N", help="number of Llama 3 8B's layers (default %(default)s)")
    add("--part-budget", type=float, default=14.0, metavar="GIB", help="memory for one part (default %(default)s)")
    add("--keep", action="store_true", help="keep the checkpoint for the next run")
    arguments = parser.parse_args()
    config = dataclasses.replace(CATALOGUE["llama3-8b"], n_layers=arguments.layers)
    figures = run(config, FOLDER)
    print(json.dumps(figures, indent=1), flush=True)
    figures["in parts"] = run_in_parts(FOLDER, arguments.part_budget)
    if not arguments.keep:
        shutil.rmtree(FOLDER)
    print(json.dumps(figures["in parts"], indent=1))
    record = {**stamp(), "machine": machine(), "layers": arguments.layers, **figures}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
