"""Reads Hugging Face folders: config.json, safetensors (one file, or shards with an index) and tokenizer files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from exporter.checkpoint.checkpoint import Checkpoint
from exporter.checkpoint.checkpoint_folder import (
    check_coverage,
    end_token_ids,
    head_is_embedding,
    listed,
    read_json,
    same,
    stated,
    token_id,
    tokenizer_files,
)
from exporter.checkpoint.stored_names import HUGGINGFACE_DERIVED, huggingface_name
from exporter.common.errors import CheckpointError, InputError
from exporter.spec.catalogue import ModelConfig, RopeScaling, short
from exporter.spec.parameters import is_rotated, weight_shapes
from exporter.spec.unit import Unit

_FLOAT_TYPES = ("F32", "F16", "BF16")
_REQUIRED_KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    *("max_position_embeddings", "rms_norm_eps"),
)
_REPRODUCED_VALUES = {  # config key → the only value that this pipeline reproduces
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
_ROPE_TYPES = ("llama3", "default")
_SCALING_NAMES = {  # Hugging Face's name → the name in RopeScaling
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_context_length",
}


def open_huggingface(folder: str | Path) -> Checkpoint:
    """Opens a folder and checks that its tensors are exactly those of its config.

    Raises:
        CheckpointError: the folder, config, a shard or a tensor is missing, damaged, unexpected or of another shape.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(
            f"checkpoint {folder}: no such folder; give the folder that holds config.json and *.safetensors"
        )
    data = read_json(folder / "config.json")
    try:
        config = parse_config(data)
    except InputError as error:
        raise CheckpointError(f"checkpoint {folder}: {error}") from None
    weights = HuggingFaceWeights(folder, config)
    if not config.tie_word_embeddings and head_is_embedding(weights, config.vocab_size):
        config = replace(config, tie_word_embeddings=True)
        weights = HuggingFaceWeights(folder, config)
    return Checkpoint(
        config=config,
        weights=weights,
        end_token_ids=end_token_ids(folder, data, config.vocab_size),
        tokenizer_files=tokenizer_files(folder),
        begin_token_id=token_id(folder, data, "bos_token_id"),
        pad_token_id=token_id(folder, data, "pad_token_id"),
    )


# --- config.json ------------------------------------------------------------------------------------------------------


def parse_config(data: dict) -> ModelConfig:
    """Returns a config.json in the older or newer spelling as a ModelConfig.

    Raises:
        CheckpointError: the architecture or a feature is not reproduced here, or a key is missing.
        InputError: the values contradict each other.
    """
    architectures = stated(data, "architectures", [data.get("model_type")])
    if data.get("model_type") != "llama" or architectures not in (["LlamaForCausalLM"], ["llama"]):
        got = f"{short(architectures)} (model_type {short(data.get('model_type'))})"
        raise CheckpointError(f"config architectures: got {got}, expected LlamaForCausalLM alone")
    for key, plain in _REPRODUCED_VALUES.items():
        if not same(stated(data, key, plain), plain):
            raise CheckpointError(
                f"config {key}: got {short(data[key])}, expected {plain!r}; other values are not reproduced"
            )
    missing = [key for key in _REQUIRED_KEYS if data.get(key) is None]
    if missing:
        raise CheckpointError(f"config: missing {', '.join(missing)}")
    theta, scaling = _parse_rope(data)
    return ModelConfig(
        hidden_size=data["hidden_size"],
        n_layers=data["num_hidden_layers"],
        n_heads=data["num_attention_heads"],
        n_kv_heads=stated(data, "num_key_value_heads", data["num_attention_heads"]),
        head_dim=_head_dim(data),
        intermediate_size=data["intermediate_size"],
        vocab_size=data["vocab_size"],
        context_length=data["max_position_embeddings"],
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=data["rms_norm_eps"],
        tie_word_embeddings=stated(data, "tie_word_embeddings", False),
    )


