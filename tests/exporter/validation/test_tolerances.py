"""The tolerances: each has a measured error, is above that error, and is at most as large as promised."""

from __future__ import annotations

import json

import pytest

from exporter.spec.unit import Unit
from exporter.validation.tolerances import (
    AGREEMENT,
    OPERATIONS,
    OUTPUTS,
    measured_operation_errors,
    measured_output_errors,
    operation_budget,
    operation_kind,
    tolerance,
)

ROWS = [
    (stage, dtype, kind)
    for stage, dtypes in OUTPUTS.items()
    for dtype, (allowed, _) in dtypes.items()
    for kind in allowed
]


@pytest.mark.parametrize(("stage", "dtype", "kind"), ROWS)
def test_every_tolerance_has_a_measured_error_that_is_below_it(stage, dtype, kind):
    row = tolerance(stage, Unit(kind), dtype)
    assert row.measured and row.reason
    worst = max(row.measured.values())
    assert 0 < worst <= row.allowed <= 100 * worst


def test_no_tolerance_is_larger_than_promised():
    for (first, second), dtypes in OUTPUTS.items():
        for kind, allowed in dtypes["fp32"][0].items():
            assert allowed <= 1e-4, (first, second, kind)
    assert max(OUTPUTS["eager", "onnxruntime"]["fp16"][0].values()) <= 1e-2


def test_every_scenario_that_runs_was_measured():
    from exporter.validation.scenarios import cache_scenarios

    names = {scenario.name for scenario in cache_scenarios(64)}
    for units in measured_output_errors().values():
        for kind in ("block", "stack", "model"):
            assert all(set(by_scenario) == names for by_scenario in units[kind].values())


@pytest.mark.parametrize("backend", ["onnxruntime", "interpreter"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_every_operation_was_measured_within_its_budget_and_not_far_below(backend, dtype):
    measured = measured_operation_errors()[backend][dtype]
    names = {
        operation_kind(name): name
        for name in ("keys", "norm", "q_proj", "rope_q", "scores", "heads", "silu", "product", "residual")
    }
    assert set(measured) == set(names) == set(OPERATIONS)
    for kind, errors in measured.items():
        budget = operation_budget(names[kind], dtype, backend)
        assert errors["error"] <= budget.error
        assert errors["differing"] <= budget.differing
        if kind == "exact":
            assert budget.error == 0


def test_the_order_of_backends_and_the_kind_of_tensorrt_do_not_matter():
    unit = Unit("block")
    assert tolerance(("interpreter", "eager"), unit, "fp16") == tolerance(("eager", "tensorrt"), unit, "fp16")
    other = tolerance(("onnxruntime", "tensorrt"), unit, "fp16")
    assert tolerance(("interpreter", "onnxruntime"), unit, "fp16") == other


def test_the_agreement_floors_agree_with_the_record():
    from benchmarks.own.token_agreement import RECORD

    rows = json.loads(RECORD.read_text())["rows"]
    assert {(row["dtype"], row["backend"]) for row in rows} >= {
        ("fp32", "onnxruntime"),
        ("fp16", "onnxruntime"),
        ("bf16", "interpreter"),
    }
    for dtype, floor in AGREEMENT.items():
        of_dtype = [row for row in rows if row["dtype"] == dtype]
        worst = (min(row["top1"] for row in of_dtype), max(row["largest_kl"] for row in of_dtype))
        assert floor.measured == pytest.approx(worst, rel=0.1)
        assert floor.top1 <= worst[0] and worst[1] <= floor.largest_kl
