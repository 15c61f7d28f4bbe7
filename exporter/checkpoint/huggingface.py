"""Hugging Face folders: config.json, safetensors (one file, or shards with an index) and the tokenizer's files."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from exporter.checkpoint.folder import (
    check_coverage,
    end_token_ids,
    head_is_embedding,
    listed,
    read_json,
    tokenizer_files,
)
from exporter.checkpoint.formats import Checkpoint
from exporter.common.errors import CheckpointError, InputError
from exporter.spec.catalogue import ModelConfig, RopeScaling, short
from exporter.spec.parameters import is_rotated, weight_shapes
from exporter.spec.unit import Unit

_LAYER_NAMES = {  # canonical name inside a block → Hugging Face's name inside a layer
    "attention_norm": "input_layernorm",
    "attention.q_proj": "self_attn.q_proj",
    "attention.k_proj": "self_attn.k_proj",
    "attention.v_proj": "self_attn.v_proj",
    "attention.o_proj": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "mlp.gate_proj": "mlp.gate_proj",
    "mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
}
_MODEL_NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_DERIVED = re.compile(
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
)  # older folders store RoPE's frequencies; they are computed
_FLOAT_TYPES = ("F32", "F16", "BF16")


def open_huggingface(folder: str | Path) -> Checkpoint:
    """Opens a folder and proves that its tensors are exactly those of its config. No tensor's values are read yet.

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
        end_token_ids=end_token_ids(folder, data),
        tokenizer_files=tokenizer_files(folder),
    )


# --- config.json -------------------------------------------------------------------------------------------------------


def parse_config(data: dict) -> ModelConfig:
    """A config.json in the older or newer spelling as a ModelConfig.

    Raises:
        CheckpointError: another architecture, a feature that this pipeline does not reproduce, or a missing key.
        InputError: the values contradict each other.
    """
    architectures = data.get("architectures") or [data.get("model_type")]
    if data.get("model_type") != "llama" or architectures not in (["LlamaForCausalLM"], ["llama"]):
        got = f"{short(architectures)} (model_type {short(data.get('model_type'))})"
        raise CheckpointError(f"config architectures: got {got}, expected LlamaForCausalLM alone")
    for key, plain in {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "partial_rotary_factor": 1.0,
        "quantization_config": None,
    }.items():
        if data.get(key, plain) != plain:
            raise CheckpointError(
                f"config {key}: got {short(data[key])}, expected {plain!r}; this pipeline does not reproduce it"
            )
    required = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "max_position_embeddings",
        "rms_norm_eps",
    )
    missing = [key for key in required if data.get(key) is None]
    if missing:
        raise CheckpointError(f"config: missing {', '.join(missing)}")
    theta, scaling = _parse_rope(data)
    return ModelConfig(
        hidden_size=data["hidden_size"],
        n_layers=data["num_hidden_layers"],
        n_heads=data["num_attention_heads"],
        n_kv_heads=data.get("num_key_value_heads") or data["num_attention_heads"],
        head_dim=data.get("head_dim") or _derived_head_dim(data["hidden_size"], data["num_attention_heads"]),
        intermediate_size=data["intermediate_size"],
        vocab_size=data["vocab_size"],
        context_length=data["max_position_embeddings"],
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=data["rms_norm_eps"],
        tie_word_embeddings=data.get("tie_word_embeddings", False),
    )


def _derived_head_dim(hidden_size: object, n_heads: object) -> int:
    if not isinstance(hidden_size, int) or not isinstance(n_heads, int) or n_heads < 1 or hidden_size % n_heads:
        raise InputError(
            f"config heads: got hidden_size {short(hidden_size)} and num_attention_heads {short(n_heads)}, expected the first to be a multiple of "
            "the second where head_dim is not given"
        )
    return hidden_size // n_heads


_SCALING_NAMES = {  # Hugging Face's name → ours
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_context_length",
}


