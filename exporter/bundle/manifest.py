"""The manifest: one file that describes a bundle. This module reads, checks and writes it, in the same bytes always.

The manifest lists the graph, its data and the tokenizer files. `exporter.bundle.bundle` reads the other files of the
folder. This module needs no torch and no onnx.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from exporter import __version__
from exporter.common.documents import parse_document, read_document, to_json, unreadable
from exporter.common.errors import BundleError, InputError
from exporter.spec.catalogue import ModelConfig, RopeScaling, short
from exporter.spec.dtypes import DTYPES
from exporter.spec.graph_spec import GraphSpec
from exporter.spec.tensors import OPSET, Contract, TensorSpec
from exporter.spec.unit import CACHES, COMPONENTS, LOGITS, UNIT_KINDS, Bounds, Unit, part_bounds
from exporter.spec.weight_formats import WeightFormat

FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
GRAPH_FILE = "model.onnx"
DATA_FILE = "model.onnx.data"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
GENAI_CONFIG_FILE = "genai_config.json"
OTHER_FILES = (GENAI_CONFIG_FILE, *TOKENIZER_FILES)

MANIFEST_KEYS = (
    *("format_version", "producer", "unit", "config", "dtype", "attention_dtype", "weight_format", "opset"),
    *("max_positions", "weights", "end_token_ids", "inputs", "outputs", "cache_pairs", "parts", "files"),
)
UNIT_KEYS, CONFIG_KEYS, ROPE_SCALING_KEYS, TENSOR_KEYS, WEIGHT_FORMAT_KEYS = (
    tuple(field.name for field in fields(kind)) for kind in (Unit, ModelConfig, RopeScaling, TensorSpec, WeightFormat)
)
# Keys that format 1 gained later, with the values that older manifests imply.
ADDED_KEYS: dict[str, Any] = {"parts": [], "weight_format": None}
ADDED_UNIT_KEYS = {"cache": "in_place"}
WEIGHTS_KEYS = {"random": ("source", "seed"), "checkpoint": ("source",)}
FILE_KEYS = ("size_bytes", "sha256")


@dataclass(frozen=True)
class Manifest:
    """What a bundle is.

    Attributes:
        spec: the identity of the graph: geometry, unit, dtypes, positions and format of the weights.
        weights: {"source": "random", "seed": n} or {"source": "checkpoint"}.
        end_token_ids: tokens that end a generation; empty unless the unit is a model with a tokenizer.
        contract: the graph's inputs, outputs and cache pairs; where there are parts, those of all parts together.
        files: file name → {"size_bytes", "sha256"} of the graph, its data and the tokenizer.
        parts: layers of each part, first and one after the last, where the unit has several graphs; else empty.
    """

    spec: GraphSpec
    weights: dict
    end_token_ids: tuple[int, ...]
    contract: Contract
    files: dict[str, dict]
    parts: tuple[Bounds, ...] = ()

    @property
    def config(self) -> ModelConfig:
        return self.spec.config

    @property
    def unit(self) -> Unit:
        return self.spec.unit

    @property
    def dtype(self) -> str:
        return self.spec.dtype

    @property
    def attention_dtype(self) -> str:
        return self.spec.attention_dtype

    @property
    def max_positions(self) -> int:
        return self.spec.max_positions

    @property
    def weight_format(self) -> WeightFormat | None:
        return self.spec.weight_format

    @property
    def largest_number(self) -> int:
        """The largest integer that a shape or bound in a graph of this bundle can have."""
        config = self.config
        heads = config.n_heads * config.head_dim
        return max(config.vocab_size, config.hidden_size, config.intermediate_size, heads, 2 * self.max_positions)

    @property
    def weights_bytes(self) -> int:
        """Bytes of the data files of all graphs."""
        return sum(entry["size_bytes"] for name, entry in self.files.items() if name.rpartition("/")[2] == DATA_FILE)

    def of_part(self, index: int) -> Manifest:
        """Returns the manifest of one part as that of a stack's bundle. Its blocks keep their numbers in the unit."""
        bounds, prefix = self.parts[index], f"{part_folder(index)}/"
        unit = replace(self.unit, kind="stack", n_layers=bounds[1] - bounds[0], logits="last")
        return replace(
            self,
            spec=replace(self.spec, unit=unit),
            contract=self.spec.part_contract(bounds),
            files={name.removeprefix(prefix): entry for name, entry in self.files.items() if name.startswith(prefix)},
            parts=(),
        )

    @property
    def has_random_weights(self) -> bool:
        return self.weights["source"] == "random"

    def to_json(self) -> str:
        """Returns the content of the manifest's file. Equal manifests give equal bytes."""
        unit = {
            "kind": self.unit.kind,
            "component": self.unit.component,
            "first_layer": self.unit.first_layer,
            "n_layers": self.unit.n_layers,
            "logits": self.unit.logits,
            "cache": self.unit.cache,
        }
        return to_json(
            {
                "format_version": FORMAT_VERSION,
                "producer": f"blockline {__version__}",
                "unit": unit,
                "config": self.config.to_dict(),
                "dtype": self.dtype,
                "attention_dtype": self.attention_dtype,
                "weight_format": asdict(self.weight_format) if self.weight_format else None,
                "opset": OPSET,
                "max_positions": self.max_positions,
                "weights": self.weights,
                "end_token_ids": list(self.end_token_ids),
                "inputs": [spec.to_dict() for spec in self.contract.inputs],
                "outputs": [spec.to_dict() for spec in self.contract.outputs],
                "cache_pairs": [list(pair) for pair in self.contract.cache_pairs],
                "parts": [list(bounds) for bounds in self.parts],
                "files": self.files,
            }
        )

    @classmethod
    def from_json(cls, text: str, subject: str) -> Manifest:
        """Reads a manifest from its text and checks that its values agree with each other.

        Args:
            text: content of the file.
            subject: name of the file, for messages.

        Raises:
            BundleError: the text is not JSON, has an unknown format, has unknown or missing keys, or has other tensors
                than its config and unit ask for.
        """
        try:
            data = parse_document(text)
        except ValueError as error:
            raise BundleError(f"{subject}: not JSON ({str(error)[:300]}); export the bundle again") from None
        return cls._from_data(data, subject)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Reads the manifest of a bundle's folder.

        Raises:
            BundleError: the file cannot be read, or `from_json` refuses its content.
        """
        path = folder / MANIFEST_FILE
        try:
            data = read_document(path)
        except (OSError, ValueError) as error:
            fault = unreadable(error, "not JSON that can be read", "export the bundle again")
            raise BundleError(f"{path}: {fault}") from None
        return cls._from_data(data, str(path))

    @classmethod
    def _from_data(cls, data: object, subject: str) -> Manifest:
        check_format_version(data, FORMAT_VERSION, subject, "export the bundle again")
        assert isinstance(data, dict), "it has a format version"
        _complete_older(data)
        unknown, missing = sorted(set(data) - set(MANIFEST_KEYS)), sorted(set(MANIFEST_KEYS) - set(data))
        if unknown or missing:
            raise BundleError(f"{subject}: unknown keys {short(unknown)}, missing keys {missing}")
        try:
            _check_keys(data)
            manifest = cls(
                spec=GraphSpec(
                    config=ModelConfig.from_dict(data["config"]),
                    unit=Unit(**data["unit"]),
                    dtype=data["dtype"],
                    max_positions=data["max_positions"],
                    float32_attention=data["attention_dtype"] != data["dtype"],
                    weight_format=WeightFormat(**data["weight_format"]) if data["weight_format"] is not None else None,
                ),
                weights=data["weights"],
                end_token_ids=tuple(data["end_token_ids"]),
                contract=Contract(
                    tuple(TensorSpec.from_dict(spec) for spec in data["inputs"]),
                    tuple(TensorSpec.from_dict(spec) for spec in data["outputs"]),
                    tuple((past, present) for past, present in data["cache_pairs"]),
                ),
                files=data["files"],
                parts=tuple((first, stop) for first, stop in data["parts"]),
            )
            problem = _first_problem(manifest, data)
        except (InputError, KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise BundleError(f"{subject}: malformed ({str(error)[:300]}); export the bundle again") from None
        if problem:
            raise BundleError(f"{subject}: {problem[:300]}; export the bundle again")
        contract = manifest.spec.contract
        if manifest.contract != contract:
            raise BundleError(
                f"{subject}: its tensors are not those of a {manifest.dtype} {manifest.unit}; export the bundle again"
            )
        graphs = graph_files(len(manifest.parts))
        if any(name not in (*graphs, *OTHER_FILES) for name in manifest.files) or not set(graphs) <= set(
            manifest.files
        ):
            raise BundleError(
                f"{subject}: got files {sorted(manifest.files)[:20]}, expected {', '.join(graphs[:4])} "
                "and tokenizer files only"
            )
        return replace(manifest, contract=contract)  # equal, with integers where the file has 64.0 or true


def part_folder(index: int) -> str:
    """Returns the name of a part's folder in the bundle's folder."""
    return f"part{index}"


def graph_files(n_parts: int) -> tuple[str, ...]:
    """Returns the graph and data files of a bundle with so many parts; 0 means one graph in the bundle's own folder."""
    folders = [f"{part_folder(index)}/" for index in range(n_parts)] or [""]
    return tuple(f"{folder}{name}" for folder in folders for name in (GRAPH_FILE, DATA_FILE))


