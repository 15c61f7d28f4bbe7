"""Validation finds planted faults: in a candidate's outputs, in its cache, and in a bundle's weights."""

from __future__ import annotations

import numpy as np
import pytest

from engines.comparison.control import CONTROL_FACTOR, judge_by_control
from exporter.common.errors import CheckFailed
from exporter.export import ExportRequest, export_bundle
from exporter.model.weights import RandomWeights
from exporter.spec.graph_spec import GraphSpec
from exporter.spec.unit import Unit
from exporter.steppers.eager_stepper import EagerStepper
from exporter.steppers.protocol import Stepper
from exporter.validation.bundle_validation import validate_bundle
from exporter.validation.comparison import Meaning, compare, compare_tensor
from exporter.validation.recording import CACHE_ROWS, record_run
from exporter.validation.scenarios import cache_scenarios
from exporter.validation.tolerances import tolerance
from tests.conftest import MAX_POSITIONS, TINY

UNIT = Unit.parse("block", TINY)
SPEC = GraphSpec(TINY, UNIT, "fp32", MAX_POSITIONS)
VALIDATED_COMPONENTS = ("prepare_qkv", "repeat_kv", "attention", "swiglu_mlp")


def eager() -> EagerStepper:
    return EagerStepper.from_weights(SPEC, RandomWeights(TINY, 0))


class Faulty(Stepper):
    """The eager stepper with its outputs or cache damaged."""

    backend, description = "faulty", "a stepper with a planted fault"

    def __init__(self, damage):
        self._inner, self._damage = eager(), damage
        self.contract = self._inner.contract

    def new_cache(self, n_rows, capacity):
        return self._inner.new_cache(n_rows, capacity)

    def run(self, feeds, cache=None, first_row=0):
        return self._damage(self._inner.run(feeds, cache, first_row), cache)


def scaled(outputs, cache):
    return {name: x * np.float32(1.1) for name, x in outputs.items()}


def one_nan(outputs, cache):
    outputs["hidden_states_out"].flat[0] = np.nan
    return outputs


def one_wrong_row(outputs, cache):
    outputs["hidden_states_out"][0, 0] = 0
    return outputs


def renamed(outputs, cache):
    return {"hidden_states": outputs["hidden_states_out"]}


FLOAT32 = tolerance(("eager", "onnxruntime"), UNIT, "fp32")


def other_dtype(outputs, cache):
    return {name: x.astype(np.float64) for name, x in outputs.items()}


def other_shape(outputs, cache):
    return {name: x[:, :, :-1] for name, x in outputs.items()}


def shifted_cache_row(outputs, cache):
    cache.arrays[0][:, :, 1:] = cache.arrays[0][:, :, :-1].copy()
    return outputs


def recorded(stepper: Stepper):
    return record_run(SPEC, stepper)


@pytest.mark.parametrize(
    "damage", [scaled, one_nan, one_wrong_row, renamed, other_dtype, other_shape, shifted_cache_row]
)
def test_a_planted_fault_fails_with_and_without_a_control(damage):
    reference = recorded(eager())
    comparisons = compare(reference, recorded(Faulty(damage)), FLOAT32)
    assert not all(c.passed for c in comparisons)
    control = EagerStepper.from_weights(SPEC.in_dtype("fp64"), RandomWeights(TINY, 0))
    control_recording = record_run(SPEC, control)
    assert not all(c.passed for c in judge_by_control(comparisons, reference, control_recording))


def test_no_fault_passes_and_the_report_states_every_shape():
    comparisons = compare(recorded(eager()), recorded(Faulty(lambda outputs, cache: outputs)), FLOAT32)
    section = Meaning(comparisons, FLOAT32, "eager", "faultless", "the graph itself").to_dict()
    assert section["passed"] and section["max_error"] == 0.0
    shapes = {c["scenario"]: c["shapes"] for c in section["comparisons"] if c["tensor"] == "hidden_states_out"}
    assert shapes["decode"] == [[2, 5, 64], [2, 1, 64], [2, 1, 64], [2, 1, 64]]
    assert shapes["empty cache"] == [[1, 1, 64]]


def test_one_wrong_row_of_4096_fails():
    reference = np.random.default_rng(0).standard_normal((4096, 8))
    wrong = reference.copy()
    wrong[1234] += 0.01
    assert not compare_tensor("s", "t", [reference], [wrong], 1e-3).passed
    assert compare_tensor("s", "t", [reference], [reference + 1e-5], 1e-3).passed


def test_a_control_widens_the_tolerance_by_its_own_error_and_no_more():
    reference = {("s", "t"): [np.ones(4)], ("s", "u"): [np.ones(4)]}
    control = {("s", "t"): [np.full(4, 1.01)], ("s", "u"): [np.full(4, np.nan)]}
    for error, passed in ((0.01 * CONTROL_FACTOR - 1e-6, True), (0.01 * CONTROL_FACTOR + 1e-6, False)):
        candidate = {key: [array + error for array in arrays] for key, arrays in reference.items()}
        judged = judge_by_control(compare(reference, candidate, FLOAT32), reference, control)
        assert [c.passed for c in judged] == [passed, False]  # a control that is not finite widens nothing


def test_large_cache_values_are_judged_by_their_own_size():
    rows = np.ones(10_000)
    rows[0] = 50.0
    half = rows * (1 + 2**-11)
    assert compare_tensor("s", CACHE_ROWS, [rows], [half], 1e-3).passed
    assert not compare_tensor("s", "hidden_states_out", [rows], [half], 1e-3).passed


def test_the_scenarios_cover_what_they_name():
    by_name = {s.name: s for s in cache_scenarios(8192)}
    assert set(by_name) == {
        *("empty cache", "prefill", "decode", "chunked prefill", "ragged batch"),
        *("left-padded mask", "shifted positions", "near capacity"),
    }
    near = by_name["near capacity"]
    assert sum(step[0] for step in near.steps) == near.capacity
    assert len({len(s.steps[0]) for s in by_name.values()}) > 1


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_weights_written_wrongly_are_found_and_no_bundle_is_left(tmp_path, monkeypatch, dtype):
    import exporter.graph.weight_writer

    make = exporter.graph.weight_writer._converted

    def damaged(stored, read, buffers):
        def wrong():
            return {name: run * 1.1 for name, run in read().items()}

        return make(stored, wrong if stored.name.endswith("up_proj.weight") else read, buffers)

    monkeypatch.setattr(exporter.graph.weight_writer, "_converted", damaged)
    request = ExportRequest(TINY, UNIT, RandomWeights(TINY, 0), dtype, MAX_POSITIONS)
    with pytest.raises(CheckFailed, match="nothing was written"):
        export_bundle(request, tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    "unit",
    ["block", "stack", "model", *(f"component:{name}" for name in VALIDATED_COMPONENTS)],
)
def test_every_unit_agrees_with_eager_over_several_seeds(tiny_bundle, unit, dtype):
    bundle = tiny_bundle(unit, dtype)
    for seed in range(2):
        section, _ = validate_bundle(bundle, RandomWeights(TINY, 0), seed)
        assert section["passed"], section
        assert section["meaning"]["through"] == ("the graph itself" if dtype == "fp32" else "float32 twin")
        assert section["meaning"]["max_error"] <= 1e-5 and section["cost"]["max_error"] <= 0.3