def _parse_rope(data: dict) -> tuple[float, RopeScaling | None]:
    """theta and scaling from `rope_theta` + `rope_scaling`, or from the newer `rope_parameters`."""
    newer, older = data.get("rope_parameters") or {}, data.get("rope_scaling") or {}
    for name, value in (("rope_parameters", newer), ("rope_scaling", older)):
        if not isinstance(value, dict):
            raise InputError(f"config {name}: got {short(value)}, expected an object")
    thetas = [
        value
        for value in (newer.get("rope_theta"), older.get("rope_theta"), data.get("rope_theta"))
        if value is not None
    ]
    if any(theta != thetas[0] for theta in thetas):
        raise InputError(f"config rope_theta: got {short(thetas)} in several places, expected one value")
    scalings = [_parse_scaling(rule) for rule in (newer, older) if set(rule) - {"rope_theta"}]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise InputError(
            f"config rope_scaling: got {short(older)} and rope_parameters {short(newer)}, which differ; expected one rule"
        )
    return (thetas[0] if thetas else 10_000.0), (scalings[0] if scalings else None)


def _parse_scaling(rule: dict) -> RopeScaling | None:
    kind = rule.get("rope_type", rule.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise InputError(
            f"config rope_scaling: got type {short(kind)}, expected 'llama3' or 'default'; other rules are not reproduced"
        )
    plain = {key: value for key, value in rule.items() if key not in ("rope_type", "type", "rope_theta")}
    if plain.pop("partial_rotary_factor", 1.0) != 1.0:
        raise InputError(
            f"config partial_rotary_factor: got {short(rule['partial_rotary_factor'])}, expected 1.0; it is not reproduced"
        )
    expected = set() if kind == "default" else set(_SCALING_NAMES)
    if set(plain) != expected:
        raise InputError(
            f"config rope_scaling of type {kind!r}: unknown keys {short(sorted(set(plain) - expected))}, missing keys {sorted(expected - set(plain))}"
        )
    return RopeScaling(**{ours: plain[theirs] for theirs, ours in _SCALING_NAMES.items()}) if plain else None


# --- tensors -----------------------------------------------------------------------------------------------------------


class HuggingFaceWeights:
    """The folder's tensors under canonical names; q and k rows are put into Meta's order as they are read.

    Attributes:
        counts: tensors used, and derived ones passed over.
    """

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self.description, self.has_own_head = {"source": "checkpoint"}, False
        self._folder, self._config = folder, config
        self._files = _tensor_files(folder)
        expected = {
            _stored_name(name): shape
            for name, shape in weight_shapes(config, Unit("model", n_layers=config.n_layers)).items()
        }
        found = {name for name in self._files if not _DERIVED.fullmatch(name)}
        check_coverage(folder, found, set(expected), {"lm_head.weight"} if config.tie_word_embeddings else set())
        self._check_tensors(expected)
        if config.tie_word_embeddings and "lm_head.weight" in self._files:
            self._check_tied()
        self.counts = {"used": len(expected), "derived": sum(bool(_DERIVED.fullmatch(name)) for name in self._files)}

    def read(self, name: str, columns: slice = slice(None), rows: slice = slice(None)) -> Tensor:
        """As `WeightSource.read`. The file is mapped for this one read: pages that stayed mapped would count as ours."""
        stored = _stored_name(name)
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
                        raise CheckpointError(
                            f"{path}: {stored} has shape {entry.get_shape()}, expected {list(expected[stored])} by config.json"
                        )
                    if entry.get_dtype() not in _FLOAT_TYPES:
                        raise CheckpointError(
                            f"{path}: {stored} is {entry.get_dtype()}, expected one of {', '.join(_FLOAT_TYPES)}"
                        )

    def _check_tied(self) -> None:
        if not head_is_embedding(self, self._config.vocab_size):
            raise CheckpointError(
                f"checkpoint {self._folder}: config.json ties the output head to the embedding, but lm_head.weight differs from it; "
                "set tie_word_embeddings to false if the head is meant to be its own"
            )


def adjacent_pairs(weight: Tensor, head_dim: int) -> Tensor:
    """Reorders the rows [heads · D, …] or values [heads · D] of q or k from half-split RoPE pairs (i, i + D/2) to adjacent ones (2i, 2i + 1)."""
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def _stored_name(name: str) -> str:
    if name in _MODEL_NAMES:
        return _MODEL_NAMES[name]
    _, layer, rest = name.split(".", 2)
    module, _, kind = rest.rpartition(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[module]}.{kind}"


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name → the file that holds it, read from the files themselves and checked against the index, if any."""
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
