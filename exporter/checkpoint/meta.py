"""Reads Meta folders: params.json and consolidated.NN.pth, one file or the shards of a model-parallel run.

The rows of q and k are already in Meta's order. The .pth files are pickles, so opening one takes care. First, every
name in the pickle is compared with the few names that a file of tensors needs. Then torch's restricted unpickler reads
the pickle, which runs no code. The file is mapped, so a tensor's values are read only when a caller asks for them.
"""

from __future__ import annotations

import math
import pickletools
import re
import zipfile
from dataclasses import fields, replace
from pathlib import Path

import torch
from torch import Tensor

from exporter.checkpoint.checkpoint import Checkpoint
from exporter.checkpoint.checkpoint_folder import (
    check_coverage,
    check_opens,
    end_token_ids,
    head_is_embedding,
    read_json,
    same,
    stated,
    tokenizer_files,
)
from exporter.checkpoint.stored_names import META_DERIVED, meta_name
from exporter.common.errors import CheckpointError, InputError
from exporter.spec.catalogue import LARGEST_COUNT, ModelConfig, RopeScaling, WidthRule, lookup, short
from exporter.spec.parameters import weight_shapes
from exporter.spec.unit import Unit

# Matrices that shards split along their inputs. Other matrices are split along their outputs.
_ROW_PARALLEL = ("attention.wo.weight", "feed_forward.w2.weight")
META_ROPE_THETA = 10_000.0  # what Meta's code takes where params.json has no rope_theta
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_REQUIRED_PARAMS = ("dim", "n_layers", "n_heads", "norm_eps", "multiple_of")
_KNOWN_PARAMS = {
    *(*_REQUIRED_PARAMS, "n_kv_heads", "vocab_size", "ffn_dim_multiplier", "rope_theta", "use_scaled_rope"),
    *("max_seq_len", "max_batch_size"),
}


def open_meta(folder: Path, model: str | None) -> Checkpoint:
    """Opens a Meta folder.

    Args:
        folder: a folder with params.json and consolidated.NN.pth.
        model: catalogue name; it supplies the context length and, where RoPE is scaled, the rule.

    Raises:
        CheckpointError: a value is missing or not that of `model`, or a shard or tensor is missing, damaged, unexpected
            or of another shape.
    """
    params = read_json(folder / "params.json")
    paths = _shard_paths(folder)
    shards = [_open_shard(path) for path in paths]
    try:
        config = parse_params(params, _vocab_size(params, shards), model)
    except (InputError, TypeError) as error:
        raise CheckpointError(f"checkpoint {folder}: {error}") from None
    weights = MetaWeights(folder, config, paths, shards)
    if head_is_embedding(weights, config.vocab_size):
        config = replace(config, tie_word_embeddings=True)
        weights = MetaWeights(folder, config, paths, shards)
    elif model is not None and lookup(model).tie_word_embeddings:
        raise CheckpointError(
            f"checkpoint {folder}: it has an output head of its own, and that of {model} is its embedding; "
            "give the right model"
        )
    return Checkpoint(config, weights, end_token_ids(folder, params, config.vocab_size), tokenizer_files(folder))


def parse_params(params: dict, vocab_size: int, model: str | None) -> ModelConfig:
    """Returns a params.json as a ModelConfig. The catalogue supplies the context length and the RoPE scaling rule.

    Every other value must be that of the named model.

    Raises:
        CheckpointError: a value is neither in params.json nor in the catalogue, or params.json contradicts `model`.
        InputError: the values contradict each other.
    """
    unknown = sorted(set(params) - _KNOWN_PARAMS)
    missing = [key for key in _REQUIRED_PARAMS if params.get(key) is None]
    if unknown or missing:
        raise CheckpointError(f"params.json: unknown keys {short(unknown)}, missing keys {missing}")
    if model is None:
        needed = "the context length" + (" and the RoPE scaling rule" if _is_scaled(params) else "")
        raise CheckpointError(f"params.json lacks {needed}; give model, a name of the catalogue that supplies it")
    known = lookup(model)
    _check_params(params)
    config = ModelConfig(
        hidden_size=params["dim"],
        n_layers=params["n_layers"],
        n_heads=params["n_heads"],
        n_kv_heads=stated(params, "n_kv_heads", params["n_heads"]),
        head_dim=params["dim"] // params["n_heads"],
        intermediate_size=WidthRule(params.get("ffn_dim_multiplier"), params["multiple_of"]).width(params["dim"]),
        vocab_size=vocab_size,
        context_length=known.context_length,
        rope_theta=stated(params, "rope_theta", META_ROPE_THETA),
        rope_scaling=_scaling(params, known, model),
        norm_eps=params["norm_eps"],
    )
    names = [field.name for field in fields(ModelConfig) if field.name != "tie_word_embeddings"]  # the weights say it
    differing = [name for name in names if not _agree(getattr(config, name), getattr(known, name))]
    if differing:
        values = ", ".join(f"{name} {getattr(config, name)}, expected {getattr(known, name)}" for name in differing)
        raise CheckpointError(f"params.json is not of {model}: {values}; give the right model")
    return config


