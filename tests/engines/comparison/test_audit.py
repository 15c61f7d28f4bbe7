"""The audit finds every planted fault and names its layer and operation; without a fault it finds nothing."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest

from engines.comparison.audit import BackendAudit, audit
from engines.comparison.observers import GraphObserver, StepperObserver
from engines.comparison.reference import Reference, audit_feeds, audit_scenario, make_reference
from engines.interpreter.stepper import InterpreterStepper
from engines.library.backend import choose_backend
from exporter.bundle.bundle import Bundle
from exporter.graph.weight_reader import GraphWeights
from exporter.model.weights import RoundedWeights
from tests.support import planted_faults
from tests.support.planted_faults import doctored, scale_weight

pytestmark = pytest.mark.slow

LAYER = 1


def reference_of(bundle: Bundle) -> Reference:
    """Returns the reference over the bundle's own weights."""
    m = bundle.manifest
    weights = RoundedWeights(GraphWeights(bundle.folder, m.config, m.unit.first_layer, m.weights), m.dtype)
    return make_reference(m.spec, weights, seed=0)


def audited(bundle: Bundle, reference: Reference, backend: str) -> BackendAudit:
    if backend == "onnxruntime":
        return audit(reference, GraphObserver(bundle.graph_path, bundle.manifest.contract, reference.names))
    stepper = InterpreterStepper(bundle.graph_path, bundle.manifest.contract, choose_backend("tensorrt-rtx"))
    return audit(reference, StepperObserver(stepper, reference.names))


@pytest.fixture(scope="module")
def references(tiny_bundle):
    """Returns the references of the sound bundles, each made once."""
    return functools.cache(lambda unit, dtype, layers=None: reference_of(tiny_bundle(unit, dtype, layers)))


@pytest.mark.parametrize("backend", ["onnxruntime", "interpreter"])
@pytest.mark.parametrize(
    ("unit", "dtype"),
    [("block", "fp32"), ("block", "fp16"), ("stack", "fp32"), ("stack", "fp16"), ("model", "fp32"), ("model", "fp16")],
)
def test_a_sound_graph_passes(tiny_bundle, references, unit, dtype, backend):
    layers = "2" if unit == "stack" else None
    result = audited(tiny_bundle(unit, dtype, layers), references(unit, dtype, layers), backend)
    assert result.passed, result.explain()
    assert result.explain() == []
    expected = 2 if dtype == "fp32" and unit == "model" else 0
    assert len(result.missing) <= expected, result.missing


def test_a_sound_bf16_graph_passes_through_the_interpreter(tiny_bundle, references):
    result = audited(tiny_bundle("stack", "bf16", "2"), references("stack", "bf16", "2"), "interpreter")
    assert result.passed, result.explain()
    assert not any(operation.overflow or operation.flushed for operation in result.operations)


FAULTS = [
    (planted_faults.upper_left_mask, "attention.heads", 1),
    (planted_faults.half_split_rope, "attention.rope_q", 0),
    (planted_faults.tiled_kv_heads, "attention.scores", 0),
    (planted_faults.swapped_gate_and_up, "mlp.gate_proj", 0),
    (planted_faults.shifted_cache_row, "attention.keys", 0),
]


