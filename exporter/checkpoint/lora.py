"""Merges a LoRA adapter, as PEFT saves it, into the weights of a checkpoint while they are read.

A merged weight is W + s · B A (Hu et al. 2021, "LoRA", section 4.1), with s = alpha / r, or alpha / √r where the
adapter is rank-stabilized (Kalajdzievski 2023, "A Rank Stabilization Scaling Factor"). It is computed in float32.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from exporter.checkpoint.checkpoint import Checkpoint, CheckpointWeights
from exporter.checkpoint.checkpoint_folder import listed, read_json, stated
from exporter.checkpoint.huggingface import adjacent_pairs
from exporter.checkpoint.stored_names import huggingface_name
from exporter.checkpoint.weight_files import names_in
from exporter.common.errors import CheckpointError
from exporter.spec.catalogue import ModelConfig, short
from exporter.spec.parameters import is_rotated, weight_shapes
from exporter.spec.unit import Unit

CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_TIED = ("embedding.weight", "lm_head.weight")
_FLOAT_TYPES = ("F32", "F16", "BF16")
# Keys that say how an adapter was made or is run, and change no merged weight.
_WITHOUT_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "task_type", "peft_version"),
    *(
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "lora_dropout",
        "qalora_group_size",
    ),
    *("megatron_core", "eva_config", "corda_config", "loftq_config", "runtime_config", "ensure_weight_tying"),
}
_MERGED = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save"),
    *("init_lora_weights", "bias"),
}
# Other ways to begin change the base weights too, which the adapter's file does not hold.
_INITS = (True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class Update:
    """The product that is added to a weight: left [out, r] · right [r, in] · scaling.

    Attributes:
        left, right: names of the tensors in the adapter's file.
        transposed: whether both are stored transposed, as those of an embedding are.
    """

    left: str
    right: str
    scaling: float
    transposed: bool


def merge_adapter(checkpoint: Checkpoint, folder: str | Path) -> Checkpoint:
    """Returns a checkpoint with the adapter of a folder merged into its weights, which is computed as they are read.

    Raises:
        CheckpointError: the folder holds no LoRA adapter, or one with something that is not merged here; the message
            names it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"adapter {folder}: no such folder; give the folder with {CONFIG_FILE} and {TENSOR_FILE}")
    settings = read_json(folder / CONFIG_FILE)
    _check_settings(folder, settings)
    if not (folder / TENSOR_FILE).is_file():
        raise CheckpointError(f"adapter {folder}: it holds no {TENSOR_FILE}; save it as safetensors")
    weights = MergedWeights(checkpoint.weights, checkpoint.config, folder, settings)
    touched = {name for name in _TIED if name in weights.updates or name in weights.replaced}
    config = checkpoint.config
    if config.tie_word_embeddings and touched:
        if touched != set(_TIED) or set(weights.updates) & touched:
            raise CheckpointError(
                f"adapter {folder}: it changes {' and '.join(sorted(touched))} of a model whose output head is its "
                "embedding; such an adapter is merged only where modules_to_save holds both"
            )
        config = replace(config, tie_word_embeddings=False)
    note = (
        f"{len(weights.updates)} weights have the adapter {folder.name} merged in, {len(weights.replaced)} are its own"
    )
    return replace(checkpoint, config=config, weights=weights, notes=(*checkpoint.notes, note))


def _check_settings(folder: Path, settings: dict) -> None:
    """Refuses an adapter of another method, or with a part that is not merged here."""
    if settings.get("peft_type") != "LORA":
        raise CheckpointError(f"adapter {folder}: got peft_type {short(settings.get('peft_type'))}, expected 'LORA'")
    if stated(settings, "init_lora_weights", True) not in _INITS:
        raise CheckpointError(
            f"adapter {folder}: got init_lora_weights {short(settings['init_lora_weights'])}, expected one of "
            f"{_INITS}; it changed the base weights too; convert the adapter to plain LoRA with PEFT"
        )
    for key, value in settings.items():
        if key in _WITHOUT_EFFECT or key in _MERGED or value in (None, False, [], {}):
            continue
        raise CheckpointError(f"adapter {folder}: {key} {short(value)} is not merged here; merge it with PEFT")
    if stated(settings, "bias", "none") != "none":
        raise CheckpointError(
            f"adapter {folder}: got bias {short(settings['bias'])}, expected 'none'; these models have no bias"
        )


