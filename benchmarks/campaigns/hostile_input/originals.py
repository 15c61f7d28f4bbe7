"""Makes good bundles and checkpoints of tiny models, once for each campaign. Hostile inputs are made from them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from exporter.checkpoint.formats import open_checkpoint
from exporter.export import ExportRequest, export_bundle
from exporter.model.weights import RandomWeights
from exporter.spec.catalogue import CATALOGUE, ModelConfig
from exporter.spec.unit import Unit
from exporter.spec.weight_formats import WeightFormat
from tests.support.checkpoint_folders import meta_shards, write_huggingface, write_json

TINY = ModelConfig(
    hidden_size=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    vocab_size=300,
    context_length=128,
)
META = dataclasses.replace(TINY, intermediate_size=256)
MAX_POSITIONS = 64
META_NAME = "tiny-for-campaigns"
CATALOGUE_ENTRY = {META_NAME: META}  # a Meta folder needs a name in the catalogue; workers add this one


@dataclass(frozen=True)
class Original:
    """The unit and the storage of one good bundle."""

    unit: str
    dtype: str
    logits: str | None = None
    cache: str = "in_place"
    n_parts: int = 1
    weights: str | None = None  # integer type of the stored matrices


ORIGINALS = {
    "block": Original("block", "fp32"),
    "model": Original("model", "fp32"),
    "half": Original("block", "fp16"),
    "bfloat": Original("block", "bf16"),
    "parts": Original("stack", "fp32", n_parts=2),
    "growing": Original("model", "fp32", logits="all", cache="growing"),
    "component": Original("component:repeat_kv", "fp16"),
    "int8": Original("model", "fp32", weights="int8"),
    "int4": Original("block", "fp16", weights="int4"),
    "uint8": Original("block", "fp32", weights="uint8"),
    "uint4": Original("stack", "fp32", n_parts=2, weights="uint4"),
}


def write_tokenizer(path: Path) -> None:
    """Writes a byte-level tokenizer with a few merges; its tokens are in TINY's vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)} | {"he": 256, "ll": 257}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("h", "e"), ("l", "l")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(path))


def make_originals(folder: Path, names: tuple[str, ...] = tuple(ORIGINALS)) -> None:
    """Writes the checkpoints, the named bundles of one of them, and an engine into the bundle "half"."""
    CATALOGUE.update(CATALOGUE_ENTRY)
    for name, shards in (("huggingface", 1), ("sharded", 2)):
        write_huggingface(folder / name, TINY, shards=shards)
        write_tokenizer(folder / name / "tokenizer.json")
    _write_meta(folder / "meta")
    checkpoint = open_checkpoint(folder / "huggingface")
    for name in names:
        original = ORIGINALS[name]
        unit = Unit.parse(original.unit, checkpoint.config, None, original.logits, original.cache)
        request = ExportRequest(
            checkpoint.config, unit, checkpoint.weights, original.dtype, MAX_POSITIONS,
            end_token_ids=checkpoint.end_token_ids, tokenizer_files=checkpoint.tokenizer_files,
            n_parts=original.n_parts,
            weight_format=WeightFormat(original.weights) if original.weights else None,
        )  # fmt: skip
        export_bundle(request, folder / name, validated=name == "model")
    if "half" in names:
        _build_engine(folder / "half")


def _write_meta(folder: Path) -> None:
    folder.mkdir()
    for index, shard in enumerate(meta_shards(META, RandomWeights(META, 0), 2)):
        torch.save(shard, folder / f"consolidated.{index:02d}.pth")
    write_json(folder / "params.json", {
        "dim": META.hidden_size, "n_layers": META.n_layers, "n_heads": META.n_heads, "n_kv_heads": META.n_kv_heads,
        "vocab_size": META.vocab_size, "multiple_of": 256, "norm_eps": META.norm_eps, "rope_theta": META.rope_theta,
    })  # fmt: skip


def _build_engine(folder: Path) -> None:
    from engines.building.build import BuildRequest, build_bundle
    from engines.library.backend import choose_backend
    from exporter.bundle.bundle import Bundle

    build_bundle(Bundle.open(folder), choose_backend("tensorrt-rtx"), BuildRequest(2, 8, 32))
