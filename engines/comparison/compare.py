"""The comparison: the same multi-step scenarios through several backends, each held against the first, per output and step."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from engines.comparison.audit import BackendAudit, Reference, audit, make_reference
from engines.comparison.observers import GraphObserver, Observer, StepperObserver
from engines.interpreter.stepper import InterpreterStepper
from engines.library.backend import choose_backend
from engines.library.cuda import RuntimeCuda
from engines.network.network_checks import check_weight_format
from engines.running.tensorrt_parts import find_engines, open_engines
from exporter.bundle.bundle import Bundle, check_in_place
from exporter.common.errors import BackendError, InputError
from exporter.common.timing import timed
from exporter.graph.float32_twin import float32_twin
from exporter.graph.weight_reader import bundle_weights
from exporter.model.weights import RandomWeights, WeightSource
from exporter.placing.temporaries import scratch_folder
from exporter.spec.limits import check_cache_capacity
from exporter.steppers.eager_stepper import EagerStepper
from exporter.steppers.onnxruntime_stepper import OnnxruntimeStepper
from exporter.steppers.parts_stepper import open_parts
from exporter.steppers.protocol import Stepper
from exporter.validation.comparison import Comparison, compare
from exporter.validation.control import judge_by_control
from exporter.validation.recording import Recording, record
from exporter.validation.scenarios import RunLimits
from exporter.validation.tolerances import Tolerance, tolerance
from exporter.validation.validation_steppers import open_onnxruntime, reference_weights

log = logging.getLogger(__name__)

BACKENDS = ("eager", "onnxruntime", "interpreter", "tensorrt")
AUDITED = ("onnxruntime", "interpreter")
Say = Callable[[str], None]


@dataclass(frozen=True)
class StepDifference:
    """One tensor at one step, candidate b against reference a.

    Attributes:
        shape: of the tensor.
        max_abs, mean_abs: of |a − b|.
        max_rel, mean_rel: of |a − b| / |a| where a is not 0; NaN where there is no such element.
        cosine: of the angle between both, flattened; NaN where one is zero.
        worst_index: of max_abs; None where the candidate is missing, misshapen or not finite.
    """

    shape: tuple[int, ...]
    max_abs: float
    mean_abs: float
    max_rel: float
    mean_rel: float
    cosine: float
    worst_index: tuple[int, ...] | None

    @classmethod
    def measure(cls, a: np.ndarray, b: np.ndarray | None) -> StepDifference:
        """Measures candidate `b` against reference `a`; infinite where `b` is missing, of another shape or not finite."""
        failed = cls(a.shape, math.inf, math.inf, math.inf, math.inf, math.nan, None)
        if b is None or b.shape != a.shape or not a.size:
            return failed
        a, b = a.astype(np.float64), b.astype(np.float64)
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            bad = np.argwhere(~np.isfinite(b))
            return (
                failed
                if not len(bad)
                else cls(a.shape, math.inf, math.inf, math.inf, math.inf, math.nan, tuple(map(int, bad[0])))
            )
        difference = np.abs(a - b)
        worst = tuple(int(i) for i in np.unravel_index(int(difference.argmax()), a.shape))
        relative = difference[a != 0] / np.abs(a[a != 0])
        norms = float(np.linalg.norm(a) * np.linalg.norm(b))
        return cls(
            shape=a.shape,
            max_abs=float(difference.max()),
            mean_abs=float(difference.mean()),
            max_rel=float(relative.max()) if relative.size else math.nan,
            mean_rel=float(relative.mean()) if relative.size else math.nan,
            cosine=float((a * b).sum() / norms) if norms else math.nan,
            worst_index=worst,
        )


@dataclass(frozen=True)
class TensorResult:
    """One tensor of one scenario: the verdict over all its steps, and each step's difference."""

    comparison: Comparison
    steps: tuple[StepDifference, ...]


@dataclass(frozen=True)
class BackendResult:
    """One candidate against the reference."""

    backend: str
    description: str
    tolerance: Tolerance
    control: str | None  # what widened the tolerance, where something did
    tensors: tuple[TensorResult, ...]
    audit: BackendAudit | None = None

    @property
    def passed(self) -> bool:
        return all(tensor.comparison.passed for tensor in self.tensors) and (self.audit is None or self.audit.passed)


@dataclass(frozen=True)
class CompareResult:
    """Every candidate, and what was left out and why."""

    unit: str
    dtype: str
    reference: str
    results: tuple[BackendResult, ...]
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results)


