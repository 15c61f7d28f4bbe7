"""Finds the file of each tensor in a Hugging Face folder: one file, or shards that an index lists.

A folder may hold both, such as one file beside the index of an older version. Each is a candidate of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open

from exporter.checkpoint.checkpoint_folder import check_opens, listed, read_json
from exporter.checkpoint.stored_names import HUGGINGFACE_DERIVED
from exporter.common.errors import CheckpointError
from exporter.spec.catalogue import short

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"

TensorFiles = dict[str, Path]  # tensor name → the file that holds it


def candidates(folder: Path, unneeded: Collection[str] = ()) -> dict[str, Callable[[], TensorFiles]]:
    """Returns what may be the weights of a folder: a name for messages → a function that reads the headers.

    Args:
        folder: the folder.
        unneeded: tensors that are not needed, such as a tied head; an index may be wrong about them.

    Raises:
        CheckpointError: there is none. The functions raise it where a file or the index is damaged.
    """
    found: dict[str, Callable[[], TensorFiles]] = {}
    if (folder / WHOLE).is_file():
        found[WHOLE] = partial(_in_file, folder / WHOLE)
    if (folder / INDEX).is_file():
        found[f"the shards of {INDEX}"] = partial(_in_shards, folder, unneeded)
    if not found:
        raise CheckpointError(f"checkpoint {folder}: it holds neither {WHOLE} nor {INDEX}{_others(folder)}")
    return found


def _others(folder: Path) -> str:
    """Returns what else a folder without weights holds, and the fix, as the end of a message."""
    names = sorted(path.name for path in folder.iterdir())
    if shards := [name for name in names if name.endswith(".safetensors")]:
        return f", but {listed(shards)}; fetch {INDEX} too, or rename a file that holds the whole model to {WHOLE}"
    if pickles := [name for name in names if name.endswith((".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"))]:
        return f", but {listed(pickles)}; convert the weights to safetensors"
    return ""


def _in_file(path: Path) -> TensorFiles:
    return dict.fromkeys(names_in(path), path)


def _in_shards(folder: Path, unneeded: Collection[str]) -> TensorFiles:
    """Returns the tensors of all shards. Their headers say what they hold, and the index must agree about the weights.

    Raises:
        CheckpointError: the index or a shard is damaged or missing, or they disagree about a weight.
    """
    path = folder / INDEX
    index = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise CheckpointError(f"{path}: it has no weight_map")
    outside = [shard for shard in index.values() if not isinstance(shard, str) or Path(shard).name != shard]
    if outside:
        raise CheckpointError(f"{path}: it names the shard {short(outside[0])}, expected a file inside the folder")
    files: TensorFiles = {}
    for shard in sorted(set(index.values())):
        for name in names_in(folder / shard):
            if name in files and not _is_unneeded(name, unneeded):
                raise CheckpointError(f"checkpoint {folder}: {name} is in {files[name].name} and in {shard}")
            files[name] = folder / shard
    wrong = [name for name in sorted({*files, *index}) if files.get(name) != folder / str(index.get(name))]
    wrong = [name for name in wrong if not _is_unneeded(name, unneeded)]
    if wrong:
        raise CheckpointError(f"{path}: it does not match its shards for {listed(wrong)}")
    return files


def _is_unneeded(name: str, unneeded: Collection[str]) -> bool:
    return name in unneeded or HUGGINGFACE_DERIVED.fullmatch(name) is not None


def names_in(path: Path) -> list[str]:
    """Returns the names of the tensors in a safetensors file.

    Raises:
        CheckpointError: the file is missing, cannot be opened or is not whole.
    """
    if not path.is_file():
        raise CheckpointError(f"checkpoint {path.parent}: the shard {path.name} is missing")
    check_opens(path)
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError, MemoryError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({error}); fetch it again") from None
