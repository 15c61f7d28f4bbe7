"""Opens a checkpoint folder of either format, told apart by the config file it holds."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from exporter.common.errors import CheckpointError, InputError
from exporter.model.weights import WeightSource
from exporter.spec.catalogue import ModelConfig

log = logging.getLogger(__name__)


class CheckpointWeights(WeightSource, Protocol):
    """A weight source that has proven its coverage.

    Attributes:
        counts: tensors used, and derived ones passed over.
    """

    counts: dict[str, int]


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: geometry, weights by canonical name, and what a whole model's bundle takes along."""

    config: ModelConfig
    weights: CheckpointWeights
    end_token_ids: tuple[int, ...]
    tokenizer_files: tuple[Path, ...]


def open_checkpoint(folder: str | Path, model: str | None = None) -> Checkpoint:
    """Opens a folder and proves that its tensors are exactly those of its config.

    Args:
        folder: with config.json (Hugging Face) or params.json (Meta).
        model: catalogue name that supplies what a params.json does not say; a config.json says all.

    Raises:
        CheckpointError: the folder, config, a shard or a tensor is missing, damaged, unexpected or of another shape.
        InputError: `model` is given for a Hugging Face folder.
    """
    from exporter.checkpoint.huggingface import open_huggingface
    from exporter.checkpoint.meta import open_meta

    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(
            f"checkpoint {folder}: no such folder; give the folder that holds config.json or params.json and the weights"
        )
    found = [name for name in ("config.json", "params.json") if (folder / name).is_file()]
    if len(found) != 1:
        what = (
            "both config.json and params.json" if found else "no config.json (Hugging Face) and no params.json (Meta)"
        )
        raise CheckpointError(f"checkpoint {folder}: it holds {what}, expected one of them")
    if found == ["params.json"]:
        checkpoint = open_meta(folder, model)
    elif model is not None:
        raise InputError(
            f"model: got {model} beside the Hugging Face folder {folder}, whose config.json says all; leave --model out"
        )
    else:
        checkpoint = open_huggingface(folder)
    log.info("%s, by its %s: %s; tensors %s", folder, *found, checkpoint.config, checkpoint.weights.counts)
    return checkpoint
