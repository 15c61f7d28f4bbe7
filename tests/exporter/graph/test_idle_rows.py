"""A row with nothing to read, or with no new token, neither fails a step nor changes the other rows."""

from __future__ import annotations

import dataclasses
import shutil

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from engines.interpreter.stepper import InterpreterStepper
from exporter.bundle.bundle import Bundle
from exporter.bundle.manifest import GRAPH_FILE
from exporter.export import ExportRequest, export_bundle
from exporter.model.weights import RandomWeights
from exporter.spec.dtypes import numpy_dtype
from exporter.spec.tensors import CAPACITY, PAST, SEQUENCE, TOTAL
from exporter.spec.unit import Unit
from exporter.spec.weight_formats import WEIGHT_FORMATS, WeightFormat
from exporter.steppers.eager_stepper import EagerStepper
from exporter.validation.bundle_validation import validate_bundle
from tests.conftest import MAX_POSITIONS, TINY
from tests.support.planted_faults import relisted

LENGTH, CACHE_ROWS = 3, 16  # tokens of the step, and cache rows

# row: (write index, new tokens, mask over the rows that were written before)
WORKING = [(0, 3, []), (5, 2, [1] * 5), (4, 1, [0, 1, 1, 1])]
IDLE = [
    (0, 0, []),  # a free row
    (5, 0, [1] * 5),  # a sequence that waits
    (13, 0, [1] * 13),  # one that is longer than what this step reads
    (7, 0, [0] * 7),  # nothing may be read
    (3, 0, [0, 1, 0]),
]


def step(rows: list, bundle: Bundle, seed: int = 0) -> dict[str, np.ndarray]:
    """Feeds of one step. Tokens and cache rows depend on the row alone; free cache rows are random too."""
    total = max(start + new for start, new, _ in WORKING)
    mask = np.zeros((len(rows), total), np.int64)
    positions = np.zeros((len(rows), LENGTH), np.int64)
    feeds: dict[str, list] = {spec.name: [] for spec in bundle.manifest.contract.inputs}
    for index, (start, new, past) in enumerate(rows):
        mask[index, : len(past)] = past[:total]
        mask[index, start : start + new] = 1
        positions[index, :new] = start + np.arange(new)
        rng = np.random.default_rng((seed, start, new))
        for spec in bundle.manifest.contract.inputs:
            shape = spec.shape({"batch_size": 1, SEQUENCE: LENGTH, TOTAL: total, CAPACITY: CACHE_ROWS, PAST: 0})[1:]
            if spec.name == "input_ids":
                feeds[spec.name].append(rng.integers(0, TINY.vocab_size, shape))
            elif spec.dtype != "int64":
                feeds[spec.name].append(rng.standard_normal(shape).astype(numpy_dtype(spec.dtype)))
    arrays = {name: np.stack(values) for name, values in feeds.items() if values}
    arrays |= {"position_ids": positions, "attention_mask": mask}
    if "write_indices" in feeds:
        arrays["write_indices"] = np.array([start for start, _, _ in rows])
    return arrays


def growing_step(rows: list, bundle: Bundle) -> dict[str, np.ndarray]:
    """Feeds of a graph whose cache grows: every row has the same past of 5 rows."""
    total, past_len = 8, 5
    feeds = step(rows, bundle)
    rng = np.random.default_rng(1)
    pasts = [spec for spec in bundle.manifest.contract.inputs if PAST in spec.axes]
    mask = np.zeros((len(rows), total), np.int64)
    for index, (_, new, past) in enumerate(rows):
        mask[index, : min(len(past), past_len)] = past[:past_len]
        mask[index, past_len : past_len + new] = 1
    one_row = {spec.name: rng.standard_normal(spec.shape({"batch_size": 1, PAST: past_len})) for spec in pasts}
    arrays = {spec.name: np.repeat(one_row[spec.name], len(rows), 0).astype(numpy_dtype(spec.dtype)) for spec in pasts}
    return feeds | arrays | {"attention_mask": mask}