def _agree(a: object, b: object) -> bool:
    """Whether two values of a config are equal, or floats that differ only by their rounding to float32."""
    return a == b or (isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=2**-24))


def _check_params(params: dict) -> None:
    """Checks the values that are used in a calculation before ModelConfig can check them.

    Raises:
        InputError: a value is not a number, or is out of range.
    """
    for key in ("dim", "n_heads", "multiple_of"):
        if not isinstance(params[key], int) or isinstance(params[key], bool) or not 1 <= params[key] <= LARGEST_COUNT:
            raise InputError(
                f"params.json {key}: got {short(params[key])}, expected a whole number from 1 to {LARGEST_COUNT:,}"
            )
    multiplier = params.get("ffn_dim_multiplier")
    is_number = isinstance(multiplier, int | float) and not isinstance(multiplier, bool)
    if multiplier is not None and not (is_number and 0 < multiplier < LARGEST_COUNT):
        raise InputError(f"params.json ffn_dim_multiplier: got {short(multiplier)}, expected a number above 0")
    if params["dim"] % params["n_heads"]:
        raise InputError(f"params.json: got dim {params['dim']} and n_heads {params['n_heads']}, expected a multiple")


def _is_scaled(params: dict) -> bool:
    """Whether RoPE is scaled.

    Raises:
        CheckpointError: the value is neither true nor false.
    """
    scaled = stated(params, "use_scaled_rope", False)
    if not isinstance(scaled, bool):
        raise CheckpointError(f"params.json use_scaled_rope: got {short(scaled)}, expected true or false")
    return scaled


def _scaling(params: dict, known: ModelConfig, model: str) -> RopeScaling | None:
    if not _is_scaled(params):
        return None
    if known.rope_scaling is None:
        raise CheckpointError(f"params.json scales RoPE and {model} has no rule for it; give the right model")
    return known.rope_scaling


def _vocab_size(params: dict, shards: list[dict[str, Tensor]]) -> int:
    """Returns the size in params.json or, where that has none (-1), the rows of the output head in all shards."""
    size = stated(params, "vocab_size", -1)
    if not same(size, -1):
        return size
    if any("output.weight" not in shard or shard["output.weight"].dim() != 2 for shard in shards):
        raise CheckpointError("params.json gives no vocab_size and there is no output.weight to read it from")
    return sum(shard["output.weight"].shape[0] for shard in shards)


def _shard_paths(folder: Path) -> list[Path]:
    """Returns the paths of all consolidated.NN.pth, in order.

    Raises:
        CheckpointError: there is none, or a number is missing.
    """
    paths = sorted(path for path in folder.iterdir() if re.fullmatch(r"consolidated\.\d+\.pth", path.name))
    expected = [f"consolidated.{index:02d}.pth" for index in range(len(paths))]
    if not paths or [path.name for path in paths] != expected:
        raise CheckpointError(
            f"checkpoint {folder}: got {[path.name for path in paths]}, expected consolidated.00.pth "
            "and the next numbers without a gap"
        )
    return paths


def _open_shard(path: Path) -> dict[str, Tensor]:
    """Maps a shard and returns tensor name → tensor.

    Raises:
        CheckpointError: the file is not a plain dictionary of tensors.
    """
    check_opens(path)
    try:
        _check_archive(path)
        shard = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch raises many kinds: for a bad zip, a bad pickle, a forbidden global
        reason = short(str(error).partition("\n")[0])
        raise CheckpointError(
            f"{path}: not a plain file of tensors ({type(error).__name__}: {reason}); nothing in it was run"
        ) from None
    if not isinstance(shard, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in shard.items()
    ):
        raise CheckpointError(f"{path}: got {type(shard).__name__}, expected a dictionary of tensors")
    for name, tensor in shard.items():
        if tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
            raise CheckpointError(
                f"{path}: {short(name)} has shape {short(list(tensor.shape))} and too few bytes for it; "
                "expected a tensor as torch.save writes it"
            )
    return shard


_PICKLE_BYTES = 16 * 2**20  # a pickle holds names, shapes and places of tensors; the values are other records
# Kinds of storage that torch can open safely. Wrong dtypes are refused later, with the tensor's name.
_STORAGES = ("Float", "Half", "BFloat16", "Double", "Bool", "Byte", "Char", "Short", "Int", "Long")
_GLOBALS = {
    *("collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"),
    *(f"torch {kind}Storage" for kind in _STORAGES),
}
_POSTPONED_GLOBALS = ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4")  # opcodes that name a global by other means


