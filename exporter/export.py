"""The export: assembles the graph, streams the weights, checks and validates, and then puts the bundle in place."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exporter.bundle.bundle import REPORT_FILE, Bundle, file_entry
from exporter.bundle.genai_config import genai_config
from exporter.bundle.manifest import DATA_FILE, GENAI_CONFIG_FILE, GRAPH_FILE, MANIFEST_FILE, Manifest, part_folder
from exporter.common.documents import to_json
from exporter.common.errors import CheckFailed, InputError
from exporter.common.memory import peak_memory_bytes
from exporter.common.plain_numbers import is_whole, make_plain, plain
from exporter.common.timing import timed
from exporter.common.versions import versions
from exporter.costs.stored_size import stored_weights_bytes
from exporter.graph.assemble import assemble
from exporter.graph.contract_check import check_graph
from exporter.graph.weight_writer import WrittenGraph, write_graph
from exporter.model.rounding import Rounding, worst
from exporter.model.weights import WeightSource
from exporter.placing.folders import new_folder
from exporter.spec.catalogue import ModelConfig, short
from exporter.spec.graph_spec import GraphSpec
from exporter.spec.unit import Bounds, Unit, part_bounds
from exporter.spec.weight_formats import WeightFormat
from exporter.validation.bundle_validation import validate_bundle, why_failed
from exporter.validation.cost import CostLimits

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportRequest:
    """What to export.

    Attributes:
        config: the geometry of the whole model.
        unit: the part of the model that the graph covers.
        weights: the source of the values.
        dtype: "fp16", "fp32" or "bf16".
        max_positions: None for the default (8,192, or the context where that is shorter).
        attention_dtype: None for `dtype`, or "fp32" to compute attention in float32 and the rest in `dtype`.
        end_token_ids, tokenizer_files: added to the bundle of a whole model.
        begin_token_id, pad_token_id: added to the settings of onnxruntime-genai; None where the checkpoint has none.
        provenance: entry of report.json about the origin of the weights.
        n_parts: number of graphs that the unit is cut into, each with consecutive layers.
        weight_format: the integer format of the matrices; None stores them in `dtype`.
    """

    config: ModelConfig
    unit: Unit
    weights: WeightSource
    dtype: str = "fp16"
    max_positions: int | None = None
    attention_dtype: str | None = None
    end_token_ids: tuple[int, ...] = ()
    tokenizer_files: tuple[Path, ...] = ()
    begin_token_id: int | None = None
    pad_token_id: int | None = None
    provenance: dict | None = None
    n_parts: int = 1
    weight_format: WeightFormat | None = None

    def __post_init__(self) -> None:
        """Makes plain values of the fields, and checks the end tokens.

        Raises:
            InputError: an end token is not one of the model's vocabulary.
        """
        make_plain(self, "max_positions", "n_parts")
        size, tokens = self.config.vocab_size, self.end_token_ids
        files: Any = self.tokenizer_files
        numbers = [plain(token) for token in (tokens if isinstance(tokens, Iterable) else [tokens])]
        if not all(isinstance(token, int) and is_whole(token) and 0 <= token < size for token in numbers):
            expected = f"whole numbers from 0 to {size - 1}, the model's vocabulary"
            raise InputError(f"end_token_ids: got {short(tokens)}, expected {expected}")
        object.__setattr__(self, "end_token_ids", tuple(numbers))
        one_file = isinstance(files, str | os.PathLike)
        object.__setattr__(self, "tokenizer_files", (Path(files),) if one_file else tuple(map(Path, files)))

    @property
    def spec(self) -> GraphSpec:
        """The identity of the graph that is asked for, checked and with its defaults filled in.

        Raises:
            InputError: a dtype, the number of positions or the format of the weights is not one that can be exported.
        """
        return GraphSpec.checked(
            self.config, self.unit, self.dtype, self.max_positions, self.attention_dtype, self.weight_format
        )

    @property
    def parts(self) -> tuple[Bounds, ...]:
        """The layers of each part; empty where the unit is one graph.

        Raises:
            InputError: the unit cannot be cut into so many parts.
        """
        if self.n_parts != 1 and not self.unit.has_cache:
            raise InputError(
                f"parts: got {self.n_parts} for a {self.unit}, expected a stack or model with its cache in place"
            )
        bounds = part_bounds(self.unit.n_layers, self.n_parts)
        return bounds if len(bounds) > 1 else ()


def export_bundle(
    request: ExportRequest,
    target: str | Path,
    validated: bool = True,
    progress: Callable[[int], None] = lambda n_bytes: None,
    say: Callable[[str], None] = lambda line: None,
    limits: CostLimits = CostLimits(),  # noqa: B008 - frozen, so it can be shared
) -> Bundle:
    """Exports a unit into a bundle folder, which appears only when everything has passed.

    Args:
        request: what to export.
        target: the bundle's folder. An older bundle there is replaced, and other files stay.
        validated: whether onnxruntime is compared with the eager definition before the bundle is put in place.
        progress: called with the bytes of weights just written.
        say: called with a line about each stage.
        limits: limits on what the dtype and the format of a whole model may cost.

    Raises:
        InputError: a dtype, the number of positions or parts, a limit, or the output folder cannot be used.
        CheckpointError: a weight is not finite, is not finite in the bundle's dtype, or loses more than is allowed.
        CheckFailed: the graph breaks its contract, disagrees with the eager definition, or costs more than its dtype
            or the limits allow; nothing is left behind.
    """
    started = time.perf_counter()
    spec, parts = request.spec, request.parts
    limits.check(spec.unit, by_layer=False)
    sizes = [stored_weights_bytes(spec, bounds) for bounds in parts or [None]]
    with new_folder(target, sum(sizes)) as folder:
        manifest, roundings = _write_bundle(request, folder, progress, say)
        bundle = Bundle(folder, manifest)
        report: dict[str, Any] = {
            "versions": versions("torch", "onnx", "onnxscript", "onnxruntime-gpu", "onnxruntime", "numpy"),
            "provenance": request.provenance or {},
            "flushed_to_zero": _flushed(roundings),
            "worst_rounding": worst(roundings),
            "export": {"seconds": round(time.perf_counter() - started, 3), "peak_memory_bytes": peak_memory_bytes()},
        }
        if validated:
            report["validation"], _ = validate_bundle(bundle, request.weights, say=say, limits=limits)
            if not report["validation"]["passed"]:
                raise CheckFailed(f"export {target}: {why_failed(report['validation'])}")
        (folder / REPORT_FILE).write_text(to_json(report), encoding="utf-8")
    log.info(
        "%s is in place, after %.2f s; peak memory %.2f GiB",
        target,
        time.perf_counter() - started,
        peak_memory_bytes() / 2**30,
    )
    return Bundle(Path(target), manifest)


def _write_bundle(
    request: ExportRequest, folder: Path, progress: Callable[[int], None], say: Callable[[str], None]
) -> tuple[Manifest, dict[str, Rounding]]:
    """Writes all but the report; returns the manifest and what each weight lost."""
    spec, parts = request.spec, request.parts
    files: dict[str, dict] = {}
    roundings: dict[str, Rounding] = {}
    for index, bounds in enumerate(parts or [None]):
        prefix = "" if bounds is None else f"{part_folder(index)}/"
        what = str(spec.unit)
        if bounds is not None:
            what = f"part {index + 1} of {len(parts)}, layers {bounds[0]}:{bounds[1]} of {what}"
        say(f"trace: {what}, {spec.dtype}, {spec.max_positions} positions")
        written = _write_graph(request, bounds, folder / prefix, progress, say)
        roundings |= written.roundings
        for name in (GRAPH_FILE, DATA_FILE):
            files[f"{prefix}{name}"] = file_entry(folder / prefix / name, written.checksums[name])
    if flushed := _flushed(roundings):
        say(
            f"note: {sum(flushed.values()):,} values of {len(flushed)} weights are too small for {spec.dtype} "
            "and became zero; see report.json"
        )
    files |= _write_companions(request, folder)
    manifest = Manifest(
        spec=spec,
        weights=request.weights.description,
        end_token_ids=request.end_token_ids if spec.unit.kind == "model" else (),
        contract=spec.contract,
        files=files,
        parts=parts,
    )
    (folder / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    return manifest, roundings


def _flushed(roundings: dict[str, Rounding]) -> dict[str, int]:
    """Returns how many values of each weight became zero, without the weights that have none."""
    return {name: rounding.n_zero for name, rounding in roundings.items() if rounding.n_zero}


def _write_graph(
    request: ExportRequest,
    bounds: Bounds | None,
    folder: Path,
    progress: Callable[[int], None],
    say: Callable[[str], None],
) -> WrittenGraph:
    """Writes the graph of the unit, or of the layers of one part, with its weights, and checks it."""
    folder.mkdir(exist_ok=True)
    with timed(log, "traced"):
        graph = assemble(request.spec, bounds)
    say("write: graph and weights")
    with timed(log, "written"):
        written = write_graph(graph, folder, request.weights, progress)
    with timed(log, "graph checked against its contract"):
        check_graph(folder / GRAPH_FILE, graph.contract)
    return written


def _write_companions(request: ExportRequest, folder: Path) -> dict[str, dict]:
    """Writes the tokenizer of a model and the settings of onnxruntime-genai, and returns their manifest entries."""
    files = {}
    for path in request.tokenizer_files if request.unit.kind == "model" else ():
        shutil.copyfile(path, folder / path.name)
        files[path.name] = file_entry(folder / path.name)
    if request.unit.cache == "growing":
        tokens = request.end_token_ids, GRAPH_FILE, request.begin_token_id, request.pad_token_id
        settings = genai_config(request.config, request.spec.max_positions, *tokens)
        (folder / GENAI_CONFIG_FILE).write_text(to_json(settings), encoding="utf-8")
        files[GENAI_CONFIG_FILE] = file_entry(folder / GENAI_CONFIG_FILE)
    return files