@dataclass(frozen=True)
class CompareRequest:
    """What to compare.

    Attributes:
        backends: names out of BACKENDS, the reference first; None takes every one that can run here, eager first.
        provider: onnxruntime's execution provider; None takes the CPU's.
        parser: the TensorRT whose parser the interpreter uses: "auto", "tensorrt" or "tensorrt-rtx".
        audit: True audits every backend that can be; None only those that fail; False none.
        seed: of the random inputs.
        cache_capacity: rows per sequence of the scenarios; None takes 32, or the engine's where TensorRT runs.
    """

    backends: tuple[str, ...] | None = None
    provider: str | None = None
    parser: str = "auto"
    audit: bool | None = None
    seed: int = 0
    cache_capacity: int | None = None


@dataclass(frozen=True)
class Control:
    """How far right answers lie apart with these weights: the eager definition in float32, and in another arithmetic.

    Both are the definition's own, whatever is compared: a wrong graph must not widen what it is judged by.
    """

    exact: Recording
    rounded: Recording
    description: str


@dataclass
class Comparer:
    """Runs the backends of one bundle one after the other, so that only one holds weights at a time."""

    bundle: Bundle
    request: CompareRequest
    say: Say
    weights: WeightSource
    limits: RunLimits
    scratch: Path

    def run(self, backends: tuple[str, ...], left_out: dict[str, str]) -> CompareResult:
        """Records every backend, holds the others against the first, and audits those that want it."""
        manifest = self.bundle.manifest
        recordings, descriptions = {}, {}
        for name in backends:
            self.say(f"run: {name}")
            with self.open(name) as stepper, timed(log, "%s: every scenario", name):
                recordings[name] = self.record(stepper)
                descriptions[name] = stepper.description
        reference = backends[0]
        control: Control | None = None
        results = []
        for name in backends[1:]:
            allowed = tolerance((reference, name), manifest.unit, manifest.dtype)
            comparisons = compare(recordings[reference], recordings[name], allowed)
            widened = None
            if not all(c.passed for c in comparisons):
                control = control or self._control(recordings.get("eager"))
                comparisons = judge_by_control(comparisons, control.exact, control.rounded)
                widened = control.description if any(c.allowed > allowed.allowed for c in comparisons) else None
            tensors = tuple(
                TensorResult(c, _differences(c, recordings[reference], recordings[name])) for c in comparisons
            )
            results.append(BackendResult(name, descriptions[name], allowed, widened, tensors))
        results = self._audited(results)
        return CompareResult(str(manifest.unit), manifest.dtype, descriptions[reference], tuple(results), left_out)

    def record(self, stepper: Stepper) -> Recording:
        return record(self.bundle.manifest.spec, stepper, self.request.seed, self.limits)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[Stepper]:
        """The stepper of a backend, closed at the end; a bf16 graph runs on onnxruntime's CPU provider as its float32 twin."""
        manifest = self.bundle.manifest
        if name == "eager":
            stepper: Stepper = self._eager("fp32")
        elif name == "interpreter":
            stepper = open_parts(self.bundle, lambda part: InterpreterStepper.from_bundle(part, self.request.parser))
        elif name == "tensorrt":
            stepper = open_engines(self.bundle, find_engines(self.bundle, self.limits.capacity), RuntimeCuda())
        elif manifest.dtype == "bf16" and self.request.provider in (None, "CPUExecutionProvider"):
            stepper = open_onnxruntime(self.bundle, self.scratch)
            stepper.description += ", through the graph's float32 twin"
        else:
            stepper = open_parts(
                self.bundle,
                lambda part: OnnxruntimeStepper.from_bundle(part, self.request.provider, integer_products=False),
            )
        try:
            yield stepper
        finally:
            stepper.close()

    def _eager(self, dtype: str) -> EagerStepper:
        return EagerStepper.from_weights(self.bundle.manifest.spec.in_dtype(dtype), self.weights)

    def _control(self, exact: Recording | None) -> Control:
        dtype = self.bundle.manifest.dtype
        if exact is None:
            exact = self.record(self._eager("fp32"))
        stepper = self._eager("fp64" if dtype == "fp32" else dtype)
        return Control(exact, self.record(stepper), stepper.description)

    # --- audit ---------------------------------------------------------------------------------------------------------------

    def _audited(self, results: list[BackendResult]) -> list[BackendResult]:
        """The results with an audit of those that want one."""
        wanted = [r.backend for r in results if self.request.audit or (self.request.audit is None and not r.passed)]
        wanted = [name for name in wanted if name in AUDITED]
        if not wanted:
            return results
        if not self.bundle.manifest.unit.has_cache:
            self.say("audit: a component is one operation, its outputs are the audit")
            return results
        if self.bundle.manifest.parts:
            self.say(
                "audit: not of a bundle in parts; export the layers in question with --unit stack --layers A:B and audit those"
            )
            return results
        self.say("audit: the eager definition in float64")
        reference = self.reference()
        audits = {}
        for name in wanted:
            self.say(f"audit: {name}")
            observer = self.observer(name, reference)
            audits[name] = audit(reference, observer)
            observer.close()
        return [replace(r, audit=audits.get(r.backend)) for r in results]

    def reference(self) -> Reference:
        return make_reference(self.bundle.manifest.spec, self.weights, self.request.seed)

    def observer(self, name: str, reference: Reference) -> Observer:
        if name == "interpreter":
            return StepperObserver(InterpreterStepper.from_bundle(self.bundle, self.request.parser), reference.names)
        contract = self.bundle.manifest.contract
        if self.bundle.manifest.dtype == "bf16":
            return GraphObserver(
                float32_twin(self.bundle.folder, self.scratch), contract.in_dtype("bf16", "fp32"), reference.names
            )
        return GraphObserver(self.bundle.graph_path, contract, reference.names)


