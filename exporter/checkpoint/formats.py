"""Opens a checkpoint folder of either format. The config file in the folder decides which format it is."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from exporter.checkpoint.checkpoint import Checkpoint
from exporter.checkpoint.huggingface import open_huggingface
from exporter.checkpoint.lora import merge_adapter
from exporter.checkpoint.meta import open_meta
from exporter.common.errors import CheckpointError, InputError

log = logging.getLogger(__name__)

CONFIG_FILES = {"config.json": "Hugging Face", "params.json": "Meta"}


def open_checkpoint(folder: str | Path, model: str | None = None, lora: str | Path | None = None) -> Checkpoint:
    """Opens a folder and checks that its tensors are exactly those of its config.

    Args:
        folder: a folder with config.json (Hugging Face) or params.json (Meta).
        model: catalogue name for a Meta folder; it supplies the values that params.json lacks.
        lora: folder of an adapter that is merged into the weights as they are read.

    Raises:
        CheckpointError: the folder, config, a shard or a tensor is missing, damaged, unexpected or of another shape.
        InputError: the path is empty, or `model` is given for a Hugging Face folder.
    """
    if not os.fspath(folder):
        raise InputError("checkpoint: got an empty path, expected a folder with a config and weights; give its path")
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(
            f"checkpoint {folder}: no such folder; give the folder with {' or '.join(CONFIG_FILES)} and the weights"
        )
    if not os.access(folder, os.R_OK | os.X_OK):
        raise CheckpointError(
            f"checkpoint {folder}: the folder cannot be opened; nothing was read; check its permissions"
        )
    found = [name for name in CONFIG_FILES if (folder / name).is_file()]
    if len(found) != 1:
        missing = " and ".join(f"no {name} ({maker})" for name, maker in CONFIG_FILES.items())
        what = f"both {' and '.join(found)}" if found else missing
        raise CheckpointError(f"checkpoint {folder}: it holds {what}, expected one of them")
    if found == ["params.json"]:
        checkpoint = open_meta(folder, model)
    elif model is not None:
        raise InputError(
            f"model: got {model} with the Hugging Face folder {folder}, whose config.json has every value; "
            "leave model out"
        )
    else:
        checkpoint = open_huggingface(folder)
    log.info("%s, by its %s: %s; tensors %s", folder, *found, checkpoint.config, checkpoint.weights.counts)
    if lora is not None:
        checkpoint = merge_adapter(checkpoint, lora)
    for note in checkpoint.notes:
        log.info("%s: %s", folder, note)
    return checkpoint
