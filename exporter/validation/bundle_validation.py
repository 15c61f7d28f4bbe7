"""Validates a bundle: compares its graph in onnxruntime with the eager definition, in every scenario."""

from __future__ import annotations

import math
from collections.abc import Callable

from exporter.bundle.bundle import Bundle
from exporter.bundle.manifest import Manifest
from exporter.bundle.origin import Origin
from exporter.common.errors import InputError
from exporter.common.memory import available_host_bytes
from exporter.model.weights import WeightSource
from exporter.placing.temporaries import scratch_folder
from exporter.spec.unit import UNIT_KINDS, Unit
from exporter.steppers.eager_stepper import EagerStepper
from exporter.steppers.protocol import Stepper
from exporter.validation.by_layer import LayerValidation
from exporter.validation.comparison import Comparison, summarize
from exporter.validation.control import Control, control_dtype, is_widened, judge
from exporter.validation.cpu_graph import blocks_run, cpu_dtype, graph_run, open_on_cpu
from exporter.validation.recording import Recording, record_run
from exporter.validation.reference_weights import reference_weights
from exporter.validation.scenarios import RunLimits
from exporter.validation.tolerances import VALIDATION_STAGE, tolerance

VALIDATION_COPIES = 3  # float32 copies of the weights: eager's, onnxruntime's, and one for a control or a float32 twin


def validate_bundle(
    bundle: Bundle,
    weights: WeightSource | None = None,
    seed: int = 0,
    by_layer: bool | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[dict, list[Comparison]]:
    """Compares the bundle's graph in onnxruntime with the eager definition, in every scenario.

    The eager definition computes in float32 over weights rounded to the bundle's dtype. A bf16 bundle is run as its
    float32 twin, and the result says so. The steppers run one after the other, so that only one holds weights at a
    time.

    Args:
        bundle: an opened bundle.
        weights: source of the eager definition's weights. None takes the weights inside the bundle; an error that was
            made when they were written then stays hidden.
        seed: seed for the random inputs.
        by_layer: True validates a model or stack one block at a time. None does so where the whole would not fit in
            memory; `say` and the section name it.
        say: called with a line about each stage of a validation by layer.

    Raises:
        InputError: `by_layer` is True for a unit that has no layers.
        BundleError: a graph or its weights are not those in the manifest, or changed in the meantime.

    Returns:
        The section for report.json, with the checksum of every graph and data file that was read; and the comparisons
        it was made from.
    """
    origin = Origin.of_bundle(bundle)
    rounded = reference_weights(bundle, weights)
    if _validates_by_layer(bundle.manifest, by_layer, say):
        section, comparisons = _validate_layers(bundle, rounded, seed, say)
    else:
        section, comparisons = _validate_whole(bundle, rounded, seed)
    origin.check_unchanged()
    return section | {"files": origin.checksums}, comparisons


def _validate_whole(bundle: Bundle, weights: WeightSource, seed: int) -> tuple[dict, list[Comparison]]:
    manifest = bundle.manifest
    computed_in, growing = cpu_dtype(manifest.dtype), manifest.unit.cache == "growing"
    # the eager definition updates its cache in place, and the stepper of a growing graph has the same interface
    spec, limits = manifest.spec.in_place().in_dtype(computed_in), RunLimits(ragged=not growing)

    def recorded(stepper: Stepper) -> tuple[Recording, str]:
        return record_run(spec, stepper, seed, limits), stepper.description

    def run_eager(dtype: str) -> tuple[Recording, str]:
        return recorded(EagerStepper.from_weights(spec.in_dtype(dtype), weights))

    reference, reference_description = run_eager("fp32")
    with scratch_folder() as scratch:
        stepper = open_on_cpu(bundle, scratch, growing)
        candidate, candidate_description = recorded(stepper)
        stepper.close()
    allowed = tolerance(VALIDATION_STAGE, spec.unit, manifest.dtype)

    def run_control() -> Control:
        return Control(reference, *run_eager(control_dtype(computed_in)))

    comparisons, control = judge(reference, candidate, allowed, run_control)
    section = summarize(comparisons, reference_description, candidate_description, allowed, control)
    return section | {"through": graph_run(manifest.dtype)}, comparisons


def _validates_by_layer(manifest: Manifest, by_layer: bool | None, say: Callable[[str], None]) -> bool:
    unit = manifest.unit
    if not unit.has_cache:
        if by_layer:
            *others, last = (kind for kind in UNIT_KINDS if Unit(kind).has_cache)
            expected = f"{', '.join(others)} or {last}"
            raise InputError(f"by_layer: got a {unit}, expected a {expected} with its cache in place")
        return False
    if by_layer is not None:
        return by_layer
    parameters = sum(math.prod(shape) for shape in manifest.spec.weight_shapes.values())
    needed, free = 4 * parameters * VALIDATION_COPIES, available_host_bytes()
    if needed <= free:
        return False
    memory = f"about {needed / 2**30:.1f} GiB and {free / 2**30:.1f} are free"
    say(f"validate: layer by layer, since the whole would need {memory}")
    return True


def _validate_layers(
    bundle: Bundle, weights: WeightSource, seed: int, say: Callable[[str], None]
) -> tuple[dict, list[Comparison]]:
    manifest = bundle.manifest
    comparisons = list(LayerValidation(bundle, weights, seed).run(say))
    allowed = tolerance(VALIDATION_STAGE, manifest.unit, manifest.dtype)
    control = "the eager definition of the block in another arithmetic" if is_widened(comparisons, allowed) else None
    reference, candidate = "eager PyTorch in fp32 on the CPU", "onnxruntime on CPUExecutionProvider"
    section = summarize(comparisons, reference, candidate, allowed, control)
    return section | {"through": blocks_run(manifest.dtype)}, comparisons


def failures(comparisons: list[Comparison]) -> str:
    """Returns one line for each failed comparison; its largest error is the smallest tolerance that would pass."""
    return "\n".join(
        f"  {c.scenario}: {c.tensor} differs by {c.max_error:.2e} of rms at most ({c.allowed:.0e} allowed), "
        f"{c.mean_error:.2e} on average"
        for c in comparisons
        if not c.passed
    )