@pytest.mark.parametrize("backend", ["onnxruntime", "interpreter"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize(("fault", "operation", "step"), FAULTS, ids=[fault.__name__ for fault, _, _ in FAULTS])
def test_a_fault_in_the_graph_is_found_where_it_is_and_when_it_begins(
    tiny_bundle, references, tmp_path, fault, operation, step, dtype, backend
):
    broken = doctored(tiny_bundle("stack", dtype, "2"), tmp_path / "broken", lambda model: fault(model, LAYER))
    result = audited(broken, references("stack", dtype, "2"), backend)
    first = result.first_failure
    assert (first.name, first.step) == (f"blocks.{LAYER}.{operation}", step)
    failed = {o.name for o in result.operations if not o.passed}
    assert all(name.startswith(f"blocks.{LAYER}.") for name in failed), failed
    assert first.name in result.explain()[0]


@pytest.mark.parametrize("backend", ["onnxruntime", "interpreter"])
@pytest.mark.parametrize(("dtype", "layer"), [("fp32", 0), ("fp32", 1), ("fp16", 0)])
def test_eps_outside_of_the_root_is_found(tiny_bundle, references, tmp_path, dtype, layer, backend):
    fault = planted_faults.spelled_out_norm(eps_inside=False, weight_before_cast=False)
    broken = doctored(tiny_bundle("stack", dtype, "2"), tmp_path / "broken", lambda model: fault(model, layer))
    first = audited(broken, references("stack", dtype, "2"), backend).first_failure
    assert first.name == f"blocks.{layer}.attention_norm"


def test_the_norms_weight_before_the_cast_is_found_by_its_bits(tiny_bundle, references, tmp_path):
    bundle, reference = tiny_bundle("stack", "fp16", "2"), references("stack", "fp16", "2")
    spelled = doctored(bundle, tmp_path / "spelled", lambda m: planted_faults.spelled_out_norm(True, False)(m, LAYER))
    assert audited(spelled, reference, "interpreter").passed
    broken = doctored(bundle, tmp_path / "broken", lambda m: planted_faults.spelled_out_norm(True, True)(m, LAYER))
    first = audited(broken, reference, "interpreter").first_failure
    assert first.name == f"blocks.{LAYER}.attention_norm"
    # it is more precise than the definition, and its bits differ
    assert first.local <= first.budget.error and first.differing > 0.1


@pytest.mark.parametrize("backend", ["onnxruntime", "interpreter"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_weight_off_by_one_percent_is_found(tiny_bundle, references, tmp_path, dtype, backend):
    broken = doctored(tiny_bundle("stack", dtype, "2"), tmp_path / "broken")
    scale_weight(broken, f"blocks.{LAYER}.mlp.up_proj.weight", 1.01)
    result = audited(broken, references("stack", dtype, "2"), backend)
    assert {o.name for o in result.operations if not o.passed} == {f"blocks.{LAYER}.mlp.up_proj"}
    assert result.contributors()[0].name == f"blocks.{LAYER}.mlp.up_proj"


def test_a_softmax_in_half_is_found(tiny_bundle, tmp_path):
    sharp = doctored(tiny_bundle("stack", "fp16", "2"), tmp_path / "sharp")
    scale_weight(sharp, f"blocks.{LAYER}.attention.q_proj.weight", 6.0)  # scores of some 25, as trained models have
    reference = reference_of(sharp)
    assert audited(sharp, reference, "interpreter").passed
    broken = doctored(sharp, tmp_path / "broken", lambda model: planted_faults.softmax_in_half(model, LAYER))
    assert audited(broken, reference, "interpreter").first_failure.name == f"blocks.{LAYER}.attention.heads"


@pytest.mark.parametrize("backend", ["onnxruntime", "interpreter"])
def test_an_overflow_is_named_with_its_size_and_what_to_do(tiny_bundle, tmp_path, backend):
    broken = doctored(tiny_bundle("stack", "fp16", "2"), tmp_path / "broken")
    scale_weight(broken, f"blocks.{LAYER}.mlp.down_proj.weight", 1e5)
    result = audited(broken, reference_of(broken), backend)
    first = result.first_failure
    assert first.name == f"blocks.{LAYER}.mlp.down_proj"
    assert first.overflow and first.largest > 65504 and first.headroom < 1
    line = result.explain()[0]
    assert first.name in line and "overflow" in line and "65,504" in line and "export in bf16" in line
    assert math.isinf(max(o.carried for o in result.operations if o.name == first.name))


def test_a_swiglu_product_beyond_half_precision_is_named_with_its_layer(tiny_bundle, tmp_path):
    """silu(gate) · up is above 65,504: the first infinity is in the product that down_proj reads, or in down_proj."""
    broken = doctored(tiny_bundle("stack", "fp16", "2"), tmp_path / "broken")
    for name in ("gate_proj", "up_proj"):
        scale_weight(broken, f"blocks.{LAYER}.mlp.{name}.weight", 1e4)
    first = audited(broken, reference_of(broken), "interpreter").first_failure
    assert first.name.startswith(f"blocks.{LAYER}.mlp.") and first.overflow and first.largest > 65504


@pytest.mark.parametrize("backend", ["onnxruntime", "interpreter"])
def test_an_underflow_is_named(tiny_bundle, tmp_path, backend):
    broken = doctored(tiny_bundle("stack", "fp16", "2"), tmp_path / "broken")
    for name in ("gate_proj", "up_proj"):
        scale_weight(broken, f"blocks.{LAYER}.mlp.{name}.weight", 1e-3)
    result = audited(broken, reference_of(broken), backend)
    assert any(f"blocks.{LAYER}.mlp.product: underflow" in line for line in result.explain())


@pytest.mark.parametrize("backend", ["onnxruntime", "interpreter"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_shares_add_up_to_the_whole_error(tiny_bundle, references, dtype, backend):
    result = audited(tiny_bundle("stack", dtype, "2"), references("stack", dtype, "2"), backend)
    first = [o.share for o in result.operations if o.step == 0 and not math.isnan(o.share)]
    assert sum(first) == pytest.approx(1, abs=0.02)
    last = [o.share for o in result.operations if o.step == 2 and not math.isnan(o.share)]
    assert sum(last) + result.share_of_earlier_steps == pytest.approx(1, abs=0.02)


def test_the_audits_steps_are_ragged_and_meet_small_and_large_hidden_states(tiny_bundle):
    manifest = tiny_bundle("block", "fp16").manifest
    scenario = audit_scenario(64)
    assert [len(set(step)) > 1 for step in scenario.steps] == [True, False, True]
    x = audit_feeds(manifest.contract, manifest.config, scenario, 0)[0]["hidden_states"].astype(np.float64)
    rms = np.sqrt((x**2).mean(-1))
    assert rms.min() < 2e-3 and rms.max() > 200
    for positions in (1, 4, 7, 8, 9, 15, 31):
        steps = audit_scenario(positions).steps
        assert max(sum(step[row] for step in steps) for row in range(len(steps[0]))) <= min(32, positions)
        assert min(min(step) for step in steps) >= 1