def compare_bundle(
    bundle: Bundle, request: CompareRequest, say: Say = lambda line: None, weights: WeightSource | None = None
) -> CompareResult:
    """Compares the backends of a bundle.

    The eager definition computes in float32 over weights rounded to the bundle's dtype.

    Args:
        bundle: an opened bundle.
        request: what to run.
        say: called with a line about each stage.
        weights: where the bundle's weights came from. None makes random ones anew from the manifest's seed, and takes real
            ones from the bundle itself, which cannot show that they were written wrongly.

    Raises:
        InputError: an unknown backend, fewer than two, or one named twice.
        BackendError: a backend that was asked for cannot run here.
        CheckFailed: TensorRT's parser refuses the graph.
        BundleError: an export replaced the bundle meanwhile.
    """
    check_in_place(bundle)
    backends, left_out = _choose(bundle, request)
    weights = reference_weights(bundle, weights or _own_weights(bundle, say))
    limits = run_limits(bundle, request, backends)
    with scratch_folder() as scratch:
        result = Comparer(bundle, request, say, weights, limits, scratch).run(backends, left_out)
    bundle.check_unchanged()
    return result


def _own_weights(bundle: Bundle, say: Say) -> WeightSource | None:
    manifest = bundle.manifest
    bundle_weights(bundle)  # shows that they are of the manifest's geometry, before any are made by it
    if manifest.weights["source"] == "random":
        return RandomWeights(manifest.config, manifest.weights["seed"])
    say("weights: the bundle's own; give --checkpoint to hold them against their source")
    return None


def _choose(bundle: Bundle, request: CompareRequest) -> tuple[tuple[str, ...], dict[str, str]]:
    """The backends to run, the reference first, and why others are left out."""
    if request.backends is not None:
        wrong = [name for name in request.backends if name not in BACKENDS]
        if wrong:
            raise InputError(f"backends: got {wrong[0]!r}, expected names out of {', '.join(BACKENDS)}")
        if len(request.backends) < 2 or len(set(request.backends)) < len(request.backends):
            raise InputError(
                f"backends: got {','.join(request.backends)}, expected at least two different ones, the reference first"
            )
        return request.backends, {}
    left_out = {}
    try:
        check_weight_format(bundle.manifest)
        choose_backend(request.parser)
    except BackendError as error:
        if request.parser != "auto":
            raise
        left_out["interpreter"] = str(error)
    try:
        if not bundle.manifest.unit.has_cache:
            raise BackendError("backend tensorrt: a component's engine is for other tools")
        find_engines(bundle, None)
    except InputError as error:
        left_out["tensorrt"] = str(error)
    return tuple(name for name in BACKENDS if name not in left_out), left_out


def run_limits(bundle: Bundle, request: CompareRequest, backends: tuple[str, ...] = ()) -> RunLimits:
    """What the scenarios must keep to: the capacity asked for, and where TensorRT runs all that its engine's profiles take.

    Raises:
        InputError: a capacity that the graph, or the engine, does not have.
    """
    manifest, capacity = bundle.manifest, request.cache_capacity
    if capacity is not None:
        if not manifest.unit.has_cache:
            raise InputError(f"cache_capacity: got {capacity} for a {manifest.unit}, which has no cache")
        capacity = check_cache_capacity(capacity, manifest.config, manifest.dtype, manifest.max_positions)
    if "tensorrt" not in backends:
        return RunLimits(capacity)
    records = find_engines(bundle, capacity)
    sizes = [[profile["ranges"]["position_ids"]["max"] for profile in record.profiles] for record in records]
    most = [min(max(size[axis] for size in of_part) for of_part in sizes) for axis in (0, 1)]
    return RunLimits(records[0].cache_capacity, *most)


def _differences(comparison: Comparison, reference: Recording, candidate: Recording) -> tuple[StepDifference, ...]:
    key = (comparison.scenario, comparison.tensor)
    expected = [array for array in reference[key] if array is not None]
    arrays = candidate.get(key, [])
    arrays = [*arrays, *[None] * (len(expected) - len(arrays))]
    return tuple(StepDifference.measure(a, b) for a, b in zip(expected, arrays, strict=True))
