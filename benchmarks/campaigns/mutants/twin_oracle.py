"""The oracle: whether a mutant computes something else, judged by float32 twins in scenarios of its own.

The twin of a graph has the same nodes and stored weights, widened to float32. It is made here and not by the code under
trial, and its scenarios reach further than those of a validation: every row of a tiny model's tables, other batches and
lengths. What the oracle calls another answer must be found by a check that knows nothing of the oracle.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from benchmarks.campaigns.mutants.drafts import Draft
from exporter.bundle.manifest import DATA_FILE, GRAPH_FILE, Manifest
from exporter.spec.dtypes import numpy_dtype
from exporter.spec.feeds import real_tokens
from exporter.spec.tensors import BATCH, SEQUENCE, TOTAL
from exporter.steppers.growing_stepper import GrowingStepper
from exporter.steppers.onnxruntime_stepper import OnnxruntimeStepper
from exporter.steppers.parts_stepper import PartsStepper
from exporter.steppers.protocol import Stepper
from exporter.validation.scenarios import Scenario, component_feeds

LARGEST_EQUAL_CHANGE = 1e-3  # of rms; a mutant that changes no output by more is taken as equivalent
NARROW = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
LONGEST = 64  # rows of the longest scenario
SEED = 11
Outputs = dict[str, list[np.ndarray]]  # scenario and tensor → its values at each step


def scenarios(max_positions: int, ragged: bool) -> list[Scenario]:
    """Returns scenarios of one bundle: long and short rows, pads, and positions to the end of the tables.

    Args:
        max_positions: number of positions of the graph.
        ragged: whether rows of one step may differ in length.
    """
    most = min(LONGEST, max_positions)
    chosen = [
        Scenario("token by token", 40, ((1, 1, 1, 1),) * 4),
        Scenario("to the end of the cache", most, ((most - 2,), (1,), (1,))),
        Scenario("left pads", 48, ((8, 8), (2, 2), (1, 1)), left_pad=(3, 0)),
        Scenario("second half of the tables", most, ((most - 1,), (1,)), shift=2 * max_positions - most),
        Scenario("three steps", 33, ((9, 9, 9), (3, 3, 3), (4, 4, 4))),
    ]
    rows = Scenario("rows of all lengths", 48, ((3, 7, 1, 5), (2, 1, 4, 1), (1, 1, 1, 1)))
    return [*chosen, rows] if ragged else chosen


COMPONENT_SIZES = (
    {BATCH: 2, SEQUENCE: 5, TOTAL: 11},
    {BATCH: 1, SEQUENCE: 1, TOTAL: 6},
    {BATCH: 4, SEQUENCE: 7, TOTAL: 7},
)


# --- twins ------------------------------------------------------------------------------------------------------------


def write_twin(draft: Draft, folder: Path) -> Path:
    """Writes the float32 twin of a graph and returns its path."""
    model = onnx.ModelProto()
    model.CopyFrom(draft.model)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / DATA_FILE, "wb") as file:
        for tensor in model.graph.initializer:
            if not tensor.external_data:
                if tensor.data_type in NARROW:
                    wide = numpy_helper.to_array(tensor).astype(np.float32)
                    tensor.CopyFrom(numpy_helper.from_array(wide, tensor.name))
                continue
            raw = draft.raw(tensor.name)
            if tensor.data_type in NARROW:
                raw = draft.array(tensor.name).astype(np.float32)
                tensor.data_type = TensorProto.FLOAT
            file.write(bytes(-file.tell() % 64))
            where = {"location": DATA_FILE, "offset": file.tell(), "length": raw.nbytes}
            file.write(raw.tobytes())
            del tensor.external_data[:]
            for key, value in where.items():
                tensor.external_data.add(key=key, value=str(value))
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i in NARROW:
                attribute.i = TensorProto.FLOAT
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type in NARROW:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    del model.graph.value_info[:]  # they would still have the narrow dtypes
    onnx.save(model, folder / GRAPH_FILE)
    return folder / GRAPH_FILE


def open_twins(manifest: Manifest, drafts: Sequence[Draft], folder: Path) -> Stepper[Any]:
    """Writes the twins of a bundle's graphs and opens them in onnxruntime.

    Args:
        manifest: the bundle's manifest.
        drafts: the graph, or the graphs of its parts.
        folder: folder for the twins.
    """
    paths = [write_twin(draft, folder / str(number)) for number, draft in enumerate(drafts)]
    spec = manifest.spec.in_dtype("fp32")
    if manifest.unit.cache == "growing":
        return GrowingStepper(str(paths[0]), spec.in_place().contract)
    contracts = [draft.manifest.contract.in_dtype(manifest.dtype, "fp32") for draft in drafts]
    steppers = [
        OnnxruntimeStepper(str(path), contract, "fp32") for path, contract in zip(paths, contracts, strict=True)
    ]
    return steppers[0] if len(steppers) == 1 else PartsStepper(spec.contract, steppers)


# --- outputs ----------------------------------------------------------------------------------------------------------


def run_scenarios(manifest: Manifest, stepper: Stepper[Any]) -> Outputs:
    """Runs every scenario of a bundle, with float32 inputs, and returns all outputs and cache rows."""
    spec = manifest.spec.in_place().in_dtype("fp32")
    rng, recorded = np.random.default_rng(SEED), {}
    if manifest.unit.kind == "component":
        for number, sizes in enumerate(COMPONENT_SIZES):
            outputs = stepper.run(component_feeds(spec, sizes, rng))
            recorded |= {f"sizes {number}: {name}": [array] for name, array in outputs.items()}
        return recorded
    for scenario in scenarios(manifest.max_positions, manifest.unit.cache == "in_place"):
        cache = stepper.new_cache(len(scenario.steps[0]), scenario.capacity)
        for feeds in scenario.feeds(spec.contract, spec.config, rng):
            for name, array in stepper.run(_typed(feeds), cache).items():
                kept = array[real_tokens(feeds)] if name == "logits" and array.ndim == 3 else array
                recorded.setdefault(f"{scenario.name}: {name}", []).append(kept)
        mask = feeds["attention_mask"]
        rows = [array[:, real == 1] for row, real in enumerate(mask) for array in cache.read(row, mask.shape[1])]
        recorded[f"{scenario.name}: cache"] = rows
        cache.free()
    return recorded


def _typed(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: x.astype(numpy_dtype("fp32")) if x.dtype.kind == "f" else x for name, x in feeds.items()}


def change(good: Outputs, other: Outputs) -> tuple[float, str]:
    """Returns the largest change of an output relative to its rms, and where it is.

    It is infinite where a shape differs or a value is not finite. The change of a cache row is relative to its own size
    where that is larger.
    """
    largest, where = 0.0, ""
    for name, arrays in good.items():
        others = other.get(name, [])
        if [array.shape for array in arrays] != [array.shape for array in others]:
            return float("inf"), name
        a, b = (np.concatenate([np.ravel(x).astype(np.float64) for x in xs]) for xs in (arrays, others))
        if not np.isfinite(b).all():
            return float("inf"), name
        rms = float(np.sqrt(np.mean(a**2))) or 1.0
        size = np.maximum(rms, np.abs(a)) if name.endswith(": cache") else rms
        found = float((np.abs(a - b) / size).max()) if a.size else 0.0
        if found > largest:
            largest, where = found, name
    return largest, where


def twin_outputs(manifest: Manifest, drafts: Sequence[Draft]) -> Outputs:
    """Runs the twins of a bundle's graphs in every scenario."""
    with tempfile.TemporaryDirectory() as folder:
        stepper = open_twins(manifest, drafts, Path(folder))
        try:
            return run_scenarios(manifest, stepper)
        finally:
            stepper.close()
