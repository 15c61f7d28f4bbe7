"""The graph contract: name, dtype and symbolic axes of every input and output.

Shape letters: B batch, T new tokens, P past, L total length read, C cache capacity, H query heads, K KV heads, D
head_dim, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from exporter.spec.catalogue import ModelConfig
from exporter.spec.unit import Bounds, Unit

OPSET = 24
IR_VERSION = 12  # the first version that may have opset 24
BATCH = "batch_size"
SEQUENCE = "sequence_length"
TOTAL = "total_sequence_length"  # cache rows this step reads
PAST = "past_sequence_length"  # cache rows before this step, where the cache grows
CAPACITY = "cache_capacity"  # cache rows allocated


@dataclass(frozen=True)
class TensorSpec:
    """One graph input or output: `axes` holds a number for a static axis and a symbol's name for a dynamic one."""

    name: str
    dtype: str
    axes: tuple[int | str, ...]

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the axes with a size in place of each symbol."""
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
        """The same contract with every tensor of `dtype` in `other`: the contract of a graph's float32 twin."""

        def renamed(specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
            return tuple(
                TensorSpec(spec.name, other if spec.dtype == dtype else spec.dtype, spec.axes) for spec in specs
            )

        return Contract(renamed(self.inputs), renamed(self.outputs), self.cache_pairs)


def graph_contract(config: ModelConfig, unit: Unit, dtype: str) -> Contract:
    """Returns the contract of one unit's graph."""
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
    pairs = tuple(
        (f"past_key_values.{layer}.{kind}", f"present.{layer}.{kind}")
        for layer in range(unit.n_layers)
        for kind in ("key", "value")
    )
    return Contract(
        inputs=step + tuple(TensorSpec(past, dtype, cache_axes) for past, _ in pairs),
        outputs=(output, *(TensorSpec(present, dtype, cache_axes) for _, present in pairs)),
        cache_pairs=pairs,
    )


def part_contract(config: ModelConfig, unit: Unit, dtype: str, bounds: Bounds) -> Contract:
    """Returns the contract of one part's graph: hidden states go in or out where another part is beside it.

    Cache tensors keep the numbers of the whole unit.
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


def _growing_contract(
    config: ModelConfig, unit: Unit, dtype: str, first_input: TensorSpec, output: TensorSpec
) -> Contract:
    """Past and present are separate tensors, without cache pairs. Names and order are those of optimum's exports."""
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