def graph_beside(name: str) -> str:
    """Returns the name of the graph that a data file belongs to. For any other file it returns the file's name."""
    return name.removesuffix(DATA_FILE.removeprefix(GRAPH_FILE))


def check_format_version(data: object, newest: int, subject: str, remedy: str) -> None:
    """Checks that this blockline can read a file's format. It reads every version from 1 to the newest.

    Args:
        data: content of the file.
        newest: the newest version that this blockline reads.
        subject: name of the file, for the message.
        remedy: advice for the message.

    Raises:
        BundleError: a newer blockline wrote the file, or it has no version; the message has both versions.
    """
    version = data.get("format_version") if isinstance(data, dict) else None
    if not isinstance(data, dict) or not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise BundleError(f"{subject}: got format_version {version!r:.40}, expected {newest}; {remedy}")
    if version > newest:
        writer = f"{data['producer']!s:.60}" if "producer" in data else "a newer blockline"
        raise BundleError(
            f"{subject}: got format_version {version!r:.40}, expected {newest}, "
            f"the newest that blockline {__version__} reads; it was written by {writer}: "
            f"install that, or {remedy} with this one"
        )


def _complete_older(data: dict) -> None:
    """Adds the keys that older manifests of format 1 lack, with the values that they imply."""
    data |= {key: value for key, value in ADDED_KEYS.items() if key not in data}
    if isinstance(data.get("unit"), dict):
        data["unit"] = ADDED_UNIT_KEYS | data["unit"]


