"""Steps of a comparison for Polygraphy: runners over our steppers, and files that its command line reads.

Polygraphy has no state between iterations. Each step therefore has the cache as tensors: past tensors are inputs, and
present tensors are outputs. The past of every step is the reference's cache before that step.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from exporter.bundle.bundle import Bundle
from exporter.bundle.origin import Origin
from exporter.common.errors import BackendError, InputError
from exporter.placing.files import write_atomically
from exporter.spec.dtypes import numpy_dtype
from exporter.spec.tensors import Contract, TensorSpec
from exporter.steppers.eager_stepper import EagerStepper
from exporter.steppers.protocol import Cache, Stepper
from exporter.validation.reference_weights import reference_weights
from exporter.validation.scenarios import RunLimits, cache_scenarios

try:
    from polygraphy.backend.base import BaseRunner
    from polygraphy.common import TensorMetadata
    from polygraphy.comparator import RunResults
    from polygraphy.comparator.struct import IterationResult
    from polygraphy.exception import PolygraphyException
    from polygraphy.json import to_json
    from polygraphy.logger import G_LOGGER
except ImportError as error:
    raise BackendError(
        f"polygraphy: it is not installed or does not load ({error}); run pip install 'blockline[polygraphy]'"
    ) from None

Step = tuple[OrderedDict[str, np.ndarray], OrderedDict[str, np.ndarray]]  # inputs and outputs by name, cache included


class StepperRunner(BaseRunner):
    """A Polygraphy runner over any stepper.

    Polygraphy's own TrtRunner binds every input and output to a separate buffer. TensorRT's cache update needs past and
    present at one address, where the TensorRT stepper binds them.
    """

    _stepper: Stepper  # while it is active

    def __init__(self, open_stepper: Callable[[], Stepper], name: str | None = None) -> None:
        """Takes a function that opens the stepper at activation, so that only a runner in use holds weights."""
        super().__init__(name=name, prefix="blockline")
        self._open = open_stepper

    def activate_impl(self) -> None:
        self._stepper = self._open()

    def deactivate_impl(self) -> None:
        self._stepper.close()
        del self._stepper

    def get_input_metadata_impl(self) -> TensorMetadata:
        metadata = TensorMetadata()
        for spec in self._stepper.contract.inputs:
            metadata.add(
                spec.name, numpy_dtype(spec.dtype), [axis if isinstance(axis, int) else -1 for axis in spec.axes]
            )
        return metadata

    def infer_impl(self, feed_dict: dict[str, np.ndarray]) -> OrderedDict[str, np.ndarray]:
        """Runs one step; inputs include the past tensors, and outputs include the present tensors."""
        contract = self._stepper.contract
        if not contract.cache_pairs:
            return self._timed(feed_dict)
        pasts = [feed_dict[past] for past, _ in contract.cache_pairs]
        n_rows, capacity = pasts[0].shape[0], pasts[0].shape[2]
        cache = self._stepper.new_cache(n_rows, capacity)
        for row in range(n_rows):
            cache.write(row, [past[row] for past in pasts])
        outputs = self._timed(feed_dict, cache)
        outputs.update(_present(contract, cache, capacity))
        cache.free()
        return outputs

    def _timed(self, feed_dict: dict[str, np.ndarray], cache: Cache | None = None) -> OrderedDict[str, np.ndarray]:
        started = time.perf_counter()
        outputs = OrderedDict(self._stepper.run(feed_dict, cache))
        self.inference_time = time.perf_counter() - started
        return outputs


def _present(contract: Contract, cache: Cache, capacity: int) -> dict[str, np.ndarray]:
    rows = [cache.read(row, capacity) for row in range(cache.n_rows)]
    return {present: np.stack([row[i] for row in rows]) for i, (_, present) in enumerate(contract.cache_pairs)}


def steps(bundle: Bundle, seed: int, limits: RunLimits) -> Iterator[Step]:
    """Yields inputs and outputs of every step of every scenario, in the graph's dtypes.

    The eager definition computes the outputs in float32.

    Raises:
        InputError: the bundle is a component, which has no steps, or bf16, which numpy has no dtype for.
        BundleError: a graph or its weights are not those in the manifest, or changed before the last step.
    """
    manifest = bundle.manifest
    if not manifest.unit.has_cache:
        raise InputError(
            f"polygraphy: got a {manifest.unit}, expected a unit with a cache; "
            "polygraphy run makes a component's inputs itself"
        )
    if manifest.dtype == "bf16":
        raise InputError(
            "polygraphy: got a bf16 bundle, expected fp16 or fp32; its files hold numpy arrays, which have no bf16; "
            "export in fp16 or fp32"
        )
    origin = Origin.of_bundle(bundle)
    weights = reference_weights(bundle)
    reference = EagerStepper.from_weights(manifest.spec.in_dtype("fp32"), weights)
    rng = np.random.default_rng(seed)
    for scenario in cache_scenarios(manifest.max_positions, limits):
        cache = reference.new_cache(len(scenario.steps[0]), scenario.capacity)
        for feeds in scenario.feeds(manifest.contract, manifest.config, rng):
            pasts = {
                past: array.copy() for (past, _), array in zip(manifest.contract.cache_pairs, cache.arrays, strict=True)
            }
            outputs = reference.run(feeds, cache) | _present(manifest.contract, cache, scenario.capacity)
            yield _as(manifest.contract.inputs, feeds | pasts), _as(manifest.contract.outputs, outputs)
    origin.check_unchanged()


def _as(specs: Sequence[TensorSpec], tensors: dict[str, np.ndarray]) -> OrderedDict[str, np.ndarray]:
    return OrderedDict((spec.name, np.ascontiguousarray(tensors[spec.name], numpy_dtype(spec.dtype))) for spec in specs)


def save_inputs(bundle: Bundle, path: Path, seed: int, limits: RunLimits) -> None:
    """Writes a file for `polygraphy run --load-inputs`, with one feed for each step.

    Raises:
        InputError: the bundle is a component or bf16.
    """
    feeds = [inputs for inputs, _ in steps(bundle, seed, limits)]
    write_atomically(path, to_json(feeds))


def save_outputs(bundle: Bundle, path: Path, seed: int, limits: RunLimits) -> None:
    """Writes a file for `compare_outputs`, in Polygraphy's form, with the reference's outputs of the same steps.

    Raises:
        InputError: the bundle is a component or bf16.
    """
    name = "blockline-eager"
    results = RunResults()
    results.append(
        (name, [IterationResult(outputs=outputs, runner_name=name) for _, outputs in steps(bundle, seed, limits)])
    )
    write_atomically(path, to_json(results))


def read_outputs(path: Path) -> dict[str, list[dict[str, np.ndarray]]]:
    """Returns the outputs in a file that `save_outputs` or `polygraphy run --save-outputs` has written.

    Returns:
        runner → output name → array, for each step.

    Raises:
        InputError: the file is missing, or is not one of outputs.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file; give one that --save-outputs has written")
    problem = "it is not a file of outputs that Polygraphy has saved"
    try:
        with G_LOGGER.verbosity(G_LOGGER.CRITICAL):  # it prints on stdout, where --format json has its document
            loaded = RunResults.load(str(path))
        runs = [
            (name, [{key: np.asarray(array) for key, array in step.items()} for step in steps])
            for name, steps in loaded
        ]
    except (PolygraphyException, ValueError, TypeError, AttributeError, KeyError, OSError) as error:
        raise InputError(f"{path}: {problem} ({str(error)[:200]})") from None
    found = dict(runs)
    if not runs or len(found) != len(runs):
        raise InputError(
            f"{path}: got outputs of runners {[name for name, _ in runs]}, expected one or more, each once"
        )
    return found


def save_data_loader(bundle: Bundle, path: Path, seed: int, limits: RunLimits) -> None:
    """Writes a script for `polygraphy run --data-loader-script`, which makes the same inputs again."""
    script = f'''"""Inputs of every step of every scenario of one bundle, for `polygraphy run --data-loader-script`."""

from engines.comparison.polygraphy_files import steps
from exporter.bundle.bundle import Bundle
from exporter.validation.scenarios import RunLimits


def load_data():
    bundle = Bundle.open({str(bundle.folder.absolute())!r})
    return (inputs for inputs, _ in steps(bundle, seed={seed}, limits={limits!r}))
'''
    write_atomically(path, script)
