"""The export itself: assemble the graph, stream the weights, check, validate, and put the bundle in place only then."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from exporter.bundle.bundle import REPORT_FILE, Bundle, file_entry
from exporter.bundle.genai_config import genai_config
from exporter.bundle.manifest import DATA_FILE, GENAI_CONFIG_FILE, GRAPH_FILE, MANIFEST_FILE, Manifest, part_folder
from exporter.common.documents import to_json
from exporter.common.errors import CheckFailed, InputError
from exporter.common.memory import peak_memory_bytes
from exporter.common.timing import timed
from exporter.common.versions import versions
from exporter.costs.stored_size import stored_weights_bytes
from exporter.graph.assemble import assemble
from exporter.graph.contract_check import check_graph
from exporter.graph.weight_writer import write_graph
from exporter.model.weights import WeightSource
from exporter.placing.folders import new_folder
from exporter.spec.catalogue import ModelConfig
from exporter.spec.dtypes import lookup_dtype
from exporter.spec.limits import check_max_positions
from exporter.spec.tensors import graph_contract
from exporter.spec.unit import Unit, part_bounds
from exporter.spec.weight_formats import WeightFormat
from exporter.validation.bundle_validation import failures, validate_bundle

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportRequest:
    """What to export.

    Attributes:
        config: the whole model's geometry.
        unit: the part of it that the graph covers.
        weights: where its values come from.
        dtype: "fp16", "fp32" or "bf16".
        max_positions: None for the default (8,192, or the context where that is shorter).
        attention_dtype: None for the bundle's own, or "fp32" to run attention between casts.
        end_token_ids, tokenizer_files: what a whole model's bundle takes along.
        provenance: what report.json says of where all this came from.
        n_parts: graphs that the unit is cut into, each of consecutive layers; 1 makes one graph.
        weight_format: what matrices are stored in where that is not `dtype`.
    """

    config: ModelConfig
    unit: Unit
    weights: WeightSource
    dtype: str = "fp16"
    max_positions: int | None = None
    attention_dtype: str | None = None
    end_token_ids: tuple[int, ...] = ()
    tokenizer_files: tuple[Path, ...] = ()
    provenance: dict | None = None
    n_parts: int = 1
    weight_format: WeightFormat | None = None


def export_bundle(
    request: ExportRequest,
    target: str | Path,
    validated: bool = True,
    progress: Callable[[int], None] = lambda n_bytes: None,
    say: Callable[[str], None] = lambda line: None,
) -> Bundle:
    """Exports a unit into a bundle folder, which appears only when everything has passed.

    Args:
        request: what to export.
        target: the bundle's folder; an older bundle there is replaced, other people's files stay.
        validated: run the eager definition against onnxruntime before the bundle is put in place.
        progress: called with the bytes of weights just written.
        say: called with a line about each stage.

    Raises:
        InputError: a bad dtype, number of positions or output folder.
        CheckpointError: a weight is not finite, or not in the bundle's dtype.
        CheckFailed: the graph breaks its contract or disagrees with the eager definition; nothing is left behind.
    """
    lookup_dtype(request.dtype)
    if request.attention_dtype not in (None, request.dtype, "fp32"):
        raise InputError(f"attention dtype: got {request.attention_dtype!r}, expected {request.dtype} or fp32")
    max_positions = check_max_positions(request.max_positions, request.config)
    if request.n_parts != 1 and (request.unit.kind == "component" or request.unit.cache != "in_place"):
        raise InputError(
            f"parts: got {request.n_parts} for a {request.unit}, expected a stack or model with its cache in place"
        )
    parts = part_bounds(request.unit.n_layers, request.n_parts)
    if request.weight_format is not None:
        request.weight_format.check(request.config)
    started = time.perf_counter()
    sizes = [
        stored_weights_bytes(request.config, request.unit, request.dtype, max_positions, request.weight_format, part)
        for part in parts
    ]
    with new_folder(target, sum(sizes)) as folder:
        manifest, flushed = _write_bundle(request, max_positions, folder, progress, say)
        bundle = Bundle(folder, manifest)
        report = {
            "versions": versions("torch", "onnx", "onnxscript", "onnxruntime-gpu", "onnxruntime", "numpy"),
            "provenance": request.provenance or {},
            "flushed_to_zero": flushed,
            "export": {"seconds": round(time.perf_counter() - started, 3), "peak_memory_bytes": peak_memory_bytes()},
        }
        if validated:
            say("validate: eager definition against onnxruntime")
            report["validation"], comparisons = validate_bundle(bundle, request.weights, say=say)
            if not report["validation"]["passed"]:
                raise CheckFailed(
                    f"export {target}: the graph disagrees with the eager definition; nothing was written\n{failures(comparisons)}"
                )
        (folder / REPORT_FILE).write_text(to_json(report), encoding="utf-8")
    log.info(
        "%s is in place, after %.2f s; peak memory %.2f GiB",
        target,
        time.perf_counter() - started,
        peak_memory_bytes() / 2**30,
    )
    return Bundle(Path(target), manifest)


def _write_bundle(
    request: ExportRequest,
    max_positions: int,
    folder: Path,
    progress: Callable[[int], None],
    say: Callable[[str], None],
) -> tuple[Manifest, dict[str, int]]:
    """Writes all but the report; returns the manifest and how many values of each weight became zero."""
    attention_dtype = request.attention_dtype or request.dtype
    parts = part_bounds(request.unit.n_layers, request.n_parts) if request.n_parts != 1 else ()
    files: dict[str, dict] = {}
    flushed: dict[str, int] = {}
    for index, part in enumerate(parts or [None]):
        place = "" if part is None else f"{part_folder(index)}/"
        (folder / place).mkdir(exist_ok=True)
        what = (
            request.unit
            if part is None
            else f"part {index + 1} of {len(parts)}, layers {part[0]}:{part[1]} of {request.unit}"
        )
        say(f"trace: {what}, {request.dtype}, {max_positions} positions")
        with timed(log, "traced"):
            float32_attention = attention_dtype != request.dtype
            graph = assemble(
                request.config,
                request.unit,
                request.dtype,
                max_positions,
                float32_attention,
                part,
                request.weight_format,
            )
        say("write: graph and weights")
        with timed(log, "written"):
            written = write_graph(graph, folder / place, request.config, request.weights, progress)
        flushed |= written.flushed
        files |= {
            f"{place}{name}": file_entry(folder / place / name, written.checksums[name])
            for name in (GRAPH_FILE, DATA_FILE)
        }
        with timed(log, "graph held against its contract"):
            check_graph(folder / place / GRAPH_FILE, graph.contract)
    if flushed:
        n_flushed = sum(flushed.values())
        say(
            f"note: {n_flushed:,} values of {len(flushed)} weights are too small for {request.dtype} and became zero; see report.json"
        )
    is_model = request.unit.kind == "model"
    for path in request.tokenizer_files if is_model else ():
        shutil.copyfile(path, folder / path.name)
        files[path.name] = file_entry(folder / path.name)
    if request.unit.cache == "growing":
        settings = genai_config(request.config, max_positions, request.end_token_ids, GRAPH_FILE)
        (folder / GENAI_CONFIG_FILE).write_text(to_json(settings), encoding="utf-8")
        files[GENAI_CONFIG_FILE] = file_entry(folder / GENAI_CONFIG_FILE)
    manifest = Manifest(
        config=request.config,
        unit=request.unit,
        dtype=request.dtype,
        attention_dtype=attention_dtype,
        max_positions=max_positions,
        weights=request.weights.description,
        end_token_ids=request.end_token_ids if is_model else (),
        contract=graph_contract(request.config, request.unit, request.dtype),
        files=files,
        parts=parts,
        weight_format=request.weight_format,
    )
    (folder / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    return manifest, flushed
