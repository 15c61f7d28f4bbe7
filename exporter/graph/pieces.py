"""The pieces that a graph is joined from: which module is traced, and with which inputs.

A piece takes from the spec only what its module needs, so that slices, parts and whole models share their pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

from exporter.graph import fused_decoder as traced
from exporter.graph.cache_forms import CACHE_FORMS
from exporter.graph.fragments import Piece
from exporter.graph.traced_components import traced_component
from exporter.spec.graph_spec import GraphSpec
from exporter.spec.tensors import BATCH, SEQUENCE, TOTAL, TensorSpec


def component_piece(spec: GraphSpec) -> Piece:
    arguments = (spec.config, spec.unit.component, spec.float32_attention)
    outputs = tuple(output.name for output in spec.contract.outputs)
    return Piece(traced_component, arguments, spec.dtype, spec.contract.inputs, outputs)


def prologue_piece(spec: GraphSpec) -> Piece:
    cache = CACHE_FORMS[spec.unit.cache]
    arguments = (spec.config, spec.max_positions, cache)
    return Piece(traced.Prologue, arguments, "fp32", _inputs(spec, cache.step_inputs), cache.step_values)


def embedding_piece(spec: GraphSpec) -> Piece:
    return Piece(traced.Embedding, (spec.config,), spec.dtype, _inputs(spec, ["input_ids"]), ("embedding",))


def block_piece(spec: GraphSpec) -> Piece:
    cache = CACHE_FORMS[spec.unit.cache]
    names = ("x", "cos", "sin", "visible", *cache.block_inputs, "past_key", "past_value")
    arguments = (spec.config, spec.float32_attention, cache)
    outputs = ("out", "present_key", "present_value")
    return Piece(traced.TracedBlock, arguments, spec.dtype, _inputs(spec, names), outputs)


def zero_pads_piece(spec: GraphSpec) -> Piece:
    return Piece(traced.ZeroPads, (), spec.dtype, _inputs(spec, ["x", "real"]), ("hidden_states_out",))


def head_piece(spec: GraphSpec) -> Piece:
    names = ["x", "real"] if spec.unit.logits == "last" else ["x"]
    arguments = (spec.config, spec.unit.logits, spec.weight_format is not None)
    return Piece(traced.Head, arguments, spec.dtype, _inputs(spec, names), ("logits",))


def _inputs(spec: GraphSpec, names: Sequence[str]) -> tuple[TensorSpec, ...]:
    """The inputs of a piece, by the names that the modules give them."""
    config, dtype = spec.config, spec.dtype
    past = (BATCH, config.n_kv_heads, CACHE_FORMS[spec.unit.cache].past_axis, config.head_dim)
    known: dict[str, tuple[str, tuple[int | str, ...]]] = {
        "input_ids": ("int64", (BATCH, SEQUENCE)),
        "position_ids": ("int64", (BATCH, SEQUENCE)),
        "write_indices": ("int64", (BATCH,)),
        "attention_mask": ("int64", (BATCH, TOTAL)),
        "cos": ("fp32", (BATCH, SEQUENCE, config.head_dim // 2)),
        "sin": ("fp32", (BATCH, SEQUENCE, config.head_dim // 2)),
        "visible": ("bool", (BATCH, 1, SEQUENCE, TOTAL)),
        "total": ("int64", (1,)),
        "real": ("bool", (BATCH, SEQUENCE)),
        "x": (dtype, (BATCH, SEQUENCE, config.hidden_size)),
        "past_key": (dtype, past),
        "past_value": (dtype, past),
    }
    return tuple(TensorSpec(name, *known[name]) for name in names)
