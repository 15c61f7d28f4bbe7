"""The pieces that a graph is joined from: which module is traced, and with which inputs."""

from __future__ import annotations

from exporter.graph import fused_decoder as traced
from exporter.graph.fragments import Piece
from exporter.spec.catalogue import ModelConfig
from exporter.spec.tensors import BATCH, CAPACITY, PAST, SEQUENCE, TOTAL, TensorSpec, graph_contract
from exporter.spec.unit import Unit


def component_piece(config: ModelConfig, component: str, dtype: str, float32_attention: bool) -> Piece:
    contract = graph_contract(config, Unit("component", component), dtype)
    names = tuple(spec.name for spec in contract.outputs)
    return Piece(traced.traced_component, (config, component, float32_attention), dtype, contract.inputs, names)


def prologue_piece(config: ModelConfig, max_positions: int, growing: bool) -> Piece:
    positions, mask = _spec("position_ids", "int64", BATCH, SEQUENCE), _spec("attention_mask", "int64", BATCH, TOTAL)
    if growing:
        return Piece(
            traced.GrowingPrologue, (config, max_positions), "fp32", (positions, mask), ("cos", "sin", "visible")
        )
    inputs = (positions, _spec("write_indices", "int64", BATCH), mask)
    return Piece(traced.Prologue, (config, max_positions), "fp32", inputs, ("cos", "sin", "visible", "total", "real"))


def embedding_piece(config: ModelConfig, dtype: str) -> Piece:
    return Piece(traced.Embedding, (config,), dtype, (_spec("input_ids", "int64", BATCH, SEQUENCE),), ("embedding",))


def block_piece(config: ModelConfig, dtype: str, float32_attention: bool, growing: bool) -> Piece:
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
    return Piece(block, (config, float32_attention), dtype, inputs, ("out", "present_key", "present_value"))


def zero_pads_piece(config: ModelConfig, dtype: str) -> Piece:
    inputs = (_spec("x", dtype, BATCH, SEQUENCE, config.hidden_size), _spec("real", "bool", BATCH, SEQUENCE))
    return Piece(traced.ZeroPads, (), dtype, inputs, ("hidden_states_out",))


def head_piece(config: ModelConfig, dtype: str, logits: str, transposed: bool) -> Piece:
    x = _spec("x", dtype, BATCH, SEQUENCE, config.hidden_size)
    last = (_spec("write_indices", "int64", BATCH), _spec("attention_mask", "int64", BATCH, TOTAL))
    return Piece(
        traced.Head, (config, logits, transposed), dtype, (x, *(last if logits == "last" else ())), ("logits",)
    )


def _spec(name: str, dtype: str, *axes: int | str) -> TensorSpec:
    return TensorSpec(name, dtype, axes)
