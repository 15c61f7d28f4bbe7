"""The manifest: what a bundle is, as one file. Parsed, held against itself, and written, always in the same bytes.

It names every file that makes the bundle what it is; what lies beside them in the folder is `exporter.bundle.bundle`'s. This module needs
no torch and no onnx.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from exporter import __version__
from exporter.common.documents import parse_document, read_document, to_json
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
    "format_version", "producer", "unit", "config", "dtype", "attention_dtype", "weight_format", "opset", "max_positions", "weights",
    "end_token_ids", "inputs", "outputs", "cache_pairs", "parts", "files",
)  # fmt: skip
UNIT_KEYS, CONFIG_KEYS, ROPE_SCALING_KEYS, TENSOR_KEYS, WEIGHT_FORMAT_KEYS = (
    tuple(field.name for field in fields(kind)) for kind in (Unit, ModelConfig, RopeScaling, TensorSpec, WeightFormat)
)
ADDED_KEYS: dict[str, Any] = {
    "parts": [],
    "weight_format": None,
}  # within format 1, with what held before; older manifests lack them
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
        contract: the graph's inputs, outputs and cache pairs; of a unit in parts, those of all parts as one.
        files: file name → {"size_bytes", "sha256"} of the graph, its data and the tokenizer.
        parts: layers of each part, first and one after the last, where the unit lies in several graphs; else empty.
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
        """No shape or bound that a graph of this bundle is made of is larger."""
        config = self.config
        heads = config.n_heads * config.head_dim
        return max(config.vocab_size, config.hidden_size, config.intermediate_size, heads, 2 * self.max_positions)

    @property
    def weights_bytes(self) -> int:
        """Bytes of the data files of all graphs."""
        return sum(entry["size_bytes"] for name, entry in self.files.items() if name.rpartition("/")[2] == DATA_FILE)

    def of_part(self, index: int) -> Manifest:
        """The manifest of one part, as though it were a stack's bundle of its own; blocks keep the unit's numbers."""
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
        """The manifest's file content; equal manifests give equal bytes."""
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
        """Reads a manifest and checks it against itself.

        Raises:
            BundleError: it is not JSON, of an unknown format, has unknown or missing keys, or its tensors are not those
                that its own config and unit ask for.
        """
        try:
            data = parse_document(text)
        except ValueError as error:
            raise BundleError(f"{subject}: not JSON ({str(error)[:300]}); export the bundle again") from None
        return cls._from_data(data, subject)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a bundle's folder; raises as `from_json`."""
        path = folder / MANIFEST_FILE
        try:
            data = read_document(path)
        except (OSError, ValueError) as error:
            raise BundleError(
                f"{path}: not JSON that can be read ({str(error)[:300]}); export the bundle again"
            ) from None
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
                f"{subject}: got files {sorted(manifest.files)[:20]}, expected {', '.join(graphs[:4])} and tokenizer files only"
            )
        return replace(manifest, contract=contract)  # equal, and of whole numbers where the file says 64.0 or true


def part_folder(index: int) -> str:
    """The folder of one part inside a bundle's."""
    return f"part{index}"


def graph_files(n_parts: int) -> tuple[str, ...]:
    """Graph and data files of a bundle in this many parts; 0 means one graph, in the bundle's own folder."""
    folders = [f"{part_folder(index)}/" for index in range(n_parts)] or [""]
    return tuple(f"{folder}{name}" for folder in folders for name in (GRAPH_FILE, DATA_FILE))


def graph_beside(name: str) -> str:
    """The graph that a data file belongs to; of any other file its own name."""
    return name.removesuffix(DATA_FILE.removeprefix(GRAPH_FILE))


def check_format_version(data: object, newest: int, subject: str, remedy: str) -> None:
    """Refuses a file that a newer blockline wrote, or that is none of ours. Every version from 1 on is read.

    Raises:
        BundleError: names both versions and what to do.
    """
    version = data.get("format_version") if isinstance(data, dict) else None
    if not isinstance(data, dict) or not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise BundleError(f"{subject}: got format_version {version!r:.40}, expected {newest}; {remedy}")
    if version > newest:
        writer = f"{data['producer']!s:.60}" if "producer" in data else "a newer blockline"
        raise BundleError(
            f"{subject}: got format_version {version!r:.40}, expected {newest}, the newest that blockline {__version__} reads; it was written by "
            f"{writer}: install that, or {remedy} with this one"
        )


def _complete_older(data: dict) -> None:
    """Gives a manifest what earlier writers of its format did not know yet, with the values that held then."""
    data |= {key: value for key, value in ADDED_KEYS.items() if key not in data}
    if isinstance(data.get("unit"), dict):
        data["unit"] = ADDED_UNIT_KEYS | data["unit"]


def _check_keys(data: dict) -> None:
    """Refuses objects inside a manifest that have unknown or missing keys, or file entries that are no size and checksum.

    Raises:
        InputError: names the object and the keys.
    """
    source = data["weights"].get("source")
    if source not in WEIGHTS_KEYS:
        raise InputError(f"got weights {data['weights']!r}, expected a source, random or checkpoint")
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
        if set(found) != set(keys):
            raise InputError(
                f"{what}: unknown keys {sorted(set(found) - set(keys))}, missing keys {sorted(set(keys) - set(found))}"
            )
    for name, entry in data["files"].items():
        if not _is_count(entry["size_bytes"]) or not is_sha256(entry["sha256"]):
            raise InputError(f"files {name}: got {entry}, expected a size in bytes and a SHA-256 in hexadecimal")


def is_sha256(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_whole(value) and 0 <= value < 2**63


def _first_problem(manifest: Manifest, data: dict) -> str | None:
    """What is wrong with a manifest's values, if anything; looked at before anything is computed from them."""
    unit, opset = manifest.unit, data["opset"]
    if not isinstance(data["producer"], str):
        return f"got producer {data['producer']!r}, expected text"
    if not _is_whole(opset) or opset != OPSET:
        return f"got opset {opset!r}, expected {OPSET}"
    if manifest.dtype not in DTYPES:
        return f"got dtype {manifest.dtype!r}, expected one of {', '.join(DTYPES)}"
    if unit.kind not in UNIT_KINDS or unit.logits not in LOGITS:
        return f"got unit {unit.kind!r} with logits {unit.logits!r}"
    if unit.cache not in CACHES or (unit.cache == "growing" and (unit.kind, unit.logits) != ("model", "all")):
        return f"got cache {unit.cache!r} for unit {unit.kind!r} with logits {unit.logits!r}"
    if unit.component not in (COMPONENTS if unit.kind == "component" else (None,)):
        return f"got component {unit.component!r} for unit {unit.kind}"
    whole = _is_whole(unit.first_layer) and _is_whole(unit.n_layers)
    if not whole or not 0 <= unit.first_layer < unit.first_layer + unit.n_layers <= manifest.config.n_layers:
        return f"got layers {unit.first_layer!r} and {unit.n_layers!r} on, expected some of the model's {manifest.config.n_layers}"
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
