"""The graph contract: units, dtypes, tensor names, symbolic axes and weight names of every graph that is exported.

Pure data: this module and what it imports load neither torch nor onnx, so the runtime reads bundles through it.
Shape letters: B batch, T new tokens, P past, L = total length read, C capacity, H query heads, K KV heads, D head_dim, E hidden.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from exporter.common.errors import InputError
from exporter.spec.catalogue import ModelConfig

OPSET = 24
IR_VERSION = 12  # the first that may carry opset 24

BATCH = "batch_size"
SEQUENCE = "sequence_length"
TOTAL = "total_sequence_length"  # cache rows this step reads
PAST = "past_sequence_length"  # cache rows before this step, of a cache that grows
CAPACITY = "cache_capacity"  # cache rows allocated

UNIT_KINDS = ("block", "stack", "model", "component")
COMPONENTS = ("prepare_qkv", "repeat_kv", "attention", "merge_project", "swiglu_mlp", "rms_norm")
LOGITS = ("last", "all")
CACHES = ("in_place", "growing")


@dataclass(frozen=True)
class DType:
    """One floating-point type under the three names the field gives it."""

    name: str  # on the command line and in manifests
    numpy: np.dtype
    onnx: int  # onnx.TensorProto.DataType

    @property
    def n_bytes(self) -> int:
        return self.numpy.itemsize


DTYPES = {
    "fp16": DType("fp16", np.dtype(np.float16), 10),
    "fp32": DType("fp32", np.dtype(np.float32), 1),
    "bf16": DType("bf16", np.dtype(ml_dtypes.bfloat16), 16),
}
ONNX_TYPES = {"int64": 7, "bool": 9, "int8": 3, "uint8": 2, "int4": 22, "uint4": 21, **{dtype.name: dtype.onnx for dtype in DTYPES.values()}}


ONNX_NAMES = {number: name for name, number in ONNX_TYPES.items()}
_BITS = {"int64": 64, "bool": 8, "int8": 8, "uint8": 8, "int4": 4, "uint4": 4, **{dtype.name: 8 * dtype.n_bytes for dtype in DTYPES.values()}}


def stored_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor in a file, by its dtype's name; integers of 4 bits lie two a byte."""
    return -(-math.prod(shape) * _BITS[dtype] // 8)


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of a tensor spec's dtype name; "fp64" exists for references only, no graph is exported in it."""
    return DTYPES[name].numpy if name in DTYPES else np.dtype({"fp64": "float64"}.get(name, name))


def lookup_dtype(name: str) -> DType:
    """The dtype of that name.

    Raises:
        InputError: no such dtype; the message lists those there are.
    """
    if name not in DTYPES:
        raise InputError(f"dtype: got {name!r}, expected one of {', '.join(DTYPES)}")
    return DTYPES[name]


WEIGHT_FORMATS = ("int8", "int4", "uint8", "uint4")
QUANTIZED_PARTS = ("integers", "scales", "zero_points")  # the tensors that a DequantizeLinear makes a weight of


@dataclass(frozen=True)
class WeightFormat:
    """How matrices are stored where it is not in the bundle's dtype: integers of few bits, with one scale a block of inputs.

    A weight is (integer − zero point) · scale. Blocks lie along a matrix's inputs; scales are in the bundle's dtype. Activations,
    norms, the embedding and the cache stay in the bundle's dtype. The output head always has 8 bits (`of`): at 4 it costs more
    agreement than all blocks together, and saves little.

    Attributes:
        dtype: "int8" or "int4", whose zero points are 0, as TensorRT wants them; "uint8" or "uint4", one zero point a block.
        block_size: weights of one output that share a scale; a power of two of at least 16, as onnxruntime's kernels have them.
    """

    dtype: str
    block_size: int = 32

    @property
    def bits(self) -> int:
        return 4 if self.dtype.endswith("4") else 8

    @property
    def symmetric(self) -> bool:
        return not self.dtype.startswith("u")

    def of(self, weight: str) -> WeightFormat:
        """The format of one weight, by canonical name."""
        return replace(self, dtype=self.dtype.replace("4", "8")) if weight == "lm_head.weight" else self

    @property
    def range(self) -> tuple[int, int]:
        """The least and the largest integer."""
        return (-(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1) if self.symmetric else (0, 2**self.bits - 1)

    def tensors(self, shape: tuple[int, int], dtype: str) -> dict[str, tuple[str, tuple[int, int]]]:
        """The tensors that a weight consists of, in the order that DequantizeLinear reads them: part → dtype name and shape.

        Args:
            shape: of the weight as a graph has it, [in, out].
            dtype: the graph's.
        """
        by_block = (shape[0] // self.block_size, shape[1])
        stored = [(self.dtype, shape), (dtype, by_block), *([] if self.symmetric else [(self.dtype, by_block)])]
        return dict(zip(QUANTIZED_PARTS, stored, strict=False))

    def check(self, config: ModelConfig) -> None:
        """Refuses a format that there is no kernel for, or whose blocks do not divide every matrix's inputs.

        Raises:
            InputError: names what was got and what would fit.
        """
        if self.dtype not in WEIGHT_FORMATS:
            raise InputError(f"weights: got {self.dtype!r}, expected one of {', '.join(WEIGHT_FORMATS)}")
        size = self.block_size
        if not _is_count(size) or size < 16 or size & (size - 1):
            raise InputError(f"block size: got {size!r}, expected a power of two of at least 16")
        widths = {config.hidden_size, config.n_heads * config.head_dim, config.intermediate_size}
        if any(width % size for width in widths):
            largest = math.gcd(*widths) & -math.gcd(*widths)
            fix = f"use {largest} or a smaller power of two" if largest >= 16 else "this model has no such size: export it without --weights"
            raise InputError(f"block size: got {size}, which does not divide the matrices' inputs {sorted(widths)}; {fix}")


@dataclass(frozen=True)
class Unit:
    """What one graph covers: a component, a block, a stack of blocks, or a whole model.

    Attributes:
        kind: "component", "block", "stack" or "model".
        component: its name where the kind is "component", else None.
        first_layer: index, in the model, of the first block covered; blocks are numbered from 0 inside the graph.
        n_layers: blocks covered; 1 for a component.
        logits: for a model, "last" (each row's last real token) or "all".
        cache: "in_place", one buffer per tensor of a fixed capacity; or for a model "growing", a past of P rows in and a
            present of P + T rows out, as optimum and onnxruntime-genai drive it.
    """

    kind: str
    component: str | None = None
    first_layer: int = 0
    n_layers: int = 1
    logits: str = "last"
    cache: str = "in_place"

    @classmethod
    def parse(cls, text: str, config: ModelConfig, layers: str | None = None, logits: str | None = None, cache: str = "in_place") -> Unit:
        """Reads `--unit`, `--layers`, `--logits` and `--cache` as a user writes them; logits are by default those the cache asks for.

        Raises:
            InputError: an unknown unit or component, or layers that this model or unit does not have.
        """
        kind, _, component = text.partition(":")
        if kind not in UNIT_KINDS or (":" in text and kind != "component"):
            raise InputError(f"unit: got {text!r}, expected block, stack, model or component:NAME")
        if kind == "component" and component not in COMPONENTS:
            raise InputError(f"component: got {component!r}, expected one of {', '.join(COMPONENTS)}")
        if cache not in CACHES:
            raise InputError(f"cache: got {cache!r}, expected one of {', '.join(CACHES)}")
        if cache == "growing" and (kind != "model" or logits == "last"):
            raise InputError(f"cache: got growing for unit {text} with logits {logits or 'all'}, expected a model with all logits, as its drivers")
        logits = logits or ("all" if cache == "growing" else "last")
        if logits not in LOGITS:
            raise InputError(f"logits: got {logits!r}, expected one of {', '.join(LOGITS)}")
        if logits != "last" and kind != "model":
            raise InputError(f"logits: got {logits!r} for unit {text}, expected a model; other units return hidden states")
        single = kind in ("block", "component")
        first, stop = _parse_layers(layers, config.n_layers, single)
        if single and stop - first != 1:
            raise InputError(f"layers: got {layers!r} for unit {text}, expected one layer such as {first}:{first + 1}; use --unit stack for several")
        if kind == "model" and first:
            raise InputError(f"layers: got {layers!r} for a model, which starts at layer 0; use --unit stack for a slice")
        return cls(kind, component or None, first, stop - first, logits, cache)

    @property
    def has_cache(self) -> bool:
        """Whether it decodes over a cache of its own, updated in place."""
        return self.kind != "component" and self.cache == "in_place"

    def __str__(self) -> str:
        if self.kind == "component":
            return f"component:{self.component}"
        return f"{self.kind} of layers {self.first_layer}:{self.first_layer + self.n_layers}"


def _parse_layers(layers: str | None, n_layers: int, single: bool) -> tuple[int, int]:
    if layers is None:
        return (0, 1) if single else (0, n_layers)
    match = re.fullmatch(r"(?:(\d+):)?(\d+)", layers, re.ASCII)
    if match is None:
        raise InputError(f"layers: got {layers!r}, expected a count N or a range A:B of whole numbers")
    bounds = (int(match[1] or 0), int(match[2]))
    if not 0 <= bounds[0] < bounds[1] <= n_layers:
        raise InputError(f"layers: got {layers!r}, expected 0 <= A < B <= {n_layers}, the layers of this model")
    return bounds


@dataclass(frozen=True)
class TensorSpec:
    """One graph input or output: `axes` holds a number for a static axis and a symbol's name for a dynamic one."""

    name: str
    dtype: str
    axes: tuple[int | str, ...]

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The axes with a size in place of each symbol."""
        return tuple(sizes[axis] if isinstance(axis, str) else axis for axis in self.axes)

    def to_dict(self) -> dict:
        return {"name": self.name, "dtype": self.dtype, "axes": list(self.axes)}

    @classmethod
    def from_dict(cls, data: dict) -> TensorSpec:
        return cls(data["name"], data["dtype"], tuple(data["axes"]))


@dataclass(frozen=True)
class Contract:
    """All inputs and outputs of a graph in order, and which of them are one cache buffer."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    cache_pairs: tuple[tuple[str, str], ...] = ()  # (past name, present name), key then value of each layer

    @property
    def cache_specs(self) -> tuple[TensorSpec, ...]:
        """The past tensors: dtype [B, K, C, D] each."""
        past = {name for name, _ in self.cache_pairs}
        return tuple(spec for spec in self.inputs if spec.name in past)

    @property
    def step_inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs that change every step: everything but the cache."""
        past = {name for name, _ in self.cache_pairs}
        return tuple(spec for spec in self.inputs if spec.name not in past)

    @property
    def step_outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs that are computed afresh every step: everything but the cache."""
        present = {name for _, name in self.cache_pairs}
        return tuple(spec for spec in self.outputs if spec.name not in present)

    def in_dtype(self, dtype: str, other: str) -> Contract:
        """The same contract with every tensor of one dtype in another: what a graph's float32 twin keeps."""

        def renamed(specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
            return tuple(TensorSpec(spec.name, other if spec.dtype == dtype else spec.dtype, spec.axes) for spec in specs)

        return Contract(renamed(self.inputs), renamed(self.outputs), self.cache_pairs)


def graph_contract(config: ModelConfig, unit: Unit, dtype: str) -> Contract:
    """The contract of one unit's graph."""
    if unit.component is not None:
        return _component_contract(config, unit.component, dtype)
    if unit.kind == "model":
        first_input = TensorSpec("input_ids", "int64", (BATCH, SEQUENCE))
        axes = (BATCH, config.vocab_size) if unit.logits == "last" else (BATCH, SEQUENCE, config.vocab_size)
        output = TensorSpec("logits", "fp32", axes)
    else:
        first_input = TensorSpec("hidden_states", dtype, (BATCH, SEQUENCE, config.hidden_size))
        output = TensorSpec("hidden_states_out", dtype, (BATCH, SEQUENCE, config.hidden_size))
    if unit.cache == "growing":
        return _growing_contract(config, unit, dtype, first_input, output)
    step = (
        first_input,
        TensorSpec("position_ids", "int64", (BATCH, SEQUENCE)),
        TensorSpec("write_indices", "int64", (BATCH,)),
        TensorSpec("attention_mask", "int64", (BATCH, TOTAL)),
    )
    cache_axes = (BATCH, config.n_kv_heads, CAPACITY, config.head_dim)
    pairs = tuple((f"past_key_values.{layer}.{kind}", f"present.{layer}.{kind}") for layer in range(unit.n_layers) for kind in ("key", "value"))
    return Contract(
        inputs=step + tuple(TensorSpec(past, dtype, cache_axes) for past, _ in pairs),
        outputs=(output, *(TensorSpec(present, dtype, cache_axes) for _, present in pairs)),
        cache_pairs=pairs,
    )


Bounds = tuple[int, int]  # first layer of a part and the one after its last, counted within the unit


def part_bounds(n_layers: int, n_parts: int) -> tuple[Bounds, ...]:
    """Consecutive parts of nearly equal length; longer ones come first.

    Raises:
        InputError: fewer than one part, or more parts than layers.
    """
    if not _is_count(n_parts) or n_parts > n_layers:
        raise InputError(f"parts: got {n_parts!r}, expected 1 to {n_layers}, the layers of this unit")
    length, longer = divmod(n_layers, n_parts)  # the first `longer` parts have one layer more
    starts = [part * length + min(part, longer) for part in range(n_parts + 1)]
    return tuple(itertools.pairwise(starts))


def part_contract(config: ModelConfig, unit: Unit, dtype: str, bounds: Bounds) -> Contract:
    """The contract of one part's graph: the unit's, between hidden states where others come before or after it.

    Cache tensors keep the unit's numbers.
    """
    whole = graph_contract(config, unit, dtype)
    hidden = (BATCH, SEQUENCE, config.hidden_size)
    pairs = whole.cache_pairs[2 * bounds[0] : 2 * bounds[1]]
    names = {name for pair in pairs for name in pair}
    first = whole.step_inputs[0] if bounds[0] == 0 else TensorSpec("hidden_states", dtype, hidden)
    last = whole.step_outputs[0] if bounds[1] == unit.n_layers else TensorSpec("hidden_states_out", dtype, hidden)
    return Contract(
        inputs=(first, *whole.step_inputs[1:], *(spec for spec in whole.inputs if spec.name in names)),
        outputs=(last, *(spec for spec in whole.outputs if spec.name in names)),
        cache_pairs=pairs,
    )


def _growing_contract(config: ModelConfig, unit: Unit, dtype: str, first_input: TensorSpec, output: TensorSpec) -> Contract:
    """Past and present are tensors apart, so there are no cache pairs; names and order are those of optimum's exports."""
    names = [f"{layer}.{kind}" for layer in range(unit.n_layers) for kind in ("key", "value")]

    def cache(name: str, length: str) -> TensorSpec:
        return TensorSpec(name, dtype, (BATCH, config.n_kv_heads, length, config.head_dim))

    return Contract(
        inputs=(
            first_input,
            TensorSpec("attention_mask", "int64", (BATCH, TOTAL)),
            TensorSpec("position_ids", "int64", (BATCH, SEQUENCE)),
            *(cache(f"past_key_values.{name}", PAST) for name in names),
        ),
        outputs=(output, *(cache(f"present.{name}", TOTAL) for name in names)),
    )


def _component_contract(config: ModelConfig, component: str, dtype: str) -> Contract:
    H, K, D, E = config.n_heads, config.n_kv_heads, config.head_dim, config.hidden_size

    def spec(name: str, *axes: int | str, dtype: str = dtype) -> TensorSpec:
        return TensorSpec(name, dtype, axes)

    x = spec("x", BATCH, SEQUENCE, E)
    queries = spec("Q_r", BATCH, H, SEQUENCE, D)
    heads = spec("H", BATCH, H, SEQUENCE, D)
    inputs, outputs = {
        "prepare_qkv": (
            (x, spec("R", SEQUENCE, D // 2, 2, dtype="fp32")),
            (queries, spec("K_r", BATCH, K, SEQUENCE, D), spec("V", BATCH, K, SEQUENCE, D)),
        ),
        "repeat_kv": ((spec("x", BATCH, TOTAL, K, D),), (spec("y", BATCH, TOTAL, H, D),)),
        "attention": (
            (
                queries,
                spec("keys", BATCH, K, TOTAL, D),
                spec("values", BATCH, K, TOTAL, D),
                spec("mask", BATCH, 1, SEQUENCE, TOTAL, dtype="bool"),
            ),
            (heads,),
        ),
        "merge_project": ((heads,), (spec("delta_attn", BATCH, SEQUENCE, E),)),
        "swiglu_mlp": ((x,), (spec("delta_mlp", BATCH, SEQUENCE, E),)),
        "rms_norm": ((x,), (spec("y", BATCH, SEQUENCE, E),)),
    }[component]
    return Contract(inputs, outputs)


# --- weights -----------------------------------------------------------------------------------------------------------

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


# --- limits that every backend shares ----------------------------------------------------------------------------------

DEFAULT_MAX_POSITIONS = 8192
DEFAULT_CACHE_CAPACITY = 2048
CACHE_ALIGNMENT_BYTES = 256


def check_max_positions(max_positions: int | None, config: ModelConfig) -> int:
    """The number of positions a graph is exported for; None means the default, or the context where that is shorter.

    Raises:
        InputError: it is below 1 or beyond the model's context.
    """
    if max_positions is None:
        return min(DEFAULT_MAX_POSITIONS, config.context_length)
    if not _is_count(max_positions) or max_positions > config.context_length:
        raise InputError(f"max_positions: got {max_positions!r}, expected 1 to {config.context_length}, the model's context")
    return max_positions


def check_cache_capacity(cache_capacity: int | None, config: ModelConfig, dtype: str, max_positions: int) -> int:
    """The cache rows to allocate per sequence: rounded up so that a sequence's stride is a multiple of 256 bytes.

    None means the smaller of 2,048 and `max_positions`, rounded down: never a model's whole context by accident.

    Raises:
        InputError: it is below 1, or beyond the positions the graph was exported for, or no capacity fits those.
    """
    step = cache_capacity_step(config, dtype)
    largest = max_positions // step * step
    if largest == 0:
        raise InputError(
            f"cache_capacity: this graph was exported for {max_positions} positions and a cache holds a multiple of {step}; "
            f"export again with --max-positions of at least {step}"
        )
    if cache_capacity is None:
        return min(DEFAULT_CACHE_CAPACITY, largest)
    if not _is_count(cache_capacity):
        raise InputError(f"cache_capacity: got {cache_capacity!r}, expected a whole number of at least 1")
    capacity = -(-cache_capacity // step) * step
    if capacity > max_positions:
        rounded = "" if capacity == cache_capacity else f", {capacity} once rounded up to a multiple of {step}"
        raise InputError(
            f"cache_capacity: got {cache_capacity}{rounded}, expected at most {max_positions}, the positions this graph was exported "
            f"for; ask for at most {largest} or export again with a larger --max-positions"
        )
    return capacity


def cache_capacity_step(config: ModelConfig, dtype: str) -> int:
    """Cache capacities come in multiples of this, so that each sequence's cache begins 256-byte aligned."""
    row_bytes = config.n_kv_heads * config.head_dim * DTYPES[dtype].n_bytes
    return CACHE_ALIGNMENT_BYTES // math.gcd(row_bytes, CACHE_ALIGNMENT_BYTES)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
