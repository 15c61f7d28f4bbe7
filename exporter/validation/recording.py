"""Runs scenarios through a stepper and records outputs and cache rows."""

from __future__ import annotations

import logging

import numpy as np

from exporter.common.errors import InputError
from exporter.common.timing import timed
from exporter.spec.catalogue import ModelConfig
from exporter.spec.dtypes import numpy_dtype
from exporter.spec.feeds import real_tokens
from exporter.spec.graph_spec import GraphSpec
from exporter.spec.tensors import SEQUENCE, Contract
from exporter.steppers.protocol import Stepper
from exporter.validation.scenarios import COMPONENT_SIZES, RunLimits, Scenario, cache_scenarios, component_feeds

log = logging.getLogger(__name__)

CACHE_ROWS = "cache rows"
# (scenario, tensor) → the tensor at each step. Cache rows are all rows that a later step may read.
Recording = dict[tuple[str, str], list[np.ndarray | None]]


def record_run(
    spec: GraphSpec,
    stepper: Stepper,
    seed: int = 0,
    limits: RunLimits = RunLimits(),  # noqa: B008 - frozen, so it can be shared
) -> Recording:
    """Runs every scenario of the unit and records the tensors that comparisons read.

    Args:
        spec: what the stepper runs, in the dtype of the random inputs. Every stepper of one comparison gets the
            same one.
        stepper: runs the steps.
        seed: seed for the random inputs.
        limits: limits that every stepper of the comparison keeps.

    Raises:
        InputError: the seed is negative.
    """
    if seed < 0:
        raise InputError(f"seed: got {seed}, expected 0 or more")
    rng = np.random.default_rng(seed)
    inputs = spec.contract
    recording: Recording = {}
    if spec.unit.kind == "component":
        for sizes in COMPONENT_SIZES:
            name = "sizes " + " ".join(f"{axis}={size}" for axis, size in sizes.items())
            outputs = stepper.run(component_feeds(spec, sizes, rng))
            recording |= {
                (name, output.name): [_checked(outputs.get(output.name), output.dtype, inputs, stepper)]
                for output in inputs.outputs
            }
        return recording
    for scenario in cache_scenarios(spec.max_positions, limits):
        with timed(log, "%s: %s, %d steps", stepper.description, scenario.name, len(scenario.steps)):
            recording |= _run_scenario(spec.config, scenario, stepper, inputs, rng)
    return recording


def _run_scenario(
    config: ModelConfig, scenario: Scenario, stepper: Stepper, inputs: Contract, rng: np.random.Generator
) -> Recording:
    cache = stepper.new_cache(len(scenario.steps[0]), scenario.capacity)
    steps: dict[str, list] = {spec.name: [] for spec in inputs.step_outputs}
    for feeds in scenario.feeds(inputs, config, rng):
        outputs = stepper.run(feeds, cache)
        for spec in inputs.step_outputs:
            output = _checked(outputs.get(spec.name), spec.dtype, inputs, stepper)
            if spec.name == "logits" and SEQUENCE in spec.axes and output is not None:
                output = output[real_tokens(feeds)]  # logits at pads may be anything; hidden states at pads must be 0
            steps[spec.name].append(output)
    mask = feeds["attention_mask"]
    rows = [array[:, real == 1] for row, real in enumerate(mask) for array in cache.read(row, mask.shape[1])]
    return {(scenario.name, name): outputs for name, outputs in steps.items()} | {(scenario.name, CACHE_ROWS): rows}


def _checked(output: np.ndarray | None, dtype: str, inputs: Contract, stepper: Stepper) -> np.ndarray | None:
    """Returns the output, or None where it has another dtype than the contract that the stepper keeps."""
    if output is not None and stepper.contract == inputs and output.dtype != numpy_dtype(dtype):
        return None
    return output
