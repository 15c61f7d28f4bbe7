"""What every checkpoint format opens to: the geometry, the weights and the files that a whole model's bundle needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from exporter.model.weights import WeightSource
from exporter.spec.catalogue import ModelConfig


class CheckpointWeights(WeightSource, Protocol):
    """A weight source whose tensors are exactly the expected ones.

    Attributes:
        counts: number of tensors that are used, and number of derived tensors that are ignored.
    """

    counts: dict[str, int]


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint.

    Attributes:
        config: the model's geometry.
        weights: the weights by canonical name.
        end_token_ids: the tokens that end a generation.
        tokenizer_files: the tokenizer's files in the folder.
        begin_token_id, pad_token_id: what a text begins with and what fills up a batch; None where the checkpoint does
            not say.
        notes: what a user should know, such as which of two sets of weights was taken and why.
    """

    config: ModelConfig
    weights: CheckpointWeights
    end_token_ids: tuple[int, ...]
    tokenizer_files: tuple[Path, ...]
    begin_token_id: int | None = None
    pad_token_id: int | None = None
    notes: tuple[str, ...] = ()
