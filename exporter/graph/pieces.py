"""The pieces that a graph is joined from: which module is traced, and with which inputs.

A piece takes from the spec only what its module needs, so that slices, parts and whole models share their pieces.
"""

from __future__ import annotations

from exporter.graph import fused_decoder as traced
from exporter.graph.fragments import Piece
from exporter.spec.graph_spec import GraphSpec
from exporter.spec.tensors import BATCH, CAPACITY, PAST, SEQUENCE, TOTAL, TensorSpec


def component_piece(spec: GraphSpec) -> Piece:
    arguments = (spec.config, spec.unit.component, spec.float32_attention)
    outputs = tuple(output.name for output in spec.contract.outputs)
    return Piece(traced.traced_component, arguments, spec.dtype, spec.contract.inputs, outputs)


def prologue_piece(spec: GraphSpec) -> Piece:
    positions, mask = _spec("position_ids", "int64", BATCH, SEQUENCE), _spec("attention_mask", "int64", BATCH, TOTAL)
    arguments = (spec.config, spec.max_positions)
    if spec.unit.cache == "growing":
        return Piece(traced.GrowingPrologue, arguments, "fp32", (positions, mask), ("cos", "sin", "visible"))
    inputs = (positions, _spec("write_indices", "int64", BATCH), mask)
    return Piece(traced.Prologue, arguments, "fp32", inputs, ("cos", "sin", "visible", "total", "real"))


def embedding_piece(spec: GraphSpec) -> Piece:
    inputs = (_spec("input_ids", "int64", BATCH, SEQUENCE),)
    return Piece(traced.Embedding, (spec.config,), spec.dtype, inputs, ("embedding",))


def block_piece(spec: GraphSpec) -> Piece:
    config, dtype, growing = spec.config, spec.dtype, spec.unit.cache == "growing"
    cache_axes = (BATCH, config.n_kv_heads, PAST if growing else CAPACITY, config.head_dim)
    inputs = (
        _spec("x", dtype, BATCH, SEQUENCE, config.hidden_size),
        _spec("cos", "fp32", BATCH, SEQUENCE, config.head_dim // 2),
        _spec("sin", "fp32", BATCH, SEQUENCE, config.head_dim // 2),
        _spec("visible", "bool", BATCH, 1, SEQUENCE, TOTAL),
        *([] if growing else [_spec("total", "int64", 1), _spec("write_indices", "int64", BATCH)]),
        _spec("past_key", dtype, *cache_axes),
        _spec("past_value", dtype, *cache_axes),
    )
    block = traced.GrowingBlock if growing else traced.TracedBlock
    return Piece(block, (config, spec.float32_attention), dtype, inputs, ("out", "present_key", "present_value"))


def zero_pads_piece(spec: GraphSpec) -> Piece:
    x = _spec("x", spec.dtype, BATCH, SEQUENCE, spec.config.hidden_size)
    return Piece(traced.ZeroPads, (), spec.dtype, (x, _spec("real", "bool", BATCH, SEQUENCE)), ("hidden_states_out",))


def head_piece(spec: GraphSpec) -> Piece:
    inputs = [_spec("x", spec.dtype, BATCH, SEQUENCE, spec.config.hidden_size)]
    if spec.unit.logits == "last":
        inputs += [_spec("write_indices", "int64", BATCH), _spec("attention_mask", "int64", BATCH, TOTAL)]
    arguments = (spec.config, spec.unit.logits, spec.weight_format is not None)
    return Piece(traced.Head, arguments, spec.dtype, tuple(inputs), ("logits",))


def _spec(name: str, dtype: str, *axes: int | str) -> TensorSpec:
    return TensorSpec(name, dtype, axes)
