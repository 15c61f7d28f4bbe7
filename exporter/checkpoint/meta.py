"""Meta folders: params.json and consolidated.NN.pth, one file or the shards of a model-parallel run merged by their rule.

Rows of q and k are in Meta's order already. The .pth files are pickles. First everything that one names is held against the few
things that a file of tensors consists of; then torch's restricted unpickler reads it, which runs no code; and it is mapped, so
that a tensor is read when it is asked for.
"""

from __future__ import annotations

import pickletools
import re
import zipfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from exporter.checkpoint.folder import check_coverage, end_token_ids, head_is_embedding, read_json, tokenizer_files
from exporter.checkpoint.formats import Checkpoint
from exporter.common.errors import CheckpointError, InputError
from exporter.spec.catalogue import LARGEST_COUNT, ModelConfig, RopeScaling, WidthRule, lookup, short
from exporter.spec.parameters import weight_shapes
from exporter.spec.unit import Unit

_LAYER_NAMES = {  # canonical name inside a block → Meta's name inside a layer
    "attention_norm": "attention_norm",
    "attention.q_proj": "attention.wq",
    "attention.k_proj": "attention.wk",
    "attention.v_proj": "attention.wv",
    "attention.o_proj": "attention.wo",
    "ffn_norm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
_MODEL_NAMES = {
    "embedding.weight": "tok_embeddings.weight",
    "norm.weight": "norm.weight",
    "lm_head.weight": "output.weight",
}
_ROW_PARALLEL = (
    "attention.wo.weight",
    "feed_forward.w2.weight",
)  # split along their inputs; other matrices along their outputs
_DERIVED = "rope.freqs"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_KNOWN_PARAMS = {
    "dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier", "norm_eps", "rope_theta",
    "use_scaled_rope", "max_seq_len", "max_batch_size",
}  # fmt: skip


def open_meta(folder: Path, model: str | None) -> Checkpoint:
    """Opens a Meta folder.

    Args:
        folder: with params.json and consolidated.NN.pth.
        model: catalogue name that supplies the context length and, where RoPE is scaled, its rule.

    Raises:
        CheckpointError: a fact is missing, or a shard or tensor is missing, damaged, unexpected or of another shape.
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
    return Checkpoint(config, weights, end_token_ids(folder, params), tokenizer_files(folder))


def parse_params(params: dict, vocab_size: int, model: str | None) -> ModelConfig:
    """A params.json as a ModelConfig, its gaps filled from the catalogue.

    Raises:
        CheckpointError: a fact is nowhere to be had, or params.json contradicts the named model.
        InputError: the values contradict each other.
    """
    unknown = sorted(set(params) - _KNOWN_PARAMS)
    missing = [key for key in ("dim", "n_layers", "n_heads", "norm_eps", "multiple_of") if params.get(key) is None]
    if unknown or missing:
        raise CheckpointError(f"params.json: unknown keys {short(unknown)}, missing keys {missing}")
    if model is None:
        needed = "the context length" + (" and the RoPE scaling rule" if params.get("use_scaled_rope") else "")
        raise CheckpointError(
            f"params.json does not say {needed}; name the model with --model so that the catalogue supplies it"
        )
    known = lookup(model)
    _check_params(params)
    config = ModelConfig(
        hidden_size=params["dim"],
        n_layers=params["n_layers"],
        n_heads=params["n_heads"],
        n_kv_heads=params.get("n_kv_heads") or params["n_heads"],
        head_dim=params["dim"] // params["n_heads"],
        intermediate_size=WidthRule(params.get("ffn_dim_multiplier"), params["multiple_of"]).width(params["dim"]),
        vocab_size=vocab_size,
        context_length=known.context_length,
        rope_theta=params.get("rope_theta", 10_000.0),
        rope_scaling=_scaling(params, known, model),
        norm_eps=params["norm_eps"],
    )
    differing = [
        name
        for name in ("hidden_size", "n_layers", "n_heads", "n_kv_heads", "intermediate_size")
        if getattr(config, name) != getattr(known, name)
    ]
    if differing:
        values = ", ".join(f"{name} {getattr(config, name)} against {getattr(known, name)}" for name in differing)
        raise CheckpointError(f"params.json is not of {model}: {values}; name the right model")
    return config


def _check_params(params: dict) -> None:
    """What is computed with before ModelConfig can look at it.

    Raises:
        InputError: a number is none, or out of all bounds.
    """
    for key in ("dim", "n_heads", "multiple_of"):
        if not isinstance(params[key], int) or isinstance(params[key], bool) or not 1 <= params[key] <= LARGEST_COUNT:
            raise InputError(
                f"params.json {key}: got {short(params[key])}, expected a whole number from 1 to {LARGEST_COUNT:,}"
            )
    multiplier = params.get("ffn_dim_multiplier")
    if multiplier is not None and (
        not isinstance(multiplier, int | float) or isinstance(multiplier, bool) or not 0 < multiplier < LARGEST_COUNT
    ):
        raise InputError(f"params.json ffn_dim_multiplier: got {short(multiplier)}, expected a number above 0")
    if params["dim"] % params["n_heads"]:
        raise InputError(f"params.json: got dim {params['dim']} and n_heads {params['n_heads']}, expected a multiple")


def _scaling(params: dict, known: ModelConfig, model: str) -> RopeScaling | None:
    if not params.get("use_scaled_rope"):
        return None
    if known.rope_scaling is None:
        raise CheckpointError(f"params.json scales RoPE and {model} has no rule for it; name the right model")
    return known.rope_scaling


def _vocab_size(params: dict, shards: list[dict[str, Tensor]]) -> int:
    """From params.json, or where that says nothing (-1), from the output head, which is split along the vocabulary."""
    stated = params.get("vocab_size", -1)
    if isinstance(stated, int) and stated > 0:
        return stated
    if any("output.weight" not in shard or shard["output.weight"].dim() != 2 for shard in shards):
        raise CheckpointError("params.json gives no vocab_size and there is no output.weight to read it from")
    return sum(shard["output.weight"].shape[0] for shard in shards)


def _shard_paths(folder: Path) -> list[Path]:
    """Every consolidated.NN.pth.

    Raises:
        CheckpointError: none, or a gap in the numbers.
    """
    paths = sorted(path for path in folder.iterdir() if re.fullmatch(r"consolidated\.\d+\.pth", path.name))
    expected = [f"consolidated.{index:02d}.pth" for index in range(len(paths))]
    if not paths or [path.name for path in paths] != expected:
        raise CheckpointError(
            f"checkpoint {folder}: got {[path.name for path in paths]}, expected consolidated.00.pth and on without a gap"
        )
    return paths


def _open_shard(path: Path) -> dict[str, Tensor]:
    """A shard, mapped: tensor name → tensor.

    Raises:
        CheckpointError: the file is not a plain dictionary of tensors.
    """
    try:
        _check_archive(path)
        shard = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch raises many kinds: a bad zip, a bad pickle, a forbidden global
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
                f"{path}: {short(name)} has shape {short(list(tensor.shape))} over fewer bytes; it is no tensor that was saved"
            )
    return shard


_PICKLE_BYTES = 16 * 2**20  # names, shapes and places of tensors; the values are records of their own
_STORAGES = (
    "Float",
    "Half",
    "BFloat16",
    "Double",
    "Bool",
    "Byte",
    "Char",
    "Short",
    "Int",
    "Long",
)  # the wrong ones are refused by name, later
_GLOBALS = {
    "collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter",
    *(f"torch {kind}Storage" for kind in _STORAGES),
}  # fmt: skip


def _check_archive(path: Path) -> None:
    """Refuses an archive of compressed records, and a pickle that names anything but tensors of the floating-point types.

    Some of what torch itself allows in a file of weights takes memory at the file's word, or makes tensors without values.

    Raises:
        ValueError, zipfile.BadZipFile: says what was found.
    """
    if not path.is_file():
        raise ValueError("it is not a plain file")
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        packed = [record.filename for record in records if record.compress_type != zipfile.ZIP_STORED]
        pickles = [record for record in records if record.filename.endswith("/data.pkl")]
        if (
            packed
            or len({record.filename for record in records}) != len(records)
            or len(pickles) != 1
            or pickles[0].file_size > _PICKLE_BYTES
        ):
            raise ValueError("its records are compressed, or of one name, or its pickle is missing or too large")
        for opcode, argument, _ in pickletools.genops(archive.read(pickles[0])):
            if opcode.name in ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4") or (
                opcode.name == "GLOBAL" and argument not in _GLOBALS
            ):
                raise ValueError(f"it names {argument or 'something by its stack'}, expected plain tensors alone")


class MetaWeights:
    """The shards' tensors under canonical names, merged as they are read.

    Attributes:
        counts: tensors used, and derived ones passed over.
    """

    def __init__(self, folder: Path, config: ModelConfig, paths: list[Path], shards: list[dict[str, Tensor]]) -> None:
        self.description, self.has_own_head = {"source": "checkpoint"}, False
        self._folder, self._config, self._paths = folder, config, paths
        expected = {
            _stored_name(name): shape
            for name, shape in weight_shapes(config, Unit("model", n_layers=config.n_layers)).items()
        }
        optional = {_DERIVED} | ({"output.weight"} if config.tie_word_embeddings else set())
        for shard in shards:
            check_coverage(folder, set(shard), set(expected), optional)
        self._axes = {
            name: self._split_axis(name, shape, [shard[name] for shard in shards]) for name, shape in expected.items()
        }
        self.counts = {"used": len(expected), "derived": int(_DERIVED in shards[0])}

    def _split_axis(self, name: str, shape: tuple[int, ...], pieces: list[Tensor]) -> int | None:
        """The axis along which a tensor is split over the shards; None where every shard holds the whole."""
        if any(piece.dtype not in _FLOATS for piece in pieces):
            raise CheckpointError(
                f"checkpoint {self._folder}: {name} is {pieces[0].dtype}, expected one of float32, float16, bfloat16"
            )
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
        """As `WeightSource.read`. Shards are mapped for this one read: pages that stayed mapped would count as ours."""
        stored = _stored_name(name)
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
    """The wanted run along one axis of pieces that lie one after the other, touching only the pieces that hold some."""
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


def _stored_name(name: str) -> str:
    if name in _MODEL_NAMES:
        return _MODEL_NAMES[name]
    _, layer, rest = name.split(".", 2)
    module, _, kind = rest.rpartition(".")
    return f"layers.{layer}.{_LAYER_NAMES[module]}.{kind}"
