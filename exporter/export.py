"""The export itself: assemble the graph, stream the weights, check, validate, and put the bundle in place only then."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import math
import platform
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from exporter import __version__
from exporter.bundle.bundle import REPORT_FILE, Bundle, file_entry
from exporter.bundle.genai_config import genai_config
from exporter.bundle.manifest import DATA_FILE, GENAI_CONFIG_FILE, GRAPH_FILE, MANIFEST_FILE, Manifest, part_folder
from exporter.common.documents import to_json
from exporter.common.errors import CheckFailed, InputError
from exporter.common.memory import available_host_bytes, peak_memory_bytes
from exporter.common.timing import timed
from exporter.costs.stored_size import stored_weights_bytes
from exporter.graph.assemble import assemble
from exporter.graph.contract_check import check_graph
from exporter.graph.float32_twin import float32_twin
from exporter.graph.quantize import QuantizedWeights
from exporter.graph.weight_reader import bundle_weights
from exporter.graph.weight_writer import write_graph
from exporter.model.weights import RoundedWeights, WeightSource
from exporter.placing.placing import new_folder, scratch_folder
from exporter.spec.catalogue import ModelConfig
from exporter.spec.contract import Unit, WeightFormat, check_max_positions, graph_contract, lookup_dtype, part_bounds, weight_shapes
from exporter.steppers.eager_stepper import EagerStepper
from exporter.steppers.growing_stepper import GrowingStepper
from exporter.steppers.onnxruntime_stepper import OnnxruntimeStepper
from exporter.steppers.parts_stepper import open_parts
from exporter.steppers.protocol import Stepper
from exporter.validation.comparison import Comparison, Recording, compare, judge_by_control, record, summarize
from exporter.validation.layers import LayerValidation
from exporter.validation.scenarios import RunLimits
from exporter.validation.tolerances import tolerance

log = logging.getLogger(__name__)

VALIDATION_COPIES = 3  # of the weights in float32: eager's, onnxruntime's, and what a control or a twin adds


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
        raise InputError(f"parts: got {request.n_parts} for a {request.unit}, expected a stack or model with its cache in place")
    parts = part_bounds(request.unit.n_layers, request.n_parts)
    if request.weight_format is not None:
        request.weight_format.check(request.config)
    started = time.perf_counter()
    sizes = [stored_weights_bytes(request.config, request.unit, request.dtype, max_positions, request.weight_format, part) for part in parts]
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
                raise CheckFailed(f"export {target}: the graph disagrees with the eager definition; nothing was written\n{failures(comparisons)}")
        (folder / REPORT_FILE).write_text(to_json(report), encoding="utf-8")
    log.info("%s is in place, after %.2f s; peak memory %.2f GiB", target, time.perf_counter() - started, peak_memory_bytes() / 2**30)
    return Bundle(Path(target), manifest)


def _write_bundle(
    request: ExportRequest, max_positions: int, folder: Path, progress: Callable[[int], None], say: Callable[[str], None]
) -> tuple[Manifest, dict[str, int]]:
    """Writes all but the report; returns the manifest and how many values of each weight became zero."""
    attention_dtype = request.attention_dtype or request.dtype
    parts = part_bounds(request.unit.n_layers, request.n_parts) if request.n_parts != 1 else ()
    files: dict[str, dict] = {}
    flushed: dict[str, int] = {}
    for index, part in enumerate(parts or [None]):
        place = "" if part is None else f"{part_folder(index)}/"
        (folder / place).mkdir(exist_ok=True)
        what = request.unit if part is None else f"part {index + 1} of {len(parts)}, layers {part[0]}:{part[1]} of {request.unit}"
        say(f"trace: {what}, {request.dtype}, {max_positions} positions")
        with timed(log, "traced"):
            float32_attention = attention_dtype != request.dtype
            graph = assemble(request.config, request.unit, request.dtype, max_positions, float32_attention, part, request.weight_format)
        say("write: graph and weights")
        with timed(log, "written"):
            written = write_graph(graph, folder / place, request.config, request.weights, progress)
        flushed |= written.flushed
        files |= {f"{place}{name}": file_entry(folder / place / name, written.checksums[name]) for name in (GRAPH_FILE, DATA_FILE)}
        with timed(log, "graph held against its contract"):
            check_graph(folder / place / GRAPH_FILE, graph.contract)
    if flushed:
        n_flushed = sum(flushed.values())
        say(f"note: {n_flushed:,} values of {len(flushed)} weights are too small for {request.dtype} and became zero; see report.json")
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


def validate_bundle(
    bundle: Bundle,
    weights: WeightSource | None = None,
    seed: int = 0,
    by_layer: bool | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[dict, list[Comparison]]:
    """Compares the bundle's graph in onnxruntime with the eager definition, in every scenario.

    The eager definition computes in float32 over weights rounded to the bundle's dtype. A bf16 bundle is run as its float32
    twin, and the result says so. The steppers run one after the other, so that only one holds weights at a time.

    Args:
        bundle: an opened bundle.
        weights: what the eager definition is filled from; None takes the weights inside the bundle, which cannot show
            that they were written wrongly.
        seed: of the random inputs.
        by_layer: True validates a model or stack one block at a time; None does where the whole would not fit in memory, says
            so and writes it into the section.
        say: called with a line about each stage of a validation by layer.

    Raises:
        InputError: a unit that has no layers is to be validated by layer.
        BundleError: an export replaced the bundle meanwhile.

    Returns:
        The section for report.json, and the comparisons it was made from.
    """
    manifest = bundle.manifest
    config, unit, max_positions = manifest.config, manifest.unit, manifest.max_positions
    rounded = reference_weights(bundle, weights)
    if _validates_by_layer(manifest, by_layer, say):
        return _validate_layers(bundle, rounded, seed, say)
    arithmetic = "fp32" if manifest.dtype == "bf16" else manifest.dtype  # what the graph is run in
    growing = unit.cache == "growing"
    unit = dataclasses.replace(unit, cache="in_place")  # what the eager definition does, and how a growing graph is driven
    inputs, limits = graph_contract(config, unit, arithmetic), RunLimits(ragged=not growing)

    def run_eager(dtype: str) -> tuple[Recording, str]:
        stepper = EagerStepper.from_weights(config, unit, dtype, max_positions, rounded)
        return record(config, unit, max_positions, stepper, inputs, seed, limits), stepper.description

    reference, reference_description = run_eager("fp32")
    with scratch_folder() as scratch:
        stepper = open_onnxruntime(bundle, scratch, growing)
        candidate, candidate_description = record(config, unit, max_positions, stepper, inputs, seed, limits), stepper.description
        stepper.close()
    allowed = tolerance(("eager", "onnxruntime"), unit, manifest.dtype)
    comparisons, control_description = compare(reference, candidate, allowed), None
    if not all(c.passed for c in comparisons):
        control, control_description = run_eager("fp64" if arithmetic == "fp32" else arithmetic)
        comparisons = judge_by_control(comparisons, reference, control)
        if all(c.allowed == allowed.allowed for c in comparisons):
            control_description = None  # it strayed too little to allow more
    section = summarize(comparisons, reference_description, candidate_description, allowed, control_description)
    section["through"] = "float32 twin" if manifest.dtype == "bf16" else "the graph itself"
    bundle.check_unchanged()
    return section, comparisons


def reference_weights(bundle: Bundle, weights: WeightSource | None = None) -> WeightSource:
    """What a bundle's reference computes with: weights as the bundle has them, widened to float32.

    Args:
        bundle: of any dtype and weight format.
        weights: where they came from; None takes the bundle's own, which cannot show that they were written wrongly.
    """
    manifest = bundle.manifest
    if weights is None:
        weights = bundle_weights(bundle)
    elif manifest.weight_format is not None:
        weights = QuantizedWeights(weights, manifest.weight_format, manifest.dtype, manifest.config.tie_word_embeddings)
    return RoundedWeights(weights, manifest.dtype)


def open_onnxruntime(bundle: Bundle, scratch: Path, growing: bool = False) -> Stepper:
    """A bundle in onnxruntime on the CPU as it can be compared there: in parts as one, a bf16 one as its float32 twin.

    Args:
        bundle: of any dtype.
        scratch: a folder for twins, which must outlive the stepper.
        growing: whether its cache grows.
    """

    def open_part(part: Bundle) -> Stepper:
        manifest, path = part.manifest, part.graph_path
        if manifest.dtype == "bf16":
            path = float32_twin(part.folder, scratch)
        dtype = "fp32" if manifest.dtype == "bf16" else manifest.dtype
        if growing:
            return GrowingStepper(str(path), graph_contract(manifest.config, dataclasses.replace(manifest.unit, cache="in_place"), dtype))
        return OnnxruntimeStepper(str(path), manifest.contract.in_dtype(manifest.dtype, dtype), dtype)

    stepper = open_parts(bundle, open_part)
    if bundle.manifest.dtype == "bf16" and bundle.manifest.parts:
        stepper.contract = bundle.manifest.contract.in_dtype("bf16", "fp32")
    return stepper


def _validates_by_layer(manifest: Manifest, by_layer: bool | None, say: Callable[[str], None]) -> bool:
    unit = manifest.unit
    if not unit.has_cache:
        if by_layer:
            raise InputError(f"validate by layer: got a {unit}, expected a block, stack or model with its cache in place")
        return False
    if by_layer is not None:
        return by_layer
    parameters = sum(math.prod(shape) for shape in weight_shapes(manifest.config, unit).values())
    needed, free = 4 * parameters * VALIDATION_COPIES, available_host_bytes()
    if needed <= free:
        return False
    say(f"validate: layer by layer, since the whole would need about {needed / 2**30:.1f} GiB and {free / 2**30:.1f} are free")
    return True


def _validate_layers(bundle: Bundle, weights: WeightSource, seed: int, say: Callable[[str], None]) -> tuple[dict, list[Comparison]]:
    manifest = bundle.manifest
    comparisons = list(LayerValidation(bundle, weights, seed).run(say))
    allowed = tolerance(("eager", "onnxruntime"), manifest.unit, manifest.dtype)
    widened = any(c.allowed > allowed.allowed for c in comparisons)
    control = "the eager definition of the block in another arithmetic" if widened else None
    section = summarize(comparisons, "eager PyTorch in fp32 on the CPU", "onnxruntime on CPUExecutionProvider", allowed, control)
    bundle.check_unchanged()
    through = "float32 twins of its blocks" if manifest.dtype == "bf16" else "its blocks"
    return section | {"through": f"{through}, one at a time"}, comparisons


def failures(comparisons: list[Comparison]) -> str:
    """One line for each comparison that failed; its error is the tolerance that would have passed."""
    return "\n".join(
        f"  {c.scenario}: {c.tensor} differs by {c.max_error:.2e} of rms at most ({c.allowed:.0e} allowed), {c.mean_error:.2e} on average"
        for c in comparisons
        if not c.passed
    )


def versions(*packages: str) -> dict[str, str]:
    """Versions of the packages that are installed, with Python's and our own."""
    found = {"blockline": __version__, "python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
