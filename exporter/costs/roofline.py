"""The roofline of one step: what each component must read, write and compute, and how soon a machine could be done with it.

Pure arithmetic. Counted are weights, and the cache's rows read and written; activations are left out, since they stay in the
processor's caches. A component takes the longer of its transfers and its arithmetic (Williams, Waterman and Patterson, "Roofline",
CACM 2009); components run one after the other, so a step takes their sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from exporter.common.errors import InputError
from exporter.spec.catalogue import ModelConfig
from exporter.spec.dtypes import lookup_dtype
from exporter.spec.parameters import COMPONENT_OF_WEIGHT, block_weight_shapes
from exporter.spec.unit import Unit

ATTENTION = "attention.heads"


@dataclass(frozen=True)
class Cost:
    """What one component of all blocks together, or one of the model around them, costs in a step.

    Attributes:
        name: as in the graph: `attention.q_proj` of every block, `attention.heads` (scores, softmax and values), `lm_head`.
        weight_bytes, cache_bytes: moved to or from memory.
        flops: two a multiplication with its addition.
    """

    name: str
    weight_bytes: int
    cache_bytes: int
    flops: int

    def limits(self, bandwidth: float, flop_rate: float) -> tuple[float, float]:
        """Seconds of its transfers at `bandwidth` bytes a second, and of its arithmetic at `flop_rate` operations a second."""
        return (self.weight_bytes + self.cache_bytes) / bandwidth, self.flops / flop_rate


@dataclass(frozen=True)
class Step:
    """A step whose cost is asked: `seq_len` new tokens in each of `batch` sequences that hold `past_len`.

    Attributes:
        dtype: of weights and cache.
        weight_bits: bits that a weight of a matrix takes with its share of scales, where it is quantized; None is the dtype's.

    Raises:
        InputError: a size is not a whole number, or out of range.
    """

    batch: int = 1
    seq_len: int = 1
    past_len: int = 0
    dtype: str = "fp16"
    weight_bits: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("seq_len", 1), ("past_len", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(f"{name}: got {value!r}, expected a whole number of at least {least}")
        if self.weight_bits is not None and not 0 < self.weight_bits <= 64:
            raise InputError(f"weight_bits: got {self.weight_bits}, expected more than 0 and at most 64")
        lookup_dtype(self.dtype)

    def matrix_bytes(self, parameters: int) -> int:
        return math.ceil(parameters * (self.weight_bits or 8 * lookup_dtype(self.dtype).n_bytes) / 8)


def step_costs(config: ModelConfig, unit: Unit, step: Step) -> tuple[Cost, ...]:
    """Every component of a block, stack or model, in the order of its operations.

    A model reads one embedding row a token, and its head runs on the last token of each sequence unless the unit has logits "all".

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
    """Reads the rows cached before, writes this step's; token t of a sequence sees past_len + t + 1 keys."""
    row_bytes = 2 * config.n_kv_heads * config.head_dim * lookup_dtype(step.dtype).n_bytes
    rows = step.batch * (step.past_len + step.seq_len)
    keys_seen = step.seq_len * step.past_len + step.seq_len * (step.seq_len + 1) // 2
    flops = 4 * config.n_heads * config.head_dim * keys_seen * step.batch
    return Cost(ATTENTION, 0, rows * row_bytes * unit.n_layers, flops * unit.n_layers)


def roofline(config: ModelConfig, unit: Unit, step: Step, bandwidth: float, flop_rate: float) -> dict:
    """The step's costs and limits as JSON data; times in milliseconds.

    Args:
        bandwidth: bytes a second that the machine reads.
        flop_rate: floating-point operations a second of its matrix products.

    Raises:
        InputError: a rate is not a finite number above 0.
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
