"""Validates a bundle. Two questions are answered apart:

* the meaning: does the graph mean what the definition means? Its float32 twin is compared with the eager definition in
  float32 over the same stored weights. Nothing excuses a failure here;
* the cost: what do the dtype and the format cost? The graph is run in its own dtype, and the errors are reported.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from exporter.bundle.bundle import Bundle
from exporter.bundle.manifest import Manifest
from exporter.bundle.origin import Origin
from exporter.common.errors import InputError
from exporter.common.memory import available_host_bytes
from exporter.measuring.agreement import forced_logits, greedy_logits, measure_agreement
from exporter.model.weights import WeightSource
from exporter.placing.temporaries import scratch_folder
from exporter.spec.graph_spec import GraphSpec
from exporter.spec.unit import UNIT_KINDS, Unit
from exporter.steppers.eager_stepper import EagerStepper
from exporter.steppers.protocol import Stepper
from exporter.validation.by_layer import LayerValidation
from exporter.validation.by_operation import judge_bundle, record_values
from exporter.validation.comparison import Comparison, Meaning, compare
from exporter.validation.cost import (
    N_TOKENS,
    Cost,
    CostLimits,
    LargestValues,
    SizedStepper,
    agreement_prompts,
    usual_error,
)
from exporter.validation.cpu_graph import open_own, open_twin, runs_as_twin, twin_run
from exporter.validation.recording import Recording, record_run
from exporter.validation.reference_weights import reference_weights
from exporter.validation.scenarios import RunLimits
from exporter.validation.stored_values import compare_stored
from exporter.validation.tolerances import VALIDATION_STAGE, tolerance

VALIDATION_COPIES = 3  # float32 copies of the weights: the definition's, onnxruntime's, and the twin's in a file


def validate_bundle(
    bundle: Bundle,
    weights: WeightSource | None = None,
    seed: int = 0,
    by_layer: bool | None = None,
    say: Callable[[str], None] = lambda line: None,
    limits: CostLimits = CostLimits(),  # noqa: B008 - frozen, so it can be shared
) -> tuple[dict, list[Comparison]]:
    """Answers whether a bundle's graph means what the definition means, and what its dtype and format cost.

    The eager definition computes in float32 over the weights as the bundle stores them. Stored values are compared too:
    the rotation tables with the geometry's, and the weights with their source, where that is given. The steppers run
    one after the other, so that only one holds weights at a time.

    Args:
        bundle: an opened bundle.
        weights: source of the eager definition's weights. None takes the weights inside the bundle; an error that was
            made when they were written then stays hidden.
        seed: seed for the random inputs.
        by_layer: True validates a model or stack one block at a time. None does so where the whole would not fit in
            memory; `say` and the section name it.
        say: called with a line about each stage.
        limits: limits on what the dtype and the format of a whole model may cost.

    Raises:
        InputError: `by_layer` is True for a unit that has no layers, or a limit cannot be applied.
        BundleError: a graph or its weights are not those in the manifest, or changed in the meantime.

    Returns:
        The section for report.json, with the checksum of every graph and data file that was read; and the comparisons
        that answer the first question. `passed` in the section is the answer to both.
    """
    in_layers = _validates_by_layer(bundle.manifest, by_layer, say)
    limits.check(bundle.manifest.unit, in_layers)
    origin = Origin.of_bundle(bundle)
    rounded = reference_weights(bundle, weights)
    if in_layers:
        meaning, cost = LayerValidation(bundle, rounded, seed).run(say)
    else:
        meaning, cost = WholeValidation(bundle, rounded, weights, seed, limits, say).run()
    meaning = replace(meaning, stored=compare_stored(bundle, None if weights is None else rounded))
    origin.check_unchanged()
    passed = meaning.passed and not cost.failures
    section = {"passed": passed, "meaning": meaning.to_dict(), "cost": cost.to_dict(), "files": origin.checksums}
    return section, [*meaning.comparisons, *meaning.stored]


def check_meaning(bundle: Bundle, weights: WeightSource | None = None, seed: int = 0) -> Meaning:
    """Answers the first question alone: does the graph mean what the definition means? The arguments are those above.

    It runs the whole unit, and nothing in the bundle's own dtype. It takes no checksums of what it reads.
    """
    rounded = reference_weights(bundle, weights)
    validation = WholeValidation(bundle, rounded, weights, seed)
    with scratch_folder() as scratch:
        meaning = validation.meaning(validation.reference(), scratch)
    return replace(meaning, stored=compare_stored(bundle, None if weights is None else rounded))


def why_failed(section: dict) -> str:
    """Returns what a validation found, for an export that fails: a line, and one line for each finding."""
    wrong, dear = section["meaning"]["failures"], section["cost"]["failures"]
    line = (
        "the graph disagrees with the eager definition"
        if not section["meaning"]["passed"]
        else "the graph means what the eager definition means, but its dtype or format fails"
    )
    return "\n  ".join([f"{line}; nothing was written", *wrong, *dear])


@dataclass
class Reference:
    """The eager definition in float32.

    Attributes:
        recording: outputs and cache rows.
        description: its stepper in words.
        largest: its largest values.
        tokens, logits: its greedy continuation of each prompt, int64 [prompts, tokens], and the logits that the tokens
            were chosen from; None for other units than models.
        agreement_with: what the tokens are, in words.
    """

    recording: Recording
    description: str
    largest: LargestValues
    tokens: np.ndarray | None = None
    logits: np.ndarray | None = None
    agreement_with: str | None = None


@dataclass
class WholeValidation:
    """Validates a bundle as a whole.

    Attributes:
        bundle: an opened bundle.
        weights: weights rounded to the bundle's dtype, and widened.
        source: the weights before rounding; None where only the bundle's own are known.
        seed: seed for the random inputs.
        limits: limits on the cost.
        say: called with a line about each stage.
    """

    bundle: Bundle
    weights: WeightSource
    source: WeightSource | None
    seed: int
    limits: CostLimits = CostLimits()  # noqa: RUF009 - frozen, so it can be shared
    say: Callable[[str], None] = lambda line: None

    @property
    def spec(self) -> GraphSpec:
        """What is run, with the interface of a cache in place, which the stepper of a growing graph has too."""
        return self.bundle.manifest.spec.in_place()

    @property
    def run_limits(self) -> RunLimits:
        """The limits of the scenarios."""
        return RunLimits(ragged=self.bundle.manifest.unit.cache != "growing")

    def run(self) -> tuple[Meaning, Cost]:
        """Answers both questions."""
        reference = self.reference(with_tokens=self.bundle.manifest.unit.kind == "model")
        own: Recorded | None = None
        with scratch_folder() as scratch:
            if self.bundle.manifest.dtype == "fp32":  # the graph is its own twin: one run answers both questions
                own = self._run_own(reference, scratch)
            meaning = self.meaning(reference, scratch, own.recording if own else None)
        return meaning, self._cost(reference, own or self._run_own(reference, None))

    # --- the definition -----------------------------------------------------------------------------------------------

    def reference(self, with_tokens: bool = False) -> Reference:
        """Runs the eager definition in float32.

        Args:
            with_tokens: whether it continues the prompts too.
        """
        stepper = SizedStepper.from_weights(self.spec.in_dtype("fp32"), self.weights)
        recording = self._recorded(stepper)
        reference = Reference(recording, stepper.description, stepper.largest)
        if with_tokens and self.bundle.manifest.max_positions > N_TOKENS:
            self._add_tokens(reference, stepper)
        return reference

    def _add_tokens(self, reference: Reference, stepper: EagerStepper) -> None:
        """Continues the prompts. A format in integers is compared with the weights it was made from, where known."""
        reference.agreement_with = "the definition in float32 over the stored weights"
        if self.bundle.manifest.weight_format is not None and self.source is not None:
            reference.agreement_with = "the definition in float32 over the weights before they became integers"
            stepper = EagerStepper.from_weights(self.spec.in_dtype("fp32"), self.source)
        reference.tokens, reference.logits = greedy_logits(stepper, self._prompts, N_TOKENS, self._capacity)

    @cached_property
    def _prompts(self) -> list[list[int]]:
        return agreement_prompts(self.bundle, self.seed)

    @property
    def _capacity(self) -> int:
        return max(len(prompt) for prompt in self._prompts) + N_TOKENS

    def _recorded(self, stepper: Stepper) -> Recording:
        return record_run(self.spec, stepper, self.seed, self.run_limits)

    # --- the two questions --------------------------------------------------------------------------------------------

    def meaning(self, reference: Reference, scratch: Path, recording: Recording | None = None) -> Meaning:
        """Compares the float32 twin with the definition; where the outputs differ, every operation is judged.

        Args:
            reference: the definition's run.
            scratch: folder for the twins.
            recording: the twin's run, where it was made already.
        """
        manifest = self.bundle.manifest
        if recording is None:
            self.say(f"validate: {twin_run(manifest.dtype)} of the graph, against the definition in float32")
            with contextlib.closing(open_twin(self.bundle, scratch)) as stepper:
                recording = self._recorded(stepper)
        allowed = tolerance(VALIDATION_STAGE, manifest.unit, "fp32")
        comparisons = compare(reference.recording, recording, allowed)
        operations = None
        finite = all(math.isfinite(c.max_error) for c in comparisons)
        if manifest.unit.kind != "component" and finite and not all(c.passed for c in comparisons):
            self.say("validate: outputs differ; every operation is judged on the definition's own inputs")
            steps = record_values(self.spec, self.weights, self.seed, self.run_limits)
            operations = tuple(judge_bundle(self.bundle, scratch, steps))
        candidate = "onnxruntime on CPUExecutionProvider"
        return Meaning(comparisons, allowed, reference.description, candidate, twin_run(manifest.dtype), operations)

    def _run_own(self, reference: Reference, scratch: Path | None) -> Recorded:
        """Runs the bundle in its own dtype; the definition takes the place of a graph that onnxruntime cannot run."""
        dtype = self.bundle.manifest.dtype
        self.say(f"validate: what {dtype} costs")
        if runs_as_twin(dtype):
            stepper: Stepper = EagerStepper.from_weights(self.spec, self.weights)
            what = f"{stepper.description}, since onnxruntime has no {dtype} kernels"
        else:
            stepper = open_own(self.bundle)
            what = f"{stepper.description}, the graph itself"
        with contextlib.closing(stepper):
            recording = self._recorded(stepper)
            logits = None
            if reference.tokens is not None:
                logits = forced_logits(stepper, self._prompts, reference.tokens, self._capacity)
        return Recorded(recording, what, logits)

    def _cost(self, reference: Reference, own: Recorded) -> Cost:
        manifest = self.bundle.manifest
        usual = usual_error(manifest.unit, manifest.dtype)
        comparisons = compare(reference.recording, own.recording, usual)
        agreement = None
        if reference.logits is not None and own.logits is not None:
            agreement = measure_agreement(reference.logits, own.logits)
        return Cost(
            manifest.dtype,
            own.description,
            comparisons,
            usual,
            reference.largest,
            agreement,
            reference.agreement_with,
            self.limits,
        )


@dataclass
class Recorded:
    """A run of the bundle in its own dtype.

    Attributes:
        recording: outputs and cache rows.
        description: what was run, in words.
        logits: logits for the definition's tokens, [prompts, tokens, V]; None for other units than models.
    """

    recording: Recording
    description: str
    logits: np.ndarray | None


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