def _head_dim(data: dict) -> int:
    """Returns the width of a head: `head_dim`, or the quotient of hidden size and heads where that is not given."""
    if data.get("head_dim") is not None:
        return data["head_dim"]
    hidden_size, n_heads = data["hidden_size"], data["num_attention_heads"]
    if not isinstance(hidden_size, int) or not isinstance(n_heads, int) or n_heads < 1 or hidden_size % n_heads:
        raise InputError(
            f"config heads: got hidden_size {short(hidden_size)} and num_attention_heads {short(n_heads)}, "
            "expected the first to be a multiple of the second where head_dim is not given"
        )
    return hidden_size // n_heads


def _parse_rope(data: dict) -> tuple[float, RopeScaling | None]:
    """Returns theta and scaling from `rope_theta` and `rope_scaling`, or from the newer `rope_parameters`."""
    newer, older = _rope_rule(data, "rope_parameters"), _rope_rule(data, "rope_scaling")
    thetas = [place["rope_theta"] for place in (newer, older, data) if place.get("rope_theta") is not None]
    if not all(same(theta, thetas[0]) for theta in thetas):
        raise InputError(f"config rope_theta: got {short(thetas)} in several places, expected one value")
    scalings = [_parse_scaling(rule) for rule in (newer, older) if set(rule) - {"rope_theta"}]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise InputError(
            f"config rope_scaling: got {short(older)} and rope_parameters {short(newer)}, expected one rule"
        )
    return (thetas[0] if thetas else 10_000.0), (scalings[0] if scalings else None)


def _rope_rule(data: dict, name: str) -> dict:
    """Returns what an object of the config says about RoPE, without its null values; {} where there is no object."""
    rule = stated(data, name, {})
    if not isinstance(rule, dict):
        raise InputError(f"config {name}: got {short(rule)}, expected an object")
    return {key: value for key, value in rule.items() if value is not None}


def _parse_scaling(rule: dict) -> RopeScaling | None:
    kinds = [rule[key] for key in ("rope_type", "type") if key in rule]
    if any(kind != kinds[0] for kind in kinds):
        raise InputError(
            f"config rope_scaling: got rope_type {short(kinds[0])} and type {short(kinds[1])}, expected one"
        )
    kind = kinds[0] if kinds else "default"
    if kind not in _ROPE_TYPES:
        expected_types = " or ".join(map(repr, _ROPE_TYPES))
        raise InputError(
            f"config rope_scaling: got type {short(kind)}, expected {expected_types}; other rules are not reproduced"
        )
    plain = {key: value for key, value in rule.items() if key not in ("rope_type", "type", "rope_theta")}
    if not same(plain.pop("partial_rotary_factor", 1.0), 1.0):
        raise InputError(
            f"config partial_rotary_factor: got {short(rule['partial_rotary_factor'])}, expected 1.0; "
            "other values are not reproduced"
        )
    expected = set() if kind == "default" else set(_SCALING_NAMES)
    if set(plain) != expected:
        raise InputError(
            f"config rope_scaling of type {kind!r}: unknown keys {short(sorted(set(plain) - expected))}, "
            f"missing keys {sorted(expected - set(plain))}"
        )
    return RopeScaling(**{ours: plain[theirs] for theirs, ours in _SCALING_NAMES.items()}) if plain else None


# --- tensors ----------------------------------------------------------------------------------------------------------


