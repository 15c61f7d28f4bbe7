"""The good bundles that mutants are made from: every unit, dtype, and form of cache and weights, in a tiny size."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from exporter.bundle.bundle import Bundle
from exporter.checkpoint.formats import open_checkpoint
from exporter.export import ExportRequest, export_bundle
from exporter.model.weights import RandomWeights, WeightSource
from exporter.spec.catalogue import ModelConfig
from exporter.spec.unit import COMPONENTS, Unit
from exporter.spec.weight_formats import WeightFormat

MAX_POSITIONS = 64
GROUPED = ModelConfig(  # o_proj and down_proj are square, so that a transposed one still fits
    hidden_size=64,
    n_layers=6,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    intermediate_size=64,
    vocab_size=101,
    context_length=128,
)
EQUAL_HEADS = dataclasses.replace(GROUPED, n_kv_heads=4)  # q, k and v have one shape, so that they can be exchanged
TIED = dataclasses.replace(GROUPED, tie_word_embeddings=True)
# Factors of weights whose rounding errors grow from layer to layer: attention picks one key, and its output is large.
ILL_CONDITIONED = {"q_proj": 300**0.5, "k_proj": 300**0.5, "o_proj": 8.0}


class ScaledWeights:
    """The weights of another source, with each named projection multiplied by a factor."""

    def __init__(self, weights: WeightSource, factors: dict[str, float]) -> None:
        self.description, self.has_own_head = weights.description, weights.has_own_head
        self._weights, self._factors = weights, factors

    def read(self, name: str, columns: slice = slice(None), rows: slice = slice(None)) -> Tensor:
        weight = self._weights.read(name, columns, rows)
        return weight * self._factors.get(name.split(".")[-2], 1.0)


@dataclass(frozen=True)
class GoodUnit:
    """One good bundle.

    Attributes:
        unit, layers, logits, cache: what the graph covers, as in `Unit.parse`.
        dtype: dtype of the graph.
        n_parts: number of graphs.
        stored_as: integer type of the matrices; None stores them in `dtype`.
        config: the geometry.
        ill_conditioned: whether rounding errors grow from layer to layer.
        attention_dtype: "fp32" computes attention in float32.
    """

    unit: str
    dtype: str
    layers: str | None = None
    logits: str | None = None
    cache: str = "in_place"
    n_parts: int = 1
    stored_as: str | None = None
    config: ModelConfig = GROUPED
    ill_conditioned: bool = False
    attention_dtype: str | None = None

    @property
    def weights(self) -> WeightSource:
        """The source of its weights, which a validation reads too."""
        weights: WeightSource = RandomWeights(self.config, 0)
        return ScaledWeights(weights, ILL_CONDITIONED) if self.ill_conditioned else weights

    def export(self, folder: Path) -> Bundle:
        unit = Unit.parse(self.unit, self.config, self.layers, self.logits, self.cache)
        request = ExportRequest(
            self.config,
            unit,
            self.weights,
            self.dtype,
            MAX_POSITIONS,
            self.attention_dtype,
            n_parts=self.n_parts,
            weight_format=WeightFormat(self.stored_as) if self.stored_as else None,
        )
        return export_bundle(request, folder, validated=False)


DTYPES = ("fp32", "fp16", "bf16")
GOOD_UNITS = {
    **{f"block {dtype}": GoodUnit("block", dtype) for dtype in DTYPES},
    "block fp16 with equal heads": GoodUnit("block", "fp16", config=EQUAL_HEADS),
    "block fp16 with float32 attention": GoodUnit("block", "fp16", attention_dtype="fp32"),
    "stack fp32": GoodUnit("stack", "fp32", "0:3"),
    "stack fp16 in parts": GoodUnit("stack", "fp16", "1:4", n_parts=2),
    "stack bf16 in parts": GoodUnit("stack", "bf16", "0:3", n_parts=2),
    **{
        f"stack {dtype} of 6 ill-conditioned layers": GoodUnit("stack", dtype, ill_conditioned=True) for dtype in DTYPES
    },
    **{f"model {dtype}": GoodUnit("model", dtype, "2") for dtype in DTYPES},
    "model fp16 with all logits": GoodUnit("model", "fp16", "2", "all", config=TIED),
    "model fp16 ill-conditioned": GoodUnit("model", "fp16", "4", config=TIED, ill_conditioned=True),
    **{f"model {dtype} growing": GoodUnit("model", dtype, "2", cache="growing") for dtype in ("fp32", "fp16")},
    "block fp16 in int8": GoodUnit("block", "fp16", stored_as="int8"),
    "block bf16 in int4": GoodUnit("block", "bf16", stored_as="int4"),
    "model fp16 in int4": GoodUnit("model", "fp16", "2", stored_as="int4", config=TIED),
    "model fp32 in uint8": GoodUnit("model", "fp32", "2", stored_as="uint8"),
    "stack fp16 in uint4, in parts": GoodUnit("stack", "fp16", "0:2", n_parts=2, stored_as="uint4"),
    **{
        f"{name} {dtype}": GoodUnit(f"component:{name}", dtype)
        for name, dtype in zip(COMPONENTS, ("fp16", "fp32", "fp16", "bf16", "fp16", "fp16"), strict=True)
    },
}


@dataclass(frozen=True)
class RealUnit:
    """Some layers of the real model.

    Attributes:
        unit, layers, dtype: what the graph covers.
        checkpoint: folder of the model.
    """

    unit: str
    layers: str
    dtype: str
    checkpoint: Path

    @property
    def weights(self) -> WeightSource:
        return open_checkpoint(self.checkpoint).weights

    def export(self, folder: Path) -> Bundle:
        opened = open_checkpoint(self.checkpoint)
        unit = Unit.parse(self.unit, opened.config, self.layers)
        return export_bundle(ExportRequest(opened.config, unit, opened.weights, self.dtype), folder, validated=False)


def real_units(checkpoint: Path) -> dict[str, RealUnit]:
    """Returns parts of the real model: its first layers with the embedding and the head, and layers where values are
    largest."""
    return {
        "SmolLM2, model of 4 layers fp16": RealUnit("model", "4", "fp16", checkpoint),
        "SmolLM2, layers 0 to 7 fp16": RealUnit("stack", "0:8", "fp16", checkpoint),
        "SmolLM2, layers 0 to 3 bf16": RealUnit("stack", "0:4", "bf16", checkpoint),
    }
