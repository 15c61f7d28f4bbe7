"""The bytes that one decode step must read, by the way a contender stores its weights and its cache."""

from __future__ import annotations

from dataclasses import dataclass

from exporter.costs.roofline import Step, step_costs
from exporter.spec.catalogue import ModelConfig
from exporter.spec.unit import Unit


@dataclass(frozen=True)
class Bits:
    """Bits of one number in memory, with its share of scales and zero points.

    Attributes:
        projections: the matrices of the blocks.
        head: the output head.
        cache: keys and values.
    """

    projections: float
    head: float
    cache: float


# Keys are the weights of `benchmarks.race.lineup.Entry`. Ours have one float32 scale for 32 weights, and a head of 8
# bits. ggml's blocks of 32 have one float16 scale (Q8_0), or a scale and a minimum (Q4_1); llama.cpp stores a head
# whose rows are not a multiple of 256, such as SmolLM2's, as Q8_0. Its cache is float16 where weights are rounded.
BITS = {
    "fp32": Bits(32, 32, 32),
    "F16": Bits(16, 16, 16),
    "Q8_0": Bits(8.5, 8.5, 16),
    "Q4_1": Bits(5, 8.5, 16),
    "int8": Bits(9, 9, 32),
    "int4": Bits(5, 9, 32),
}


def bytes_read(config: ModelConfig, weights: str, batch: int, past_len: int) -> float | None:
    """Returns the bytes of weights and of cached rows in use that a step of one token must read.

    Args:
        config: geometry of the model.
        weights: how the contender stores them; None is returned for one that is not in BITS.
        batch: number of sequences.
        past_len: cached tokens of each sequence.
    """
    if weights not in BITS:
        return None
    bits, total = BITS[weights], 0.0
    for cost in step_costs(config, Unit("model", n_layers=config.n_layers), Step(batch, 1, past_len, "fp32")):
        of_weights = bits.head if cost.name == "lm_head" else bits.projections if "proj" in cost.name else 32
        total += (cost.weight_bytes * of_weights + cost.cache_bytes * bits.cache) / 32
    return total