def _check_keys(data: dict) -> None:
    """Checks the keys of all objects in a manifest, and that each file entry is a size and a checksum.

    Raises:
        InputError: keys are unknown or missing, or an entry is wrong; the message names the object and the keys.
    """
    source = data["weights"].get("source")
    if source not in WEIGHTS_KEYS:
        raise InputError(f"got weights {data['weights']!r}, expected a source, one of {', '.join(WEIGHTS_KEYS)}")
    objects = [
        ("unit", data["unit"], UNIT_KEYS),
        ("config", data["config"], CONFIG_KEYS),
        ("weights", data["weights"], WEIGHTS_KEYS[source]),
    ]
    if data["config"].get("rope_scaling") is not None:
        objects.append(("config rope_scaling", data["config"]["rope_scaling"], ROPE_SCALING_KEYS))
    if data["weight_format"] is not None:
        objects.append(("weight_format", data["weight_format"], WEIGHT_FORMAT_KEYS))
    objects += [(side, spec, TENSOR_KEYS) for side in ("inputs", "outputs") for spec in data[side]]
    objects += [(f"files {name}", entry, FILE_KEYS) for name, entry in data["files"].items()]
    for what, found, keys in objects:
        unknown, missing = sorted(set(found) - set(keys)), sorted(set(keys) - set(found))
        if unknown or missing:
            raise InputError(f"{what}: unknown keys {unknown}, missing keys {missing}")
    for name, entry in data["files"].items():
        if not _is_count(entry["size_bytes"]) or not is_sha256(entry["sha256"]):
            raise InputError(f"files {name}: got {entry}, expected a size in bytes and a SHA-256 in hexadecimal")