class MergedWeights:
    """The weights of a checkpoint with an adapter merged in, under canonical names.

    Attributes:
        counts: those of the checkpoint, and how many weights the adapter changes and replaces.
        updates: canonical name → the product that is added.
        replaced: canonical name → the adapter's tensor that takes its place (`modules_to_save`).
    """

    def __init__(self, base: CheckpointWeights, config: ModelConfig, folder: Path, settings: dict) -> None:
        self.description, self.has_own_head = base.description, base.has_own_head
        self.updates: dict[str, Update] = {}
        self.replaced: dict[str, str] = {}
        self._base, self._config, self._folder, self._settings = base, config, folder, settings
        self._path = folder / TENSOR_FILE
        shapes = weight_shapes(config, Unit("model", n_layers=config.n_layers))
        self._shapes = {"lm_head.weight": shapes["embedding.weight"]} | shapes
        self._modules = {huggingface_name(name).removesuffix(".weight"): name for name in self._shapes}
        names = set(names_in(self._path))
        for name in sorted(names):
            self._place(name, names)
        self._check_saved()
        self._check_shapes()
        self.counts = base.counts | {"merged": len(self.updates), "replaced": len(self.replaced)}

    def _place(self, name: str, names: set[str]) -> None:
        """Finds what a tensor of the adapter does, by its name."""
        found = re.fullmatch(
            r"(?P<module>.+?)\.(?P<part>lora_[AB]\.weight|lora_embedding_[AB]|(base_layer\.)?weight)",
            name.removeprefix(_PREFIX),
        )
        target = self._modules.get(found["module"]) if found and name.startswith(_PREFIX) else None
        if found is None or target is None:
            raise CheckpointError(f"adapter {self._folder}: {short(name)} is not merged here; merge it with PEFT")
        module, part = found["module"], found["part"]
        if part.startswith("lora_"):
            other = name.replace("_A", "_B") if "_A" in part else name.replace("_B", "_A")
            if other not in names:
                raise CheckpointError(f"adapter {self._folder}: it holds {short(name)} without {short(other)}")
            a, b = sorted((name, other))
            transposed = part.startswith("lora_embedding")
            if transposed != (target == "embedding.weight"):
                raise CheckpointError(f"adapter {self._folder}: {short(name)} does not fit its module; fetch it again")
            left, right = (a, b) if transposed else (b, a)
            self.updates[target] = Update(left, right, self._scaling(module), transposed)
        elif target in _TIED or self._is_saved(module):
            self.replaced[target] = name
        else:
            raise CheckpointError(
                f"adapter {self._folder}: it holds {short(name)}, which its modules_to_save does not list"
            )

    def _scaling(self, module: str) -> float:
        rank, alpha = self._rank(module), self._by_pattern("alpha_pattern", module, self._settings.get("lora_alpha", 8))
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise CheckpointError(
                f"adapter {self._folder}: got lora_alpha {short(alpha)} for {module}, expected a number"
            )
        stabilized = stated(self._settings, "use_rslora", False)
        if not isinstance(stabilized, bool):
            raise CheckpointError(f"adapter {self._folder}: got use_rslora {short(stabilized)}, expected true or false")
        return alpha / (math.sqrt(rank) if stabilized else rank)

    def _rank(self, module: str) -> int:
        rank = self._by_pattern("rank_pattern", module, self._settings.get("r", 8))
        if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= 2**20:
            raise CheckpointError(
                f"adapter {self._folder}: got r {short(rank)} for {module}, expected a number above 0"
            )
        return rank

    def _by_pattern(self, key: str, module: str, default: object) -> object:
        """Returns the value of the first pattern that a module ends with. Regular expressions are not run."""
        patterns = stated(self._settings, key, {})
        if not isinstance(patterns, dict):
            raise CheckpointError(f"adapter {self._folder}: got {key} {short(patterns)}, expected an object")
        for pattern, value in patterns.items():
            plain = pattern.removeprefix("^")
            if not re.fullmatch(r"[\w.]+", plain):
                raise CheckpointError(
                    f"adapter {self._folder}: {key} has the pattern {short(pattern)}, expected names of modules; "
                    "merge it with PEFT"
                )
            if module == plain or (plain == pattern and module.endswith(f".{plain}")):
                return value
        return default

    def _is_saved(self, module: str) -> bool:
        saved = stated(self._settings, "modules_to_save", [])
        if not isinstance(saved, list) or not all(isinstance(name, str) for name in saved):
            raise CheckpointError(
                f"adapter {self._folder}: got modules_to_save {short(saved)}, expected a list of names"
            )
        return any(module.endswith(name) for name in saved)  # as PEFT does: "norm" means every norm

    def _check_saved(self) -> None:
        missing = [
            module for module, name in self._modules.items() if self._is_saved(module) and name not in self.replaced
        ]
        if missing:
            raise CheckpointError(f"adapter {self._folder}: it holds no weight for modules_to_save {listed(missing)}")
        if not self.updates and not self.replaced:
            raise CheckpointError(f"adapter {self._folder}: {TENSOR_FILE} holds no tensor; fetch it again")

    def _check_shapes(self) -> None:
        expected: dict[str, tuple[int, ...]] = {name: self._shapes[target] for target, name in self.replaced.items()}
        for target, update in self.updates.items():
            if len(self._shapes[target]) != 2:
                raise CheckpointError(f"adapter {self._folder}: {target} is no matrix; it has no low-rank update")
            rank = self._rank(huggingface_name(target).removesuffix(".weight"))
            outputs, inputs = self._shapes[target]
            expected[update.left] = (rank, outputs) if update.transposed else (outputs, rank)
            expected[update.right] = (inputs, rank) if update.transposed else (rank, inputs)
        with safe_open(self._path, framework="pt") as file:
            for name, shape in expected.items():
                entry = file.get_slice(name)
                if tuple(entry.get_shape()) != shape or entry.get_dtype() not in _FLOAT_TYPES:
                    got = f"{entry.get_dtype()} {entry.get_shape()}"
                    raise CheckpointError(
                        f"{self._path}: {short(name)} is {got}, expected {' or '.join(_FLOAT_TYPES)} {list(shape)}"
                    )

    def read(self, name: str, columns: slice = slice(None), rows: slice = slice(None)) -> Tensor:
        """Reads a weight as `WeightSource.read` says; a merged one in float32."""
        read_stored = self._replaced if name in self.replaced else self._base.read
        weight = read_stored(name, columns, rows)
        update = self.updates.get(name)
        if update is None:
            return weight
        left, right = self._tensor(update.left).float(), self._tensor(update.right).float()
        if update.transposed:
            left, right = left.T, right.T
        return torch.addmm(weight.float(), self._ordered(name, left)[rows], right[:, columns], alpha=update.scaling)

    def _replaced(self, name: str, columns: slice, rows: slice) -> Tensor:
        """Reads a part of the adapter's own tensor; of a rotated one all rows, which have another order here."""
        with safe_open(self._path, framework="pt") as file:
            stored = file.get_slice(self.replaced[name])
            if len(stored.get_shape()) == 1:
                return stored[columns]
            return self._ordered(name, stored[:, columns])[rows] if is_rotated(name) else stored[rows, columns]

    def _tensor(self, name: str) -> Tensor:
        with safe_open(self._path, framework="pt") as file:
            return file.get_tensor(name)

    def _ordered(self, name: str, outputs: Tensor) -> Tensor:
        """Returns the outputs of q and k in Meta's order, as the base weights have them."""
        return adjacent_pairs(outputs, self._config.head_dim) if is_rotated(name) else outputs