def _check_archive(path: Path) -> None:
    """Refuses an archive with compressed records, and a pickle that names anything except plain tensors.

    Torch allows more in a file of weights: some of it takes as much memory as the file asks for, or makes tensors
    without values.

    Raises:
        ValueError: the archive or the pickle has another form; the message says what was found.
        zipfile.BadZipFile: the file is not a zip archive.
    """
    if not path.is_file():
        raise ValueError("it is not a plain file")
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        packed = [record.filename for record in records if record.compress_type != zipfile.ZIP_STORED]
        pickles = [record for record in records if record.filename.endswith("/data.pkl")]
        twice = len({record.filename for record in records}) != len(records)
        if packed or twice or len(pickles) != 1 or pickles[0].file_size > _PICKLE_BYTES:
            raise ValueError("its records are compressed or share a name, or its pickle is missing or too large")
        for opcode, argument, _ in pickletools.genops(archive.read(pickles[0])):
            unknown = opcode.name == "GLOBAL" and argument not in _GLOBALS
            if unknown or opcode.name in _POSTPONED_GLOBALS:
                raise ValueError(f"it names {argument or 'something by its stack'}, expected plain tensors alone")


class MetaWeights:
    """The shards' tensors under canonical names. Reading merges the pieces of a tensor.

    Attributes:
        counts: number of tensors that are used, and number of derived tensors that are ignored.
    """

    def __init__(self, folder: Path, config: ModelConfig, paths: list[Path], shards: list[dict[str, Tensor]]) -> None:
        self.description, self.has_own_head = {"source": "checkpoint"}, False
        self._folder, self._config, self._paths = folder, config, paths
        expected = {
            meta_name(name): shape
            for name, shape in weight_shapes(config, Unit("model", n_layers=config.n_layers)).items()
        }
        optional = {META_DERIVED} | ({"output.weight"} if config.tie_word_embeddings else set())
        for shard in shards:
            check_coverage(folder, set(shard), set(expected), optional)
        self._axes = {
            name: self._split_axis(name, shape, [shard[name] for shard in shards]) for name, shape in expected.items()
        }
        self.counts = {"used": len(expected), "derived": int(META_DERIVED in shards[0])}

    def _split_axis(self, name: str, shape: tuple[int, ...], pieces: list[Tensor]) -> int | None:
        """Returns the axis along which a tensor is split over the shards; None where every shard has it whole."""
        if any(piece.dtype not in _FLOATS for piece in pieces):
            floats = ", ".join(str(dtype).removeprefix("torch.") for dtype in _FLOATS)
            raise CheckpointError(f"checkpoint {self._folder}: {name} is {pieces[0].dtype}, expected one of {floats}")
        whole = [tuple(piece.shape) == shape for piece in pieces]
        if all(whole):
            if any(not torch.equal(piece, pieces[0]) for piece in pieces[1:]):
                raise CheckpointError(
                    f"checkpoint {self._folder}: {name} is whole in every shard and differs between them"
                )
            return None
        if any(piece.dim() != len(shape) for piece in pieces):
            found = [piece.dim() for piece in pieces]
            raise CheckpointError(
                f"checkpoint {self._folder}: {name} has {found} axes in its shards, expected {len(shape)}"
            )
        axes = (0, 1) if name == "tok_embeddings.weight" else (1,) if name.endswith(_ROW_PARALLEL) else (0,)
        for axis in axes[: len(shape)]:
            merged = list(pieces[0].shape)
            merged[axis] = sum(piece.shape[axis] for piece in pieces)
            same = all(_without(piece.shape, axis) == _without(pieces[0].shape, axis) for piece in pieces)
            if same and tuple(merged) == shape:
                return axis
        shapes = [list(piece.shape) for piece in pieces]
        raise CheckpointError(
            f"checkpoint {self._folder}: {name} has shapes {shapes} in its shards, expected {list(shape)} once merged"
        )

    def read(self, name: str, columns: slice = slice(None), rows: slice = slice(None)) -> Tensor:
        """Reads a weight as `WeightSource.read` says.

        The shards are mapped for this one read, because mapped pages count as memory of this process.
        """
        stored = meta_name(name)
        pieces = [_open_shard(path)[stored] for path in self._paths]
        axis = self._axes[stored]
        if pieces[0].dim() == 1:
            return (pieces[0][columns] if axis is None else _run(pieces, axis, columns)).clone()
        wanted = (rows, columns)
        if axis is None:
            return pieces[0][wanted].clone()
        across = slice(None) if axis else columns
        return _run(pieces, axis, wanted[axis])[(rows, across) if axis else (slice(None), across)].clone()


def _run(pieces: list[Tensor], axis: int, wanted: slice) -> Tensor:
    """Returns the wanted run along one axis of consecutive pieces. It reads only the pieces that overlap the run."""
    start, stop, _ = wanted.indices(sum(piece.shape[axis] for piece in pieces))
    parts, offset = [], 0
    for piece in pieces:
        low, high = max(start - offset, 0), min(stop - offset, piece.shape[axis])
        if low < high:
            parts.append(piece.narrow(axis, low, high - low))
        offset += piece.shape[axis]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=axis)


def _without(shape: torch.Size, axis: int) -> tuple[int, ...]:
    return tuple(size for index, size in enumerate(shape) if index != axis)