def run_raw(bundle: Bundle, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Runs a bundle's graph in an onnxruntime session with nothing around it."""
    session = onnxruntime.InferenceSession(str(bundle.graph_path), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    inputs = {value.name: feeds[value.name] for value in session.get_inputs()}
    return dict(zip(names, session.run(names, inputs), strict=True))


def run_stepper(stepper, bundle: Bundle, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    contract = bundle.manifest.contract
    cache = stepper.new_cache(len(feeds["write_indices"]), CACHE_ROWS)
    for array, (past, _) in zip(cache.arrays, contract.cache_pairs, strict=True):
        array[:] = feeds[past].astype(array.dtype)
    outputs = stepper.run({spec.name: feeds[spec.name] for spec in contract.step_inputs}, cache)
    presents = {present: array for (_, present), array in zip(contract.cache_pairs, cache.arrays, strict=True)}
    return outputs | presents


def check_idle_rows(run, bundle: Bundle, make=step) -> None:
    """Runs working rows alone, and then among idle rows in two orders, and compares."""
    alone = run(bundle, make(WORKING, bundle))
    for before in (0, len(IDLE)):
        rows = [*IDLE[:before], *WORKING, *IDLE[before:]]
        together = run(bundle, make(rows, bundle))
        working = slice(before, before + len(WORKING))
        idle = [index for index in range(len(rows)) if rows[index] in IDLE]
        assert together.keys() == alone.keys()
        for name, output in together.items():
            assert np.isfinite(output.astype(np.float32)).all(), name
            tolerance = 2e-5 if output.dtype == np.float32 else 2e-2
            np.testing.assert_allclose(
                output[working].astype(np.float32), alone[name].astype(np.float32), atol=tolerance, rtol=tolerance
            )
        if "hidden_states_out" in together:
            assert not together["hidden_states_out"][idle].any()


UNITS = pytest.mark.parametrize(
    ("unit", "logits"), [("block", None), ("stack", None), ("model", "last"), ("model", "all")]
)


@UNITS
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_raw_session_runs_idle_rows(tiny_bundle, unit, dtype, logits):
    check_idle_rows(run_raw, tiny_bundle(unit, dtype, logits=logits))


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_a_raw_session_with_weights_in_integers_runs_idle_rows(tmp_path, name):
    unit, weights = Unit.parse("model", TINY), RandomWeights(TINY, 0)
    request = ExportRequest(TINY, unit, weights, "fp32", MAX_POSITIONS, weight_format=WeightFormat(name, 32))
    check_idle_rows(run_raw, export_bundle(request, tmp_path / "bundle", validated=False))


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_raw_session_of_the_last_part_runs_idle_rows(tiny_bundle, dtype):
    last = tiny_bundle("model", dtype, n_parts=2).parts[1]
    assert "logits" in {spec.name for spec in last.manifest.contract.outputs}
    check_idle_rows(run_raw, last)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_raw_session_of_a_growing_graph_runs_idle_rows(tiny_bundle, dtype):
    check_idle_rows(run_raw, tiny_bundle("model", dtype, logits="all", cache="growing"), growing_step)


@UNITS
def test_the_eager_definition_runs_idle_rows(tiny_bundle, unit, logits):
    bundle = tiny_bundle(unit, "fp32", logits=logits)
    stepper = EagerStepper.from_bundle(bundle)
    check_idle_rows(lambda bundle, feeds: run_stepper(stepper, bundle, feeds), bundle)


@UNITS
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_tensorrts_network_runs_idle_rows(tiny_bundle, unit, logits, dtype):
    bundle = tiny_bundle(unit, dtype, logits=logits)
    stepper = InterpreterStepper.from_bundle(bundle, "tensorrt-rtx")
    check_idle_rows(lambda bundle, feeds: run_stepper(stepper, bundle, feeds), bundle)


def test_an_idle_row_has_the_logits_of_its_first_token_on_every_backend(tiny_bundle):
    """Which logits they are is defined, so that backends can be compared on idle rows too."""
    last, everything = (tiny_bundle("model", "fp32", logits=logits) for logits in ("last", "all"))
    feeds = step([*WORKING, *IDLE], last)
    expected = run_raw(everything, feeds)["logits"]
    indices = [max(new, 1) - 1 for _, new, _ in (*WORKING, *IDLE)]
    expected = expected[np.arange(len(indices)), indices]
    for run in (run_raw, lambda b, f: run_stepper(EagerStepper.from_bundle(b), b, f)):
        np.testing.assert_allclose(run(last, feeds)["logits"], expected, atol=2e-5, rtol=2e-5)


# --- bundles from before ----------------------------------------------------------------------------------------------


def with_former_head(model: onnx.ModelProto) -> None:
    """Makes a graph find the last token as exports did before: from the mask and the write index."""
    nodes = {output: node for node in model.graph.node for output in node.output}
    gather = nodes["last_token"]
    unsqueeze = nodes[gather.input[1]]
    position = list(model.graph.node).index(unsqueeze)
    model.graph.initializer.extend(
        numpy_helper.from_array(np.array(value, np.int64), name)
        for name, value in (("former.zero", 0), ("former.one", 1), ("former.axis", [1]))
    )
    former = [
        helper.make_node("Shape", ["attention_mask"], ["former.shape"], start=1, end=2),
        helper.make_node("Squeeze", ["former.shape"], ["former.length"]),
        helper.make_node("Range", ["former.zero", "former.length", "former.one"], ["former.rows"]),
        helper.make_node("Mul", ["former.rows", "attention_mask"], ["former.product"]),
        helper.make_node("ReduceMax", ["former.product", "former.axis"], ["former.last"], keepdims=0),
        helper.make_node("Sub", ["former.last", "write_indices"], ["former.index"]),
    ]
    for offset, node in enumerate(former):
        node.name = node.output[0]
        model.graph.node.insert(position + offset, node)
    unsqueeze.input[0] = "former.index"
    while unread := _unread(model.graph):
        for node in unread:
            model.graph.node.remove(node)


def _unread(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    read = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    return [node for node in graph.node if not read & set(node.output)]


def test_a_bundle_with_the_former_head_opens_and_validates(tiny_bundle, tmp_path):
    folder = tmp_path / "bundle"
    shutil.copytree(tiny_bundle("model", "fp32").folder, folder)
    model = onnx.load(folder / GRAPH_FILE, load_external_data=False)
    with_former_head(model)
    onnx.save(model, folder / GRAPH_FILE)
    relisted(Bundle.read(folder))
    bundle = Bundle.open(folder, verify="full")
    assert validate_bundle(bundle, RandomWeights(TINY, 0))[0]["passed"]
    with pytest.raises(Exception, match=r"indices array|out of bounds|invalid index"):  # what such a graph does
        run_raw(bundle, step([*WORKING, *IDLE], bundle))
    assert dataclasses.asdict(bundle.manifest.spec) == dataclasses.asdict(tiny_bundle("model", "fp32").manifest.spec)