class HuggingFaceWeights:
    """The folder's tensors under canonical names. Reading puts the rows of q and k into Meta's order.

    Attributes:
        counts: number of tensors that are used, and number of derived tensors that are ignored.
    """

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self.description, self.has_own_head = {"source": "checkpoint"}, False
        self._folder, self._config = folder, config
        self._files = _tensor_files(folder)
        expected = {
            huggingface_name(name): shape
            for name, shape in weight_shapes(config, Unit("model", n_layers=config.n_layers)).items()
        }
        found = {name for name in self._files if not HUGGINGFACE_DERIVED.fullmatch(name)}
        check_coverage(folder, found, set(expected), {"lm_head.weight"} if config.tie_word_embeddings else set())
        self._check_tensors(expected)
        if config.tie_word_embeddings and "lm_head.weight" in self._files:
            self._check_tied()
        self.counts = {
            "used": len(expected),
            "derived": sum(bool(HUGGINGFACE_DERIVED.fullmatch(name)) for name in self._files),
        }

    def read(self, name: str, columns: slice = slice(None), rows: slice = slice(None)) -> Tensor:
        """Reads a weight as `WeightSource.read` says.

        The file is mapped for this one read, because mapped pages count as memory of this process.
        """
        stored = huggingface_name(name)
        permuted = is_rotated(name)
        with safe_open(self._files[stored], framework="pt") as file:
            whole = file.get_slice(stored)
            is_vector = len(whole.get_shape()) == 1
            outputs = columns if is_vector else rows  # the axis whose order RoPE decides
            run = slice(None) if permuted else outputs
            tensor = whole[run] if is_vector else whole[run, columns]
        return adjacent_pairs(tensor, self._config.head_dim)[outputs] if permuted else tensor

    def _check_tensors(self, expected: dict[str, tuple[int, ...]]) -> None:
        by_file: dict[Path, list[str]] = {}
        for stored in expected:
            by_file.setdefault(self._files[stored], []).append(stored)
        for path, names in by_file.items():
            with safe_open(path, framework="pt") as file:
                for stored in names:
                    entry = file.get_slice(stored)
                    if tuple(entry.get_shape()) != expected[stored]:
                        shape = list(expected[stored])
                        raise CheckpointError(
                            f"{path}: {stored} has shape {entry.get_shape()}, expected {shape} by config.json"
                        )
                    if entry.get_dtype() not in _FLOAT_TYPES:
                        raise CheckpointError(
                            f"{path}: {stored} is {entry.get_dtype()}, expected one of {', '.join(_FLOAT_TYPES)}"
                        )

    def _check_tied(self) -> None:
        if not head_is_embedding(self, self._config.vocab_size):
            raise CheckpointError(
                f"checkpoint {self._folder}: config.json ties the output head to the embedding, but lm_head.weight "
                "differs from it; set tie_word_embeddings to false if the model has its own head"
            )


def adjacent_pairs(weight: Tensor, head_dim: int) -> Tensor:
    """Reorders the outputs of q or k from half-split RoPE pairs (i, i + D/2) to adjacent pairs (2i, 2i + 1).

    Args:
        weight: any dtype [heads · D, …], a matrix or a vector.
        head_dim: D.
    """
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Returns tensor name → the file that holds it. The names come from the files; an index must agree with them."""
    index_path = folder / "model.safetensors.index.json"
    if index_path.is_file():
        index = read_json(index_path).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise CheckpointError(f"{index_path}: it has no weight_map")
        outside = [shard for shard in index.values() if not isinstance(shard, str) or Path(shard).name != shard]
        if outside:
            raise CheckpointError(
                f"{index_path}: it names the shard {short(outside[0])}, expected a file inside the folder"
            )
    elif (folder / "model.safetensors").is_file():
        index = None
    else:
        raise CheckpointError(
            f"checkpoint {folder}: it holds neither model.safetensors nor model.safetensors.index.json"
        )
    shards = sorted(set(index.values())) if index else ["model.safetensors"]
    files: dict[str, Path] = {}
    for shard in shards:
        path = folder / shard
        for name in _names_in(path):
            if name in files:
                raise CheckpointError(f"checkpoint {folder}: {name} is in {files[name].name} and in {shard}")
            files[name] = path
    if index is not None and files != {name: folder / shard for name, shard in index.items()}:
        wrong = sorted(
            name for name in {*files, *index} if name not in index or files.get(name) != folder / index[name]
        )
        raise CheckpointError(f"{index_path}: it does not match its shards for {listed(wrong)}")
    return files


def _names_in(path: Path) -> list[str]:
    if not path.is_file():
        raise CheckpointError(f"checkpoint {path.parent}: the shard {path.name} is missing")
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError, MemoryError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({error}); fetch it again") from None
