"""Compares backends: runs the same scenarios through several and compares each with the first, by output and step."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from engines.comparison.audit import audit
from engines.comparison.control import Control, control_dtype, judge
from engines.comparison.network_meaning import NetworkMeaning, TwinNetwork
from engines.comparison.observers import GraphObserver, Observer, StepperObserver
from engines.comparison.reference import Reference, make_reference
from engines.comparison.results import BackendResult, CompareResult, TensorResult
from engines.interpreter.stepper import InterpreterStepper
from engines.library.backend import choose_backend
from engines.library.cuda import RuntimeCuda
from engines.network.network_checks import check_weight_format
from engines.network.profiles import largest_size
from engines.running.tensorrt_parts import find_engines, open_engines
from exporter.bundle.bundle import Bundle, check_in_place
from exporter.bundle.origin import Origin
from exporter.common.errors import BackendError, InputError
from exporter.common.plain_numbers import is_whole, make_plain
from exporter.common.timing import timed
from exporter.graph.weight_reader import bundle_weights
from exporter.model.weights import RandomWeights, WeightSource
from exporter.placing.temporaries import scratch_folder
from exporter.spec.limits import check_cache_capacity
from exporter.spec.tensors import BATCH, SEQUENCE
from exporter.steppers.eager_stepper import EagerStepper
from exporter.steppers.onnxruntime_stepper import OnnxruntimeStepper
from exporter.steppers.parts_stepper import open_parts
from exporter.steppers.protocol import Stepper
from exporter.validation.bundle_validation import WholeValidation
from exporter.validation.comparison import Meaning
from exporter.validation.cpu_graph import cpu_contract, cpu_graph_path, open_on_cpu, runs_as_twin, with_twin_named
from exporter.validation.recording import Recording, record_run
from exporter.validation.reference_weights import reference_weights
from exporter.validation.scenarios import RunLimits
from exporter.validation.tolerances import tolerance

log = logging.getLogger(__name__)

BACKENDS = ("eager", "onnxruntime", "interpreter", "tensorrt")
AUDITED = ("onnxruntime", "interpreter")
Say = Callable[[str], None]


@dataclass(frozen=True)
class CompareRequest:
    """What to compare.

    Attributes:
        backends: names out of BACKENDS, the reference first. None takes every one that can run here, eager first.
        provider: onnxruntime's execution provider. None takes the CPU's.
        parser: the TensorRT whose parser the interpreter uses: "auto", "tensorrt" or "tensorrt-rtx".
        audit: True audits every backend that can be audited, False none. None audits those that fail, and the
            interpreter where a control allowed more than the tolerance.
        seed: seed for the random inputs.
        cache_capacity: cache rows per sequence. None takes 32, or the engine's where TensorRT runs.
        allow_host_code: whether an engine may run code of its own on the CPU, as version-compatible ones do.
    """

    backends: tuple[str, ...] | None = None
    provider: str | None = None
    parser: str = "auto"
    audit: bool | None = None
    seed: int = 0
    cache_capacity: int | None = None
    allow_host_code: bool = False

    def __post_init__(self) -> None:
        make_plain(self, "audit", "seed", "cache_capacity")
        if not is_whole(self.seed) or self.seed < 0:
            raise InputError(f"seed: got {self.seed!r}, expected a whole number of at least 0")
        if self.backends is not None:
            given = self.backends.split(",") if isinstance(self.backends, str) else self.backends
            object.__setattr__(self, "backends", tuple(given))


@dataclass
class Comparer:
    """Runs the backends of one bundle one after the other, so that only one holds weights at a time.

    Attributes:
        bundle: an opened bundle whose cache is updated in place.
        request: what to compare.
        say: called with a line about each stage.
        weights: weights of the eager definition, rounded to the bundle's dtype.
        limits: limits that the scenarios keep.
        scratch: folder for float32 twins. It must exist as long as the comparer is used.
    """

    bundle: Bundle
    request: CompareRequest
    say: Say
    weights: WeightSource
    limits: RunLimits
    scratch: Path

    def run(self, backends: tuple[str, ...], left_out: dict[str, str]) -> CompareResult:
        """Records a run of every backend, compares each with the first, and audits those that the request names.

        Args:
            backends: names of the backends, the reference first.
            left_out: the reason for each backend that is not run, by its name.
        """
        manifest = self.bundle.manifest
        recordings, descriptions = {}, {}
        for name in backends:
            self.say(f"run: {name}")
            with self.open(name) as stepper, timed(log, "%s: every scenario", name):
                recordings[name] = self.record_run(stepper)
                descriptions[name] = stepper.description
            if self._runs_twin(name):
                descriptions[name] = with_twin_named(descriptions[name], manifest.dtype)
        run_control = cache(lambda: self._control(recordings.get("eager")))
        reference, expected = backends[0], recordings[backends[0]]
        results = []
        for name in backends[1:]:
            allowed = tolerance((reference, name), manifest.unit, manifest.dtype)
            comparisons, control = judge(expected, recordings[name], allowed, run_control)
            tensors = tuple(TensorResult.measure(c, expected, recordings[name]) for c in comparisons)
            results.append(BackendResult(name, descriptions[name], allowed, control, tensors))
        results = self._with_meaning(results, recordings.get("eager"))
        results = self._audited(results)
        return CompareResult(str(manifest.unit), manifest.dtype, descriptions[reference], tuple(results), left_out)

    def record_run(self, stepper: Stepper) -> Recording:
        """Runs every scenario through a stepper and records it."""
        return record_run(self.bundle.manifest.spec, stepper, self.request.seed, self.limits)

    def _runs_twin(self, name: str) -> bool:
        """Whether a backend runs the graph's float32 twin; onnxruntime on the CPU does for some dtypes."""
        on_cpu = name == "onnxruntime" and self.request.provider in (None, "CPUExecutionProvider")
        return on_cpu and runs_as_twin(self.bundle.manifest.dtype)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[Stepper]:
        """Opens the stepper of a backend; it is closed at the end."""
        bundle, request = self.bundle, self.request
        if name == "eager":
            stepper: Stepper = self._eager("fp32")
        elif name == "interpreter":
            stepper = open_parts(bundle, lambda part: InterpreterStepper.from_bundle(part, request.parser))
        elif name == "tensorrt":
            records = find_engines(bundle, self.limits.capacity, "full", request.allow_host_code)
            stepper = open_engines(bundle, records, RuntimeCuda())
        elif self._runs_twin(name):
            stepper = open_on_cpu(bundle, self.scratch)
        else:
            stepper = open_parts(
                bundle, lambda part: OnnxruntimeStepper.from_bundle(part, request.provider, integer_products=False)
            )
        with contextlib.closing(stepper):
            yield stepper

    def _eager(self, dtype: str) -> EagerStepper:
        return EagerStepper.from_weights(self.bundle.manifest.spec.in_dtype(dtype), self.weights)

    def _control(self, exact: Recording | None) -> Control:
        """Returns the control for every candidate; `exact` is the eager definition's recording, or None."""
        if exact is None:
            exact = self.record_run(self._eager("fp32"))
        stepper = self._eager(control_dtype(self.bundle.manifest.dtype))
        return Control(exact, self.record_run(stepper), stepper.description)

    def _with_meaning(self, results: list[BackendResult], exact: Recording | None) -> list[BackendResult]:
        """Returns the results, with the answer of the float32 twin in the interpreter's and in onnxruntime's.

        A control has no limit, so it may excuse what a dtype costs, and never what a graph means. onnxruntime's outputs
        need the answer where a control excused them; the fixed tolerance is small enough without.
        """
        answered = []
        for result in results:
            if result.backend == "interpreter":
                result = replace(result, meaning=self._network_meaning(exact))
            elif result.backend == "onnxruntime" and result.control:
                result = replace(result, meaning=self._graph_meaning())
            answered.append(result)
        return answered

    def _network_meaning(self, exact: Recording | None) -> NetworkMeaning:
        self.say("run: interpreter, on the float32 network")
        if exact is None:
            exact = self.record_run(self._eager("fp32"))
        network = TwinNetwork(self.bundle, self.weights, self.request.seed, self.request.parser, self.scratch)
        return network.meaning(exact, self.record_run)

    def _graph_meaning(self) -> Meaning:
        self.say("run: onnxruntime, on the graph's float32 twin")
        validation = WholeValidation(self.bundle, self.weights, None, self.request.seed, say=self.say)
        return validation.meaning(validation.reference(), self.scratch)

    # --- audit --------------------------------------------------------------------------------------------------------

    def _audited(self, results: list[BackendResult]) -> list[BackendResult]:
        """Returns the results, with an audit of each backend that the request names."""
        if self.request.audit is None:
            # a control has no limit, so it excuses no network
            wanted = [r.backend for r in results if not r.passed or (r.control and r.backend == "interpreter")]
        else:
            wanted = [r.backend for r in results if self.request.audit]
        wanted = [name for name in wanted if name in AUDITED]
        if not wanted:
            return results
        if not self.bundle.manifest.unit.has_cache:
            self.say("audit: left out; a component is one operation, and its outputs were compared already")
            return results
        if self.bundle.manifest.parts:
            self.say(
                "audit: left out; it cannot read a bundle in parts; "
                "export the layers in question as a stack in one graph and audit that"
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
        """Runs the audit's reference."""
        return make_reference(self.bundle.manifest.spec, self.weights, self.request.seed)

    def observer(self, name: str, reference: Reference) -> Observer:
        """Opens the observer of a backend for the audit.

        Args:
            name: one of AUDITED.
            reference: the reference, whose named values it shows.
        """
        if name == "interpreter":
            return StepperObserver(InterpreterStepper.from_bundle(self.bundle, self.request.parser), reference.names)
        manifest = self.bundle.manifest
        contract = cpu_contract(manifest.contract, manifest.dtype)
        return GraphObserver(cpu_graph_path(self.bundle, self.scratch), contract, reference.names)


def compare_bundle(
    bundle: Bundle, request: CompareRequest, say: Say = lambda line: None, weights: WeightSource | None = None
) -> CompareResult:
    """Compares the backends of a bundle.

    The eager definition computes in float32 over weights rounded to the bundle's dtype.

    Args:
        bundle: an opened bundle.
        request: what to compare.
        say: called with a line about each stage.
        weights: source of the bundle's weights. None makes random weights again from the manifest's seed. It takes real
            weights from the bundle itself; an error that was made when they were written then stays hidden.

    Raises:
        InputError: an unknown backend, fewer than two, or one named twice.
        BackendError: a backend that was asked for cannot run here.
        CheckFailed: TensorRT's parser refuses the graph.
        BundleError: a graph, its weights or its engine is not the file in the manifest or in its record, or changed in
            the meantime.
    """
    check_in_place(bundle)
    backends, left_out = _choose(bundle, request)
    limits = run_limits(bundle, request, backends)
    origin = Origin.of_bundle(bundle)
    weights = reference_weights(bundle, _own_weights(bundle, say) if weights is None else weights)
    with scratch_folder() as scratch:
        result = Comparer(bundle, request, say, weights, limits, scratch).run(backends, left_out)
    origin.check_unchanged()
    return replace(result, files=origin.checksums)


def _own_weights(bundle: Bundle, say: Say) -> WeightSource | None:
    manifest = bundle.manifest
    bundle_weights(
        bundle
    )  # checks their shapes against the manifest's geometry before weights of that geometry are made
    if manifest.weights["source"] == "random":
        return RandomWeights(manifest.config, manifest.weights["seed"])
    say("weights: the bundle's own; give their checkpoint to compare them with their source")
    return None


# --- the choice of backends -------------------------------------------------------------------------------------------


def _choose(bundle: Bundle, request: CompareRequest) -> tuple[tuple[str, ...], dict[str, str]]:
    """Returns the names of the backends to run, the reference first, and the reason for each that is left out."""
    if request.backends is not None:
        _check_names(request.backends)
        for name in request.backends:
            check_can_run(bundle, name, request.parser)
        return request.backends, {}
    left_out = {}
    for name in BACKENDS:
        try:
            check_can_run(bundle, name, request.parser)
        except InputError as error:
            if name == "interpreter" and request.parser != "auto":
                raise
            left_out[name] = str(error)
    return tuple(name for name in BACKENDS if name not in left_out), left_out


def _check_names(backends: tuple[str, ...]) -> None:
    unknown = [name for name in backends if name not in BACKENDS]
    if unknown:
        raise InputError(f"backends: got {unknown[0]!r}, expected names out of {', '.join(BACKENDS)}")
    if len(backends) < 2 or len(set(backends)) < len(backends):
        got = ",".join(backends) or "none"
        raise InputError(f"backends: got {got}, expected at least two different ones, the reference first")


def check_can_run(bundle: Bundle, name: str, parser: str) -> None:
    """Checks that a backend can run a bundle here.

    Args:
        bundle: an opened bundle.
        name: one of BACKENDS.
        parser: the TensorRT whose parser the interpreter uses: "auto", "tensorrt" or "tensorrt-rtx".

    Raises:
        BackendError: it cannot; the message has the reason.
        BundleError: the engines of a bundle's parts differ in their cache capacity.
    """
    if name == "interpreter":
        check_weight_format(bundle.manifest)
        choose_backend(parser)
    if name == "tensorrt":
        if not bundle.manifest.unit.has_cache:
            raise BackendError(
                f"backend tensorrt: got a {bundle.manifest.unit}, expected a unit with a cache; "
                "the engine of a component is for other tools"
            )
        find_engines(bundle, None)


def run_limits(bundle: Bundle, request: CompareRequest, backends: tuple[str, ...] = ()) -> RunLimits:
    """Returns the limits of the scenarios: the capacity asked for, and where TensorRT runs, its engine's sizes.

    Raises:
        InputError: the graph or the engine does not have the capacity asked for.
        BundleError: an engine's record lacks the shape of an input.
    """
    manifest, capacity = bundle.manifest, request.cache_capacity
    if capacity is not None:
        if not manifest.unit.has_cache:
            raise InputError(f"cache_capacity: got {capacity} for a {manifest.unit}, which has no cache")
        capacity = check_cache_capacity(capacity, manifest.config, manifest.dtype, manifest.max_positions)
    if "tensorrt" not in backends:
        return RunLimits(capacity)
    records = find_engines(bundle, capacity, allow_host_code=request.allow_host_code)
    engines = [
        (part.manifest.contract.inputs, record.largest_shapes())
        for part, record in zip(bundle.parts, records, strict=True)
    ]
    max_batch, max_seq_len = (min(largest_size(axis, *engine) for engine in engines) for axis in (BATCH, SEQUENCE))
    return RunLimits(records[0].cache_capacity, max_batch, max_seq_len)
