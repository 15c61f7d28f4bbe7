"""Reads Hugging Face folders: config.json, safetensors (one file, or shards with an index) and tokenizer files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from exporter.checkpoint.checkpoint import Checkpoint
from exporter.checkpoint.checkpoint_folder import (
    check_coverage,
    end_token_ids,
    head_is_embedding,
    read_json,
    same,
    stated,
    token_id,
    tokenizer_files,
)
from exporter.checkpoint.quantized import quantized_dtype, refuse_quantized_config, refuse_quantized_tensors
from exporter.checkpoint.stored_names import HUGGINGFACE_DERIVED, huggingface_name
from exporter.checkpoint.weight_files import HEAD, TensorFiles, candidates
from exporter.common.errors import CheckpointError, InputError
from exporter.spec.catalogue import ModelConfig, RopeScaling, short
from exporter.spec.parameters import is_rotated, weight_shapes
from exporter.spec.unit import Unit

_FLOAT_TYPES = ("F32", "F16", "BF16")
_REQUIRED_KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    "max_position_embeddings",
)
_REPRODUCED_VALUES: dict[str, tuple] = {  # config key → the values that this pipeline reproduces, the default first
    "hidden_act": ("silu", "swish"),  # two names of one function
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
}
DEFAULT_NORM_EPS = 1e-6  # what transformers' LlamaConfig takes where config.json has no rms_norm_eps
_ROPE_TYPES = ("llama3", "default")
_SCALING_NAMES = {  # Hugging Face's name → the name in RopeScaling
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_context_length",
}
# Keys of other rules, which transformers does not read under the rules above. `default` scales nothing, so it reads no
# key of llama3 either; only a factor other than 1 there contradicts it and is refused.
_UNREAD_SCALING_KEYS = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "long_factor", "short_factor", "truncate")


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
    refuse_quantized_config(folder, data)
    try:
        config = parse_config(data)
    except InputError as error:
        raise CheckpointError(f"checkpoint {folder}: {error}") from None
    weights = open_weights(folder, config)
    if not config.tie_word_embeddings and head_is_embedding(weights, config.vocab_size):
        config = replace(config, tie_word_embeddings=True)
        weights = HuggingFaceWeights(folder, config, weights.files, weights.notes)
    return Checkpoint(
        config=config,
        weights=weights,
        end_token_ids=end_token_ids(folder, data, config.vocab_size),
        tokenizer_files=tokenizer_files(folder),
        begin_token_id=token_id(folder, data, "bos_token_id"),
        pad_token_id=token_id(folder, data, "pad_token_id"),
        notes=weights.notes,
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
    for key, values in _REPRODUCED_VALUES.items():
        if not any(same(stated(data, key, values[0]), value) for value in values):
            expected = " or ".join(map(repr, values))
            raise CheckpointError(
                f"config {key}: got {short(data[key])}, expected {expected}; other values are not reproduced"
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
        norm_eps=stated(data, "rms_norm_eps", DEFAULT_NORM_EPS),
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
    if len(kinds) == 2 and kinds[0] != kinds[1]:
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
    if same(plain.get("attention_factor"), 1.0):
        del plain["attention_factor"]
    scales_nothing = kind == "default" and same(plain.get("factor", 1.0), 1.0)
    unread = {*_UNREAD_SCALING_KEYS, *(_SCALING_NAMES if scales_nothing else ())}
    plain = {key: value for key, value in plain.items() if key not in unread}
    expected = set() if kind == "default" else set(_SCALING_NAMES)
    if set(plain) != expected:
        raise InputError(
            f"config rope_scaling of type {kind!r}: unknown keys {short(sorted(set(plain) - expected))}, "
            f"missing keys {sorted(expected - set(plain))}"
        )
    return RopeScaling(**{ours: plain[theirs] for theirs, ours in _SCALING_NAMES.items()}) if plain else None


# --- tensors ----------------------------------------------------------------------------------------------------------


def open_weights(folder: Path, config: ModelConfig) -> HuggingFaceWeights:
    """Opens the weights of a folder: those of its candidate that holds the whole model.

    Raises:
        CheckpointError: no candidate does, or two do and their weights differ.
    """
    fitting: dict[str, HuggingFaceWeights] = {}
    faults: dict[str, CheckpointError] = {}
    found = candidates(folder, (HEAD,) if config.tie_word_embeddings else ())
    for what, find in found.items():
        try:
            fitting[what] = HuggingFaceWeights(folder, config, find())
        except CheckpointError as error:
            faults[what] = error
    if not fitting and len(faults) == 1:
        raise next(iter(faults.values()))
    if not fitting:
        reasons = "; ".join(f"{what}: {error}" for what, error in faults.items())
        raise CheckpointError(
            f"checkpoint {folder}: it holds {' and '.join(found)}, and neither can be read; {reasons}"
        )
    taken, weights = next(iter(fitting.items()))
    if faults:
        left, fault = next(iter(faults.items()))
        weights.notes = (f"the weights are those of {taken}; {left} cannot be read and is left out: {fault}",)
    elif len(fitting) == 2:
        left, other = list(fitting.items())[1]
        if weights.files != other.files:
            _check_equal(folder, weights, other, " and ".join(fitting))
            weights.notes = (f"the weights are those of {taken}; {left} holds the same ones",)
    return weights


def _check_equal(folder: Path, weights: HuggingFaceWeights, other: HuggingFaceWeights, what: str) -> None:
    """Compares two candidates tensor by tensor.

    Raises:
        CheckpointError: they differ; the message names the first tensor that does.
    """
    for name in weights.names:
        a, b = weights.read(name), other.read(name)
        if a.dtype != b.dtype or not torch.equal(a, b):
            raise CheckpointError(
                f"checkpoint {folder}: {what} both hold the whole model, and they differ in {huggingface_name(name)}; "
                "the folder does not say which is meant; move one of them away"
            )


class HuggingFaceWeights:
    """The folder's tensors under canonical names. Reading puts the rows of q and k into Meta's order.

    Attributes:
        counts: number of tensors that are used, and number of derived tensors that are ignored.
        names: canonical names of the weights.
        files: the file of each tensor.
        notes: which of several candidates these weights are, in words; empty where the folder has one.
    """

    def __init__(self, folder: Path, config: ModelConfig, files: TensorFiles, notes: tuple[str, ...] = ()) -> None:
        self.description, self.has_own_head = {"source": "checkpoint"}, False
        self.files, self.notes = files, notes
        self._folder, self._config = folder, config
        shapes = weight_shapes(config, Unit("model", n_layers=config.n_layers))
        self.names = tuple(shapes)
        expected = {huggingface_name(name): shape for name, shape in shapes.items()}
        refuse_quantized_tensors(folder, self.files)
        found = {name for name in self.files if not HUGGINGFACE_DERIVED.fullmatch(name)}
        check_coverage(folder, found, set(expected), {HEAD} if config.tie_word_embeddings else set())
        self._check_tensors(expected)
        if config.tie_word_embeddings and HEAD in self.files:
            self._check_tied()
        self.counts = {
            "used": len(expected),
            "derived": sum(bool(HUGGINGFACE_DERIVED.fullmatch(name)) for name in self.files),
        }

    def read(self, name: str, columns: slice = slice(None), rows: slice = slice(None)) -> Tensor:
        """Reads a weight as `WeightSource.read` says.

        The file is mapped for this one read, because mapped pages count as memory of this process.
        """
        stored = huggingface_name(name)
        permuted = is_rotated(name)
        with safe_open(self.files[stored], framework="pt") as file:
            whole = file.get_slice(stored)
            is_vector = len(whole.get_shape()) == 1
            outputs = columns if is_vector else rows  # the axis whose order RoPE decides
            run = slice(None) if permuted else outputs
            tensor = whole[run] if is_vector else whole[run, columns]
        return adjacent_pairs(tensor, self._config.head_dim)[outputs] if permuted else tensor

    def _check_tensors(self, expected: dict[str, tuple[int, ...]]) -> None:
        by_file: dict[Path, list[str]] = {}
        for stored in expected:
            by_file.setdefault(self.files[stored], []).append(stored)
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
                            f"{quantized_dtype(entry.get_dtype())}"
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
