"""The bundle: a folder that one stage hands to the next, written whole or not at all.

    model.onnx  model.onnx.data  manifest.json  report.json  engines.json  engines  tokenizer files

manifest.json says what the bundle is (same inputs, same bytes); report.json what was measured; engines.json what was
compiled from it. This module needs no torch and no onnx.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from exporter import __version__
from exporter.catalogue import ModelConfig, RopeScaling, short
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
    WeightFormat,
    graph_contract,
    part_bounds,
    part_contract,
)
from exporter.documents import LARGEST_BYTES, is_inside, is_text, parse_document, read_document
from exporter.errors import BundleError, InputError, together
from exporter.graph_form import check_graph_form
from exporter.timing import timed

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
GRAPH_FILE = "model.onnx"
DATA_FILE = "model.onnx.data"
MANIFEST_FILE = "manifest.json"
REPORT_FILE = "report.json"
ENGINES_FILE = "engines.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
GENAI_CONFIG_FILE = "genai_config.json"
OTHER_FILES = (GENAI_CONFIG_FILE, *TOKENIZER_FILES)
VERIFY = ("graph", "full")  # which checksums opening takes: the graph's, or every file's

MANIFEST_KEYS = (
    "format_version", "producer", "unit", "config", "dtype", "attention_dtype", "weight_format", "opset", "max_positions", "weights",
    "end_token_ids", "inputs", "outputs", "cache_pairs", "parts", "files",
)  # fmt: skip
UNIT_KEYS, CONFIG_KEYS, ROPE_SCALING_KEYS, TENSOR_KEYS, WEIGHT_FORMAT_KEYS = (
    tuple(field.name for field in fields(kind)) for kind in (Unit, ModelConfig, RopeScaling, TensorSpec, WeightFormat)
)
ADDED_KEYS: dict[str, Any] = {"parts": [], "weight_format": None}  # within format 1, with what held before; older manifests lack them
ADDED_UNIT_KEYS = {"cache": "in_place"}
WEIGHTS_KEYS = {"random": ("source", "seed"), "checkpoint": ("source",)}
FILE_KEYS = ("size_bytes", "sha256")


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
        weight_format: how matrices are stored where it is not in `dtype`.
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
    weight_format: WeightFormat | None = None

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
            raise BundleError(f"{path}: not JSON that can be read ({str(error)[:300]}); export the bundle again") from None
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
                files=data["files"],
                parts=tuple((first, stop) for first, stop in data["parts"]),
                weight_format=WeightFormat(**data["weight_format"]) if data["weight_format"] is not None else None,
            )
            problem = _first_problem(manifest, data)
        except (InputError, KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise BundleError(f"{subject}: malformed ({str(error)[:300]}); export the bundle again") from None
        if problem:
            raise BundleError(f"{subject}: {problem[:300]}; export the bundle again")
        contract = graph_contract(manifest.config, manifest.unit, manifest.dtype)
        if manifest.contract != contract:
            raise BundleError(f"{subject}: its tensors are not those of a {manifest.dtype} {manifest.unit}; export the bundle again")
        graphs = graph_files(len(manifest.parts))
        if any(name not in (*graphs, *OTHER_FILES) for name in manifest.files) or not set(graphs) <= set(manifest.files):
            raise BundleError(f"{subject}: got files {sorted(manifest.files)[:20]}, expected {', '.join(graphs[:4])} and tokenizer files only")
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
    objects = [("unit", data["unit"], UNIT_KEYS), ("config", data["config"], CONFIG_KEYS), ("weights", data["weights"], WEIGHTS_KEYS[source])]
    if data["config"].get("rope_scaling") is not None:
        objects.append(("config rope_scaling", data["config"]["rope_scaling"], ROPE_SCALING_KEYS))
    if data["weight_format"] is not None:
        objects.append(("weight_format", data["weight_format"], WEIGHT_FORMAT_KEYS))
    objects += [(side, spec, TENSOR_KEYS) for side in ("inputs", "outputs") for spec in data[side]]
    objects += [(f"files {name}", entry, FILE_KEYS) for name, entry in data["files"].items()]
    for what, found, keys in objects:
        if set(found) != set(keys):
            raise InputError(f"{what}: unknown keys {sorted(set(found) - set(keys))}, missing keys {sorted(set(keys) - set(found))}")
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
    if manifest.attention_dtype not in (manifest.dtype, "fp32"):
        return f"got attention_dtype {manifest.attention_dtype!r}, expected {manifest.dtype} or fp32"
    if not _is_whole(manifest.max_positions) or not 1 <= manifest.max_positions <= manifest.config.context_length:
        return f"got max_positions {manifest.max_positions!r}, expected 1 to {manifest.config.context_length}"
    seed = manifest.weights.get("seed", 0)
    if not _is_count(seed):
        return f"got seed {short(seed)} of the weights, expected a whole number"
    if not all(map(_is_count, manifest.end_token_ids)):
        return f"got end_token_ids {short(list(manifest.end_token_ids))}, expected whole numbers"
    return None


_REPORT_REMEDY = "remove it and run `python -m exporter validate {}` again"


@dataclass(frozen=True)
class Bundle:
    """An opened bundle.

    Attributes:
        folder: where it lies.
        manifest: what it is.
        whole: the bundle that this one is a part of.
        written: which file the manifest was read from (device, inode, change time), to tell a bundle from one that replaced it.
    """

    folder: Path
    manifest: Manifest
    whole: Bundle | None = field(default=None, compare=False, repr=False)
    written: tuple[int, int, int] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def open(cls, folder: str | Path, verify: str = "graph") -> Bundle:
        """Opens a bundle and checks its files against the manifest; one that is replaced meanwhile is opened anew.

        Args:
            folder: the bundle's folder.
            verify: "graph" checks every size and the checksum of model.onnx; "full" every checksum.

        Raises:
            BundleError: a file is missing, truncated, changed or leads out of the folder, the manifest cannot be read, or the
                graph is not of the form that exports have.
        """
        if verify not in VERIFY:
            raise InputError(f"verify: got {verify!r}, expected one of {', '.join(VERIFY)}")
        while True:
            bundle = cls.read(folder)
            files = bundle.manifest.files
            hashed = [name for name in files if verify == "full" or name.rpartition("/")[2] == GRAPH_FILE]
            with timed(log, "%s: sizes of %d files, checksums of %s", bundle.folder, len(files), ", ".join(hashed)):
                damaged, misshapen = bundle.problems(verify)
            if _written(bundle.folder / MANIFEST_FILE) == bundle.written:
                break  # else an export has replaced the folder since its manifest was read
        if damaged:
            raise BundleError(together(f"bundle {bundle.folder}", [f"{name} {problem}" for name, problem in damaged.items()]))
        for name, problem in misshapen.items():
            raise BundleError(f"{bundle.folder / name}: {problem}; export the bundle again")
        log.info("%s: %s, %s, weights of %.1f MiB", bundle.folder, bundle.manifest.unit, bundle.manifest.dtype, bundle.manifest.weights_bytes / 2**20)
        return bundle

    @classmethod
    def read(cls, folder: str | Path) -> Bundle:
        """Reads a bundle's manifest and looks at no other file; `open` is what stages use.

        Raises:
            InputError: `folder` is no path.
            BundleError: there is no manifest, or it cannot be read.
        """
        if not isinstance(folder, str | os.PathLike):
            raise InputError(f"bundle: got {folder!r}, expected the path of its folder")
        folder = Path(folder)
        path = folder / MANIFEST_FILE
        if not is_text(folder):
            raise BundleError(f"bundle {folder}: its path is not valid UTF-8, which onnx and onnxruntime cannot open; rename it")
        if not path.is_file():
            what = "no such folder" if not folder.exists() else "not a folder" if not folder.is_dir() else f"it holds no {MANIFEST_FILE}"
            raise BundleError(f"bundle {folder}: {what}; make one with `python -m exporter export … -o {folder}`")
        written = _written(path)
        return cls(folder, Manifest.read(folder), written=written)

    def check_unchanged(self) -> None:
        """Refuses what was read from a bundle's folder if the folder was replaced since the bundle was opened.

        Raises:
            BundleError: another bundle, or the same one written anew, is there now.
        """
        whole = self.whole or self
        if whole.written is not None and _written(whole.folder / MANIFEST_FILE) != whole.written:
            raise BundleError(f"bundle {whole.folder}: an export has replaced it since it was opened; what was begun with it is void; run again")

    def problems(self, verify: str) -> tuple[dict[str, str], dict[str, str]]:
        """What is wrong with the files that the manifest lists, and in what graphs are not of the form of exports, both by name.

        A graph is looked into only where its files are there and whole, and data are hashed last, where their graph says how much
        of them there is.

        Args:
            verify: "graph" takes the checksums of graphs, "full" those of all files.
        """
        graphs = [name for name in self.manifest.files if name.rpartition("/")[2] == GRAPH_FILE]
        damaged = self.file_problems(graphs)
        misshapen = self._form_problems(damaged)
        if verify == "full":
            others = [name for name in self.manifest.files if name not in graphs and graph_beside(name) not in misshapen]
            damaged |= self.file_problems(others)
        return damaged, misshapen

    def _form_problems(self, damaged: Collection[str]) -> dict[str, str]:
        found = {}
        for part in self.parts:
            graph, data = ((part.folder / name).relative_to(self.folder).as_posix() for name in (GRAPH_FILE, DATA_FILE))
            if graph in damaged or data in damaged:
                continue
            try:
                check_graph_form(part.graph_path, part.manifest.contract, self.manifest.largest_number, DATA_FILE)
            except ValueError as error:
                found[graph] = str(error)
            except OSError as error:  # where an export replaces the folder at this moment
                found[graph] = f"it cannot be read ({error.strerror})"
        return found

    def file_problems(self, checksums: Collection[str]) -> dict[str, str]:
        """What is wrong with the files that the manifest lists, by name: all that are missing, of another size or, where
        asked, of another checksum.

        Args:
            checksums: names of the files to hash.
        """
        problems = {}
        for name, entry in self.manifest.files.items():
            path = self.folder / name
            try:
                if not path.is_file():
                    raise FileNotFoundError
                if not is_inside(path, self.folder):
                    problems[name] = "is a link that leads out of the folder; put the file itself there"
                    continue
                if (size := path.stat().st_size) != entry["size_bytes"]:
                    problems[name] = f"has {size:,} bytes, expected {entry['size_bytes']:,}; it was truncated or replaced; export again"
                elif graph_beside(name) == name and size > LARGEST_BYTES:
                    problems[name] = f"has {size:,} bytes, expected at most {LARGEST_BYTES:,}; export again"
                elif name in checksums and sha256_of(path) != entry["sha256"]:
                    problems[name] = "has another SHA-256 than the manifest says; it was changed; export again"
            except FileNotFoundError:  # also where an export replaces the folder at this moment
                problems[name] = "is missing; restore it or export the bundle again"
        return problems

    @property
    def parts(self) -> list[Bundle]:
        """The bundle itself, or one bundle for each part where the unit lies in several graphs."""
        if not self.manifest.parts:
            return [self]
        return [Bundle(self.folder / part_folder(index), self.manifest.of_part(index), self) for index in range(len(self.manifest.parts))]

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
            raise BundleError(f"{path}: not JSON that can be read ({str(error)[:300]}); {_REPORT_REMEDY.format(self.folder)}") from None
        if not isinstance(report, dict):
            raise BundleError(f"{path}: got a JSON {type(report).__name__}, expected an object; {_REPORT_REMEDY.format(self.folder)}")
        if not isinstance(report.get("validation", {}), dict):
            raise BundleError(f"{path}: got {short(report['validation'])} at validation, expected an object; {_REPORT_REMEDY.format(self.folder)}")
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


def _written(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise BundleError(f"{path}: cannot be read ({error.strerror})") from None
    return status.st_dev, status.st_ino, status.st_ctime_ns


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_entry(path: Path, sha256: str | None = None) -> dict:
    """The manifest's record of one file; its checksum is taken unless the writer already knows it."""
    return {"size_bytes": path.stat().st_size, "sha256": sha256 or sha256_of(path)}
