"""The roofline of one step: bytes and operations of each component, and the least time that a machine needs.

It is arithmetic only. It counts the weights, and the cache rows that are read and written. It leaves out activations,
since they stay in the processor's caches. The time of a component is the longer one of its transfers and its
arithmetic (Williams, Waterman and Patterson, "Roofline", CACM 2009). Components run one after the other, so the time
of a step is their sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from exporter.common.errors import InputError
from exporter.common.plain_numbers import make_plain
from exporter.spec.catalogue import ModelConfig
from exporter.spec.dtypes import lookup_dtype
from exporter.spec.parameters import COMPONENT_OF_WEIGHT, block_weight_shapes
from exporter.spec.unit import Unit

ATTENTION = "attention.heads"


@dataclass(frozen=True)
class Cost:
    """The costs of one component in a step: of all blocks together, or of the model around them.

    Attributes:
        name: name in the graph, such as `attention.q_proj`, `attention.heads` (scores, softmax and values) or
            `lm_head`.
        weight_bytes, cache_bytes: bytes that are moved to or from memory.
        flops: number of operations; a multiplication with its addition counts as two.
    """

    name: str
    weight_bytes: int
    cache_bytes: int
    flops: int

    def limits(self, bandwidth: float, flop_rate: float) -> tuple[float, float]:
        """Returns the seconds of its transfers and of its arithmetic.

        Args:
            bandwidth: bytes a second.
            flop_rate: operations a second.
        """
        return (self.weight_bytes + self.cache_bytes) / bandwidth, self.flops / flop_rate


@dataclass(frozen=True)
class Step:
    """A step: `seq_len` new tokens in each of `batch` sequences that hold `past_len` tokens.

    Attributes:
        batch: number of sequences.
        seq_len: number of new tokens in each sequence.
        past_len: number of cached tokens in each sequence.
        dtype: dtype of weights and cache.
        weight_bits: bits per weight of a quantized matrix, with its share of scales; None takes the bits of the dtype.

    Raises:
        InputError: a size is not a whole number, or out of range.
    """

    batch: int = 1
    seq_len: int = 1
    past_len: int = 0
    dtype: str = "fp16"
    weight_bits: float | None = None

    def __post_init__(self) -> None:
        make_plain(self, "batch", "seq_len", "past_len", "weight_bits")
        for name, least in (("batch", 1), ("seq_len", 1), ("past_len", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(f"{name}: got {value!r}, expected a whole number of at least {least}")
        if self.weight_bits is not None and not 0 < self.weight_bits <= 64:
            raise InputError(f"weight_bits: got {self.weight_bits}, expected more than 0 and at most 64")
        lookup_dtype(self.dtype)

    def matrix_bytes(self, parameters: int) -> int:
        """Returns the bytes of a matrix with so many parameters."""
        return math.ceil(parameters * (self.weight_bits or 8 * lookup_dtype(self.dtype).n_bytes) / 8)


def step_costs(config: ModelConfig, unit: Unit, step: Step) -> tuple[Cost, ...]:
    """Returns the costs of every component of a block, stack or model, in the order of the operations.

    A model reads one embedding row per token. Its head runs on the last token of each sequence, or on every token
    where the unit has logits "all".

    Raises:
        InputError: the unit is a component.
    """
    if unit.kind == "component":
        raise InputError(
            f"roofline: got a {unit}, expected a block, stack or model; a component has no step of its own"
        )
    return tuple(_costs(config, unit, step))


def _costs(config: ModelConfig, unit: Unit, step: Step) -> Iterator[Cost]:
    n_bytes, tokens = lookup_dtype(step.dtype).n_bytes, step.batch * step.seq_len
    if unit.kind == "model":
        yield Cost("embedding", tokens * config.hidden_size * n_bytes, 0, 0)
    for weight, shape in block_weight_shapes(config).items():
        name, parameters = weight.removesuffix(".weight"), math.prod(shape) * unit.n_layers
        if COMPONENT_OF_WEIGHT[name] == "merge_project":
            yield _attention(config, unit, step)
        if len(shape) == 1:
            yield Cost(name, parameters * n_bytes, 0, 0)
        else:
            yield Cost(name, step.matrix_bytes(parameters), 0, 2 * parameters * tokens)
    if unit.kind == "model":
        positions = tokens if unit.logits == "all" else step.batch
        head = config.vocab_size * config.hidden_size
        yield Cost("norm", config.hidden_size * n_bytes, 0, 0)
        yield Cost("lm_head", step.matrix_bytes(head), 0, 2 * head * positions)


def _attention(config: ModelConfig, unit: Unit, step: Step) -> Cost:
    """Returns the costs of reading the cached rows and writing new ones.

    Token t of a sequence sees past_len + t + 1 keys.
    """
    row_bytes = 2 * config.n_kv_heads * config.head_dim * lookup_dtype(step.dtype).n_bytes
    rows = step.batch * (step.past_len + step.seq_len)
    keys_seen = step.seq_len * step.past_len + step.seq_len * (step.seq_len + 1) // 2
    flops = 4 * config.n_heads * config.head_dim * keys_seen * step.batch
    return Cost(ATTENTION, 0, rows * row_bytes * unit.n_layers, flops * unit.n_layers)


def roofline(config: ModelConfig, unit: Unit, step: Step, bandwidth: float, flop_rate: float) -> dict:
    """Returns the step's costs and limits as JSON data, with times in milliseconds.

    Args:
        config: the model's geometry.
        unit: a block, stack or model.
        step: the step.
        bandwidth: bytes a second that the machine reads.
        flop_rate: floating-point operations a second of its matrix products.

    Raises:
        InputError: a rate is not a finite number above 0, or the unit is a component.
    """
    for name, rate in (("bandwidth", bandwidth), ("flops", flop_rate)):
        if not 0 < rate < math.inf:
            raise InputError(f"{name}: got {rate:g}, expected a finite number above 0")
    costs = step_costs(config, unit, step)
    components = []
    for cost in costs:
        transfer, arithmetic = cost.limits(bandwidth, flop_rate)
        bound = "bandwidth" if transfer >= arithmetic else "arithmetic"
        components.append(
            {**asdict(cost), "transfer_ms": transfer * 1e3, "arithmetic_ms": arithmetic * 1e3, "bound": bound}
        )
    return {
        "step": asdict(step),
        "bandwidth_bytes_per_second": bandwidth,
        "flops_per_second": flop_rate,
        "components": components,
        "weight_bytes": sum(cost.weight_bytes for cost in costs),
        "cache_bytes": sum(cost.cache_bytes for cost in costs),
        "flops": sum(cost.flops for cost in costs),
        "limit_ms": sum(max(row["transfer_ms"], row["arithmetic_ms"]) for row in components),
    }
