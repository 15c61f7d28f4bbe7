"""The forms of a graph's cache: buffers of a fixed capacity that are updated in place, and pasts that grow."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exporter.graph.fused_decoder import CacheForm, RopeTables, named, symbolic
from exporter.model.block import cache_rows, real_tokens, visibility
from exporter.spec.tensors import CAPACITY, PAST


@dataclass(frozen=True)
class InPlaceCache(CacheForm):
    """One buffer [B, K, C, D] a tensor. The update is TensorScatter-24; its present shares the memory of its past."""

    past_axis = CAPACITY
    step_inputs = ("position_ids", "write_indices", "attention_mask")
    step_values = ("cos", "sin", "visible", "total", "real")
    block_inputs = ("total", "write_indices")

    def prologue(self, tables: RopeTables, *inputs: Tensor) -> tuple[Tensor, ...]:
        position_ids, write_indices, attention_mask = inputs
        rows = cache_rows(write_indices, position_ids.shape[1])
        real = real_tokens(attention_mask, rows)
        total = symbolic("Shape", (attention_mask,), {"start": 1, "end": 2}, dtype=torch.int64, shape=(1,))
        cos, sin = tables(position_ids)
        visible = named("attention_mask.visible", visibility(attention_mask, rows, real))
        total = named("attention_mask.total_length", total)
        real = named("attention_mask.real", real)
        return cos, sin, visible, total, real

    def update(self, past: Tensor, new: Tensor, total_length: int, *shared: Tensor) -> Tensor:
        _, write_indices = shared
        inputs = (past, new, write_indices)
        return symbolic("TensorScatter", inputs, {"axis": 2}, dtype=past.dtype, shape=past.shape, version=24)

    def rows_in_use(self, name: str, present: Tensor, total_length: int, *shared: Tensor) -> Tensor:
        """The first `total` int64 [1] rows: the cost of a step follows the tokens in use, not the allocation."""
        total, _ = shared
        inputs = (present, torch.tensor([0]), total, torch.tensor([2]))
        shape = (present.shape[0], present.shape[1], total_length, present.shape[3])
        return named(name, symbolic("Slice", inputs, dtype=present.dtype, shape=shape))


@dataclass(frozen=True)
class GrowingCache(CacheForm):
    """Past and present are separate tensors: present [B, K, P + T, D] is past [B, K, P, D] and then the new rows."""

    past_axis = PAST
    step_inputs = ("position_ids", "attention_mask")
    step_values = ("cos", "sin", "visible")
    block_inputs = ()

    def prologue(self, tables: RopeTables, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The first new token of every sequence goes to row P = total length − T."""
        position_ids, attention_mask = inputs
        batch, length = position_ids.shape
        past_len = attention_mask.shape[1] - length
        rows = cache_rows(torch.full((1,), past_len), length).expand(batch, length)
        visible = visibility(attention_mask, rows, real_tokens(attention_mask, rows))
        cos, sin = tables(position_ids)
        return cos, sin, named("attention_mask.visible", visible)

    def update(self, past: Tensor, new: Tensor, total_length: int, *shared: Tensor) -> Tensor:
        shape = (past.shape[0], past.shape[1], total_length, past.shape[3])
        return symbolic("Concat", (past, new), {"axis": 2}, dtype=past.dtype, shape=shape)

    def rows_in_use(self, name: str, present: Tensor, total_length: int, *shared: Tensor) -> Tensor:
        """The whole present, which is an output of the graph under its own name."""
        return present


CACHE_FORMS: dict[str, CacheForm] = {"in_place": InPlaceCache(), "growing": GrowingCache()}  # by `Unit.cache`
