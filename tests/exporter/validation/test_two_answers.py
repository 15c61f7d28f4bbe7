"""Both answers of a validation: a wrong graph fails whatever the dtype costs, and a cost fails only where it must."""

from __future__ import annotations

import dataclasses

import pytest

from exporter.common.errors import CheckFailed, InputError
from exporter.export import ExportRequest, export_bundle
from exporter.model.weights import RandomWeights
from exporter.spec.unit import Unit
from exporter.spec.weight_formats import WeightFormat
from exporter.validation.bundle_validation import check_meaning, validate_bundle
from exporter.validation.cost import CostLimits
from tests.conftest import MAX_POSITIONS, TINY
from tests.support.planted_faults import doctored, scale_weight
from tests.support.strayed_weights import OUTPUT_FAULTS, SIX, STRAYED, ScaledWeights


@pytest.fixture(scope="module")
def strayed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("strayed") / "bundle"
    request = ExportRequest(SIX, Unit.parse("stack", SIX), STRAYED, "fp16", MAX_POSITIONS)
    return export_bundle(request, folder, validated=False)


def test_a_right_graph_of_ill_conditioned_weights_passes_by_its_operations(strayed):
    section, _ = validate_bundle(strayed, STRAYED)
    meaning, cost = section["meaning"], section["cost"]
    assert section["passed"] and meaning["judged_by"] == "operations"
    assert meaning["max_error"] > meaning["max_allowed"], "the weights are meant to be ill-conditioned in float32"
    assert cost["max_error"] > 0.5 and cost["warnings"] and not cost["failures"]
    assert all(check["error"] <= check["allowed"] <= 1e-4 for check in meaning["operations"])


@pytest.mark.parametrize("fault", OUTPUT_FAULTS)
def test_a_wrong_output_fails_however_far_the_dtype_strays(strayed, tmp_path, fault):
    wrong = doctored(strayed, tmp_path / "wrong", OUTPUT_FAULTS[fault])
    section, _ = validate_bundle(wrong, STRAYED)
    assert not section["passed"] and not section["meaning"]["passed"]
    assert any("hidden_states_out" in line for line in section["meaning"]["failures"])


def test_a_wrong_weight_inside_of_an_ill_conditioned_stack_is_named(strayed, tmp_path):
    wrong = doctored(strayed, tmp_path / "wrong")
    scale_weight(wrong, "blocks.3.mlp.up_proj.weight", 1.01)
    meaning = check_meaning(wrong, STRAYED)
    assert not meaning.passed
    assert {check.name for check in meaning.operations if not check.passed} == {"blocks.3.mlp.up_proj"}


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_a_value_beyond_half_fails_an_fp16_export_alone(tmp_path, dtype):
    large = ScaledWeights(TINY, {"gate_proj": 150.0, "up_proj": 150.0, "down_proj": 1e-4})
    request = ExportRequest(TINY, Unit.parse("block", TINY), large, dtype, MAX_POSITIONS)
    if dtype == "fp16":
        with pytest.raises(CheckFailed, match=r"blocks\.0\.mlp\.product reaches .* beyond the largest value of fp16"):
            export_bundle(request, tmp_path / "bundle")
        assert list(tmp_path.iterdir()) == []
    else:
        cost = export_bundle(request, tmp_path / "bundle").read_report()["validation"]["cost"]
        assert cost["largest_value"]["value"] > 65504 and cost["headroom"] is None


def test_a_value_beyond_half_fails_a_component_too(tmp_path):
    large = ScaledWeights(TINY, {"gate_proj": 150.0, "up_proj": 150.0, "down_proj": 1e-4})
    request = ExportRequest(TINY, Unit.parse("component:swiglu_mlp", TINY), large, "fp16", MAX_POSITIONS)
    with pytest.raises(CheckFailed, match=r"mlp\.product reaches"):
        export_bundle(request, tmp_path / "bundle")


def test_limits_on_agreement_fail_what_they_name_and_nothing_else(tiny_bundle):
    bundle = tiny_bundle("model", "bf16")
    free, _ = validate_bundle(bundle, RandomWeights(TINY, 0))
    agreement = free["cost"]["agreement"]
    assert free["passed"] and 0 < agreement["largest_kl"] < 1e-2 and agreement["top1"] > 0.9
    kept = CostLimits(agreement["largest_kl"], agreement["top1"])
    assert validate_bundle(bundle, RandomWeights(TINY, 0), limits=kept)[0]["passed"]
    for limits, words in ((CostLimits(max_kl=1e-9), "KL divergence"), (CostLimits(min_agreement=1.0), "tokens agree")):
        section, _ = validate_bundle(bundle, RandomWeights(TINY, 0), limits=limits)
        failed = limits.max_kl is not None or agreement["top1"] < 1
        assert section["passed"] is not failed and section["meaning"]["passed"]
        assert [words in line for line in section["cost"]["failures"]] == [True] * failed


@pytest.mark.parametrize(
    ("unit", "by_layer", "limits", "words"),
    [
        ("block", None, CostLimits(max_kl=1.0), "expected a whole model"),
        ("model", True, CostLimits(min_agreement=0.5), "by layer"),
        ("model", None, CostLimits(min_agreement=1.5), "0 to 1"),
        ("model", None, CostLimits(max_kl=float("nan")), "nats"),
    ],
)
def test_a_limit_that_cannot_be_applied_is_refused(tiny_bundle, unit, by_layer, limits, words):
    with pytest.raises(InputError, match=words):
        validate_bundle(tiny_bundle(unit), by_layer=by_layer, limits=limits)


def test_a_growing_cache_and_parts_are_judged_by_operation_too(tiny_bundle, monkeypatch):
    import exporter.validation.bundle_validation as validation

    tight = dataclasses.replace(validation.tolerance(("eager", "onnxruntime"), Unit("model"), "fp32"), allowed=0.0)
    monkeypatch.setattr(validation, "tolerance", lambda *arguments: tight)  # no output is equal bit by bit
    for bundle in (tiny_bundle("model", logits="all", cache="growing"), tiny_bundle("model", "fp16", n_parts=3)):
        meaning = check_meaning(bundle, RandomWeights(TINY, 0))
        assert meaning.operations and meaning.passed, meaning.failures


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_a_format_in_integers_costs_what_it_rounds_away(tmp_path, dtype):
    weights = RandomWeights(TINY, 0)
    unit = Unit.parse("model", TINY)
    request = ExportRequest(TINY, unit, weights, dtype, MAX_POSITIONS, weight_format=WeightFormat("int4", 32))
    section = export_bundle(request, tmp_path / "bundle").read_report()["validation"]
    assert section["meaning"]["max_error"] < 1e-4
    assert "before they became integers" in section["cost"]["agreement_with"]
    assert section["cost"]["agreement"]["largest_kl"] > 1e-6, "4 bits are not free"
