"""The bundle: a folder that one stage hands to the next, written whole or not at all.

    model.onnx  model.onnx.data  manifest.json  report.json  engines.json  engines  tokenizer files

manifest.json says what the bundle is (same inputs, same bytes); report.json what was measured; engines.json what was
compiled from it. This module needs no torch and no onnx.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

from exporter import __version__
from exporter.catalogue import ModelConfig, short
from exporter.contract import (
    CACHES,
    COMPONENTS,
    DTYPES,
    LOGITS,
    OPSET,
    UNIT_KINDS,
    Bounds,
    Contract,
    TensorSpec,
    Unit,
    graph_contract,
    part_bounds,
    part_contract,
)
from exporter.documents import LARGEST_BYTES, is_inside, is_text, parse_document, read_document
from exporter.errors import BundleError, InputError
from exporter.graph_form import check_graph_form

FORMAT_VERSION = 1
GRAPH_FILE = "model.onnx"
DATA_FILE = "model.onnx.data"
MANIFEST_FILE = "manifest.json"
REPORT_FILE = "report.json"
ENGINES_FILE = "engines.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
GENAI_CONFIG_FILE = "genai_config.json"
OTHER_FILES = (GENAI_CONFIG_FILE, *TOKENIZER_FILES)

_MANIFEST_KEYS = {
    "format_version", "producer", "unit", "config", "dtype", "attention_dtype", "opset", "max_positions", "weights", "end_token_ids",
    "inputs", "outputs", "cache_pairs", "parts", "files",
}  # fmt: skip


@dataclass(frozen=True)
class Manifest:
    """What a bundle is.

    Attributes:
        config: the whole model's geometry, also where the unit is a part of it.
        unit: what of it this graph covers.
        dtype: dtype name of weights, hidden states and cache.
        attention_dtype: "fp32" where attention runs between casts, else the bundle's dtype.
        max_positions: N; positions 0 to 2N − 1 have a rotation, a cache holds at most N rows.
        weights: {"source": "random", "seed": n} or {"source": "checkpoint"}.
        end_token_ids: tokens that end a generation; empty unless the unit is a model with a tokenizer.
        contract: the graph's inputs, outputs and cache pairs; of a unit in parts, those of all parts as one.
        files: file name → {"size_bytes", "sha256"} of the graph, its data and the tokenizer.
        parts: layers of each part, first and one after the last, where the unit lies in several graphs; else empty.
    """

    config: ModelConfig
    unit: Unit
    dtype: str
    attention_dtype: str
    max_positions: int
    weights: dict
    end_token_ids: tuple[int, ...]
    contract: Contract
    files: dict[str, dict]
    parts: tuple[Bounds, ...] = ()

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
        return replace(
            self,
            unit=replace(self.unit, kind="stack", n_layers=bounds[1] - bounds[0], logits="last"),
            contract=part_contract(self.config, self.unit, self.dtype, bounds),
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
            raise BundleError(f"{path}: not JSON that can be read ({str(error)[:300]}); export the bundle again") from None
        return cls._from_data(data, str(path))

    @classmethod
    def _from_data(cls, data: object, subject: str) -> Manifest:
        if not isinstance(data, dict) or data.get("format_version") != FORMAT_VERSION:
            version = data.get("format_version") if isinstance(data, dict) else None
            raise BundleError(f"{subject}: got format_version {short(version)}, expected {FORMAT_VERSION}; open it with the blockline that wrote it")
        data.setdefault("parts", [])  # manifests from before there were any
        if set(data) != _MANIFEST_KEYS:
            unknown, missing = sorted(set(data) - _MANIFEST_KEYS), sorted(_MANIFEST_KEYS - set(data))
            raise BundleError(f"{subject}: unknown keys {short(unknown)}, missing keys {missing}")
        try:
            manifest = cls(
                config=ModelConfig.from_dict(data["config"]),
                unit=Unit(**data["unit"]),
                dtype=data["dtype"],
                attention_dtype=data["attention_dtype"],
                max_positions=data["max_positions"],
                weights=data["weights"],
                end_token_ids=tuple(data["end_token_ids"]),
                contract=Contract(
                    tuple(TensorSpec.from_dict(spec) for spec in data["inputs"]),
                    tuple(TensorSpec.from_dict(spec) for spec in data["outputs"]),
                    tuple((past, present) for past, present in data["cache_pairs"]),
                ),
                files={name: {"size_bytes": int(entry["size_bytes"]), "sha256": str(entry["sha256"])} for name, entry in data["files"].items()},
                parts=tuple((first, stop) for first, stop in data["parts"]),
            )
            problem = _first_problem(manifest, data["opset"])
        except (InputError, KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise BundleError(f"{subject}: malformed ({str(error)[:300]}); export the bundle again") from None
        if problem:
            raise BundleError(f"{subject}: {problem[:300]}; export the bundle again")
        if manifest.contract != graph_contract(manifest.config, manifest.unit, manifest.dtype):
            raise BundleError(f"{subject}: its tensors are not those of a {manifest.dtype} {manifest.unit}; export the bundle again")
        graphs = graph_files(len(manifest.parts))
        if any(name not in (*graphs, *OTHER_FILES) for name in manifest.files) or not set(graphs) <= set(manifest.files):
            raise BundleError(f"{subject}: got files {sorted(manifest.files)[:20]}, expected {', '.join(graphs[:4])} and tokenizer files only")
        return manifest


def part_folder(index: int) -> str:
    """The folder of one part inside a bundle's."""
    return f"part{index}"


