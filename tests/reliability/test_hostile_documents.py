"""Untrusted JSON files of a bundle: manifest, report, tokenizer and engine records.

Each test keeps a fault fixed that the campaign (benchmarks/campaigns/hostile_input) once found.
"""

from __future__ import annotations

import json

import pytest

import runtime.commands.main
from engines.building.publishing import read_records
from exporter.bundle.bundle import Bundle
from exporter.common.documents import parse_document
from exporter.common.errors import BundleError
from tests.support import hostile_bundles
from tests.support.doubles.cuda_double import engine_record
from tests.support.hostile_bundles import change_manifest, refusal, seal

originals, bundle, text_bundle = (
    hostile_bundles.originals,
    hostile_bundles.bundle,
    hostile_bundles.text_bundle,
)  # fixtures


@pytest.mark.parametrize(
    "text",
    ['{"a": NaN}', '{"a": 1, "a": 2}', '"\\ud800"', "[" * 100_000, '{"a": -Infinity}', "9" * 5000, "", "\ufeff{}"],
)
def test_json_that_parsers_disagree_about_is_refused(text):
    with pytest.raises(ValueError):
        parse_document(text)


def test_a_manifest_of_absurd_size_is_not_read(bundle):
    with open(bundle / "manifest.json", "ab") as file:
        file.truncate(1 << 40)
    assert "bytes, expected at most" in refusal(bundle)


def test_a_manifest_that_asks_for_a_billion_layers_is_refused_at_once(bundle):
    change_manifest(
        bundle, lambda data: (data["config"].update(n_layers=2**31 - 1), data["unit"].update(n_layers=10**9))
    )
    assert "n_layers" in refusal(bundle)


@pytest.mark.parametrize(
    "weights", [{"source": "random"}, {"source": "random", "seed": -1}, {"source": "random", "seed": "0"}]
)
def test_random_weights_need_a_seed(bundle, weights):
    change_manifest(bundle, lambda data: data.update(weights=weights))
    assert "seed" in refusal(bundle)


def test_a_number_that_no_float_holds_is_refused_as_a_config_value(bundle):
    change_manifest(bundle, lambda data: data["config"].update(norm_eps=10**30))
    assert "norm_eps" in refusal(bundle)


@pytest.mark.parametrize("report", [[], {"validation": []}, {"validation": "PASSED"}])
def test_a_report_of_another_form_is_refused(text_bundle, report, capsys):
    (text_bundle / "report.json").write_text(json.dumps(report))
    assert runtime.commands.main.main(["report", str(text_bundle), "--prompt", "he"]) == 2
    assert "report.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "validation",
    [{"passed": 1}, {"max_error": "x", "max_allowed": 1}, {"max_error": None, "max_allowed": 0.1, "passed": False}],
    ids=str,
)
def test_a_report_shows_missing_results_as_unknown(text_bundle, validation, capsys):
    (text_bundle / "report.json").write_text(json.dumps({"validation": validation}))
    assert runtime.commands.main.main(["report", str(text_bundle), "--prompt", "he", "--max-new-tokens", "1"]) == 0
    assert ("not finite" if "passed" in validation and len(validation) > 1 else "unknown") in capsys.readouterr().err


def test_a_damaged_tokenizer_is_refused(text_bundle, capsys):
    (text_bundle / "tokenizer.json").write_text('{"version": "1.0"}')
    seal(text_bundle)
    assert runtime.commands.main.main(["generate", str(text_bundle), "--prompt", "he"]) == 2
    assert "it is no tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"profiles": [{"name": "p", "ranges": {"x": {"min": [1], "opt": [1, 2], "max": "a"}}}]},
        {"lineage": {"a": 1}},
        {"size_bytes": -1},
        {"options": {}},
    ],
    ids=["ranges", "lineage", "size", "options"],
)
def test_engine_records_of_another_form_are_refused(bundle, change):
    record = engine_record(Bundle.open(bundle), 32).__dict__
    (bundle / "engines.json").write_text(json.dumps({"format_version": 1, "engines": [record]}))
    assert len(read_records(bundle)) == 1
    (bundle / "engines.json").write_text(json.dumps({"format_version": 1, "engines": [record | change]}))
    with pytest.raises(BundleError, match="damaged"):
        read_records(bundle)