def is_sha256(value: object) -> bool:
    """Whether a value is a SHA-256 in hexadecimal."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_whole(value) and 0 <= value < 2**63


def _first_problem(manifest: Manifest, data: dict) -> str | None:
    """Returns the first problem of a manifest's values, or None.

    It runs before anything is computed from the values.
    """
    unit, opset = manifest.unit, data["opset"]
    if not isinstance(data["producer"], str):
        return f"got producer {data['producer']!r}, expected text"
    if not _is_whole(opset) or opset != OPSET:
        return f"got opset {opset!r}, expected {OPSET}"
    if manifest.dtype not in DTYPES:
        return f"got dtype {manifest.dtype!r}, expected one of {', '.join(DTYPES)}"
    if unit.kind not in UNIT_KINDS or unit.logits not in LOGITS:
        kinds, logits = ", ".join(UNIT_KINDS), ", ".join(LOGITS)
        return f"got unit {unit.kind!r} with logits {unit.logits!r}, expected one of {kinds} with one of {logits}"
    if unit.cache not in CACHES or (unit.cache == "growing" and (unit.kind, unit.logits) != ("model", "all")):
        return f"got cache {unit.cache!r} for unit {unit.kind!r} with logits {unit.logits!r}"
    if unit.component not in (COMPONENTS if unit.kind == "component" else (None,)):
        expected = f"one of {', '.join(COMPONENTS)}" if unit.kind == "component" else "none"
        return f"got component {unit.component!r} for unit {unit.kind}, expected {expected}"
    whole = _is_whole(unit.first_layer) and _is_whole(unit.n_layers)
    if not whole or not 0 <= unit.first_layer < unit.first_layer + unit.n_layers <= manifest.config.n_layers:
        layers = f"{unit.n_layers!r} layers from {unit.first_layer!r}"
        return f"got {layers}, expected some of the model's {manifest.config.n_layers}"
    if not all(_is_whole(bound) for bounds in manifest.parts for bound in bounds):
        return f"got parts {manifest.parts!r}, expected pairs of whole numbers"
    in_parts = unit.kind != "component" and unit.cache == "in_place"
    if manifest.parts and not (in_parts and manifest.parts == part_bounds(unit.n_layers, len(manifest.parts))):
        return f"got parts {manifest.parts!r} for a {unit}"
    if manifest.weight_format is not None:
        manifest.weight_format.check(manifest.config)
    if data["attention_dtype"] not in (manifest.dtype, "fp32"):
        return f"got attention_dtype {data['attention_dtype']!r}, expected {manifest.dtype} or fp32"
    if not _is_whole(manifest.max_positions) or not 1 <= manifest.max_positions <= manifest.config.context_length:
        return f"got max_positions {manifest.max_positions!r}, expected 1 to {manifest.config.context_length}"
    seed = manifest.weights.get("seed", 0)
    if not _is_count(seed):
        return f"got seed {short(seed)} of the weights, expected a whole number"
    if not all(map(_is_count, manifest.end_token_ids)):
        return f"got end_token_ids {short(list(manifest.end_token_ids))}, expected whole numbers"
    return None