def graph_files(n_parts: int) -> tuple[str, ...]:
    """Graph and data files of a bundle in this many parts; 0 means one graph, in the bundle's own folder."""
    folders = [f"{part_folder(index)}/" for index in range(n_parts)] or [""]
    return tuple(f"{folder}{name}" for folder in folders for name in (GRAPH_FILE, DATA_FILE))


def _first_problem(manifest: Manifest, opset: object) -> str | None:
    """What is wrong with a manifest's values, if anything; looked at before anything is computed from them."""
    unit, weights = manifest.unit, manifest.weights
    if opset != OPSET:
        return f"got opset {opset!r}, expected {OPSET}"
    if manifest.dtype not in DTYPES:
        return f"got dtype {manifest.dtype!r}, expected one of {', '.join(DTYPES)}"
    if unit.kind not in UNIT_KINDS or unit.logits not in LOGITS:
        return f"got unit {unit.kind!r} with logits {unit.logits!r}"
    if unit.cache not in CACHES or (unit.cache == "growing" and (unit.kind, unit.logits) != ("model", "all")):
        return f"got cache {unit.cache!r} for unit {unit.kind!r} with logits {unit.logits!r}"
    if unit.component not in (COMPONENTS if unit.kind == "component" else (None,)):
        return f"got component {unit.component!r} for unit {unit.kind}"
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (unit.first_layer, unit.n_layers))
    if not whole or not 0 <= unit.first_layer < unit.first_layer + unit.n_layers <= manifest.config.n_layers:
        return f"got layers {unit.first_layer!r} and {unit.n_layers!r} on, expected some of the model's {manifest.config.n_layers}"
    in_parts = unit.kind != "component" and unit.cache == "in_place"
    if manifest.parts and not (in_parts and manifest.parts == part_bounds(unit.n_layers, len(manifest.parts))):
        return f"got parts {manifest.parts!r} for a {unit}"
    if manifest.attention_dtype not in (manifest.dtype, "fp32"):
        return f"got attention_dtype {manifest.attention_dtype!r}, expected {manifest.dtype} or fp32"
    if not isinstance(manifest.max_positions, int) or not 1 <= manifest.max_positions <= manifest.config.context_length:
        return f"got max_positions {manifest.max_positions!r}, expected 1 to {manifest.config.context_length}"
    if not isinstance(weights, dict) or weights.get("source") not in ("random", "checkpoint"):
        return f"got weights {weights!r}, expected a source, random or checkpoint"
    if weights["source"] == "random" and not _is_count(weights.get("seed")):
        return f"got seed {short(weights.get('seed'))} of random weights, expected a whole number of at least 0"
    if not all(map(_is_count, manifest.end_token_ids)):
        return f"got end_token_ids {short(list(manifest.end_token_ids))}, expected whole numbers of at least 0"
    return None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: its folder and its manifest."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: str | Path, verify: str = "graph") -> Bundle:
        """Opens a bundle and checks its files against the manifest.

        Args:
            folder: the bundle's folder.
            verify: "graph" checks every size and the checksum of model.onnx; "full" every checksum.

        Raises:
            BundleError: a file is missing, truncated, changed or leads out of the folder, the manifest cannot be read, or the
                graph is not of the form that exports have.
        """
        folder = Path(folder)
        if verify not in ("graph", "full"):
            raise InputError(f"verify: got {verify!r}, expected 'graph' or 'full'")
        path = folder / MANIFEST_FILE
        if not is_text(folder):
            raise BundleError(f"bundle {folder}: its path is not valid UTF-8, which onnx and onnxruntime cannot open; rename it")
        if not path.is_file():
            what = "no such folder" if not folder.exists() else "not a folder" if not folder.is_dir() else f"it holds no {MANIFEST_FILE}"
            raise BundleError(f"bundle {folder}: {what}; make one with `python -m exporter export … -o {folder}`")
        bundle = cls(folder, Manifest.read(folder))
        bundle._check_files()
        for part in bundle.parts:  # which also bounds what the checksums of all files are taken of
            check_graph_form(part.graph_path, part.manifest.contract, bundle.manifest.largest_number, DATA_FILE)
        if verify == "full":
            bundle._check_checksums(list(bundle.manifest.files))
        return bundle

    def _check_files(self) -> None:
        """Every file there, in the folder and of its size; and the checksums of the graphs."""
        for name, entry in self.manifest.files.items():
            path = self.folder / name
            if not path.is_file():
                raise BundleError(f"bundle {self.folder}: {name} is missing; restore it or export the bundle again")
            if not is_inside(path, self.folder):
                raise BundleError(f"bundle {self.folder}: {name} is a link that leads out of the folder; put the file itself there")
            size = path.stat().st_size
            if size != entry["size_bytes"]:
                raise BundleError(
                    f"bundle {self.folder}: {name} has {size:,} bytes, expected {entry['size_bytes']:,}; it was truncated or replaced; export again"
                )
            if name.rpartition("/")[2] != DATA_FILE and size > LARGEST_BYTES:
                raise BundleError(f"bundle {self.folder}: {name} has {size:,} bytes, expected at most {LARGEST_BYTES:,}; export again")
        self._check_checksums([name for name in self.manifest.files if name.rpartition("/")[2] == GRAPH_FILE])

    def _check_checksums(self, names: list[str]) -> None:
        for name in names:
            if sha256_of(self.folder / name) != self.manifest.files[name]["sha256"]:
                raise BundleError(f"bundle {self.folder}: {name} has another SHA-256 than the manifest says; it was changed; export again")

    def check_engines(self) -> list[str]:
        """Checks the files that engines.json lists against their checksums; returns their names.

        Raises:
            BundleError: engines.json is damaged, or an engine is missing or not the one that was built.
        """
        if self.manifest.parts:
            return [f"{part.folder.name}/{name}" for part in self.parts for name in part.check_engines()]
        path = self.folder / ENGINES_FILE
        if not path.is_file():
            return []
        try:
            records = [(str(record["file"]), record["sha256"]) for record in read_document(path)["engines"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BundleError(f"{path}: it is damaged ({str(error)[:300]}); remove it and build again") from None
        for name, checksum in records:
            path = self.folder / name
            if Path(name).name != name or not path.is_file() or not is_inside(path, self.folder) or path.stat().st_size > self.largest_engine:
                reason = "it is missing, a link out of the folder, or larger than an engine of these weights"
                raise BundleError(f"bundle {self.folder}: engine {name} cannot be used, {reason}; build again")
            if sha256_of(path) != checksum:
                raise BundleError(f"bundle {self.folder}: engine {name} has another SHA-256 than when it was built; build again")
        return [name for name, _ in records]

    @property
    def parts(self) -> list[Bundle]:
        """The bundle itself, or one bundle for each part where the unit lies in several graphs."""
        if not self.manifest.parts:
            return [self]
        return [Bundle(self.folder / part_folder(index), self.manifest.of_part(index)) for index in range(len(self.manifest.parts))]

    @property
    def largest_engine(self) -> int:
        """Bytes that no engine of this bundle reaches: they hold the weights once, and kernels."""
        return 4 * self.manifest.weights_bytes + 2**31

    @property
    def graph_path(self) -> Path:
        return self.folder / GRAPH_FILE

    @property
    def lineage(self) -> dict[str, str]:
        """SHA-256 of the graph and of its weights: what an engine records as its origin."""
        return {name: self.manifest.files[name]["sha256"] for name in (GRAPH_FILE, DATA_FILE)}

    def read_report(self) -> dict:
        """What was measured of this bundle; empty where nothing was.

        Raises:
            BundleError: the report is damaged.
        """
        path = self.folder / REPORT_FILE
        if not path.is_file():
            return {}
        try:
            report = read_document(path)
        except (OSError, ValueError) as error:
            raise BundleError(f"{path}: not JSON that can be read ({str(error)[:300]}); remove it and validate again") from None
        if not isinstance(report, dict) or not isinstance(report.get("validation", {}), dict):
            raise BundleError(f"{path}: got {short(report)}, expected an object with an object at validation; remove it and validate again")
        return report


def check_in_place(bundle: Bundle) -> None:
    """Refuses a bundle whose cache grows, where it must be updated in place.

    Raises:
        InputError: names the runtimes such a bundle is for.
    """
    if bundle.manifest.unit.cache != "in_place":
        raise InputError(
            f"bundle {bundle.folder}: its cache grows, expected one updated in place; it is for optimum and onnxruntime-genai, "
            "export another one without --cache growing"
        )


def to_json(data: object) -> str:
    """The one spelling of JSON that bundles use, so that equal data are equal bytes."""
    return json.dumps(data, indent=1, ensure_ascii=False, sort_keys=False) + "\n"


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_entry(path: Path, sha256: str | None = None) -> dict:
    """The manifest's record of one file; its checksum is taken unless the writer already knows it."""
    return {"size_bytes": path.stat().st_size, "sha256": sha256 or sha256_of(path)}
