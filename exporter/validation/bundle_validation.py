"""Validates a bundle: its graph in onnxruntime against the eager definition, in every scenario."""

from __future__ import annotations

import math
from collections.abc import Callable

from exporter.bundle.bundle import Bundle
from exporter.bundle.manifest import Manifest
from exporter.common.errors import InputError
from exporter.common.memory import available_host_bytes
from exporter.model.weights import WeightSource
from exporter.placing.temporaries import scratch_folder
from exporter.steppers.eager_stepper import EagerStepper
from exporter.validation.by_layer import LayerValidation
from exporter.validation.comparison import Comparison, compare, summarize
from exporter.validation.control import judge_by_control
from exporter.validation.recording import Recording, record
from exporter.validation.scenarios import RunLimits
from exporter.validation.tolerances import tolerance
from exporter.validation.validation_steppers import open_onnxruntime, reference_weights

VALIDATION_COPIES = 3  # of the weights in float32: eager's, onnxruntime's, and what a control or a twin adds


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
    rounded = reference_weights(bundle, weights)
    if _validates_by_layer(manifest, by_layer, say):
        return _validate_layers(bundle, rounded, seed, say)
    arithmetic = "fp32" if manifest.dtype == "bf16" else manifest.dtype  # what the graph is run in
    growing = manifest.unit.cache == "growing"
    spec = manifest.spec.in_place().in_dtype(arithmetic)  # a growing graph is driven as an in-place one
    limits = RunLimits(ragged=not growing)

    def run_eager(dtype: str) -> tuple[Recording, str]:
        stepper = EagerStepper.from_weights(spec.in_dtype(dtype), rounded)
        return record(spec, stepper, seed, limits), stepper.description

    reference, reference_description = run_eager("fp32")
    with scratch_folder() as scratch:
        stepper = open_onnxruntime(bundle, scratch, growing)
        candidate, candidate_description = (
            record(spec, stepper, seed, limits),
            stepper.description,
        )
        stepper.close()
    allowed = tolerance(("eager", "onnxruntime"), spec.unit, manifest.dtype)
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


def _validates_by_layer(manifest: Manifest, by_layer: bool | None, say: Callable[[str], None]) -> bool:
    unit = manifest.unit
    if not unit.has_cache:
        if by_layer:
            raise InputError(
                f"validate by layer: got a {unit}, expected a block, stack or model with its cache in place"
            )
        return False
    if by_layer is not None:
        return by_layer
    parameters = sum(math.prod(shape) for shape in manifest.spec.weight_shapes.values())
    needed, free = 4 * parameters * VALIDATION_COPIES, available_host_bytes()
    if needed <= free:
        return False
    say(
        f"validate: layer by layer, since the whole would need about {needed / 2**30:.1f} GiB and {free / 2**30:.1f} are free"
    )
    return True


def _validate_layers(
    bundle: Bundle, weights: WeightSource, seed: int, say: Callable[[str], None]
) -> tuple[dict, list[Comparison]]:
    manifest = bundle.manifest
    comparisons = list(LayerValidation(bundle, weights, seed).run(say))
    allowed = tolerance(("eager", "onnxruntime"), manifest.unit, manifest.dtype)
    widened = any(c.allowed > allowed.allowed for c in comparisons)
    control = "the eager definition of the block in another arithmetic" if widened else None
    section = summarize(
        comparisons, "eager PyTorch in fp32 on the CPU", "onnxruntime on CPUExecutionProvider", allowed, control
    )
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
