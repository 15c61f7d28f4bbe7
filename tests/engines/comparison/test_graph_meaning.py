"""compare finds a wrong graph in onnxruntime also where a control would allow its outputs."""

from __future__ import annotations

import pytest

from engines.comparison.compare import CompareRequest, compare_bundle
from engines.comparison.report import print_result, to_dict
from exporter.export import ExportRequest, export_bundle
from exporter.spec.unit import Unit
from tests.conftest import MAX_POSITIONS
from tests.support.planted_faults import doctored
from tests.support.strayed_weights import OUTPUT_FAULTS, SIX, STRAYED

REQUEST = CompareRequest(("eager", "onnxruntime"), audit=False)


@pytest.fixture(scope="module")
def strayed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("strayed") / "bundle"
    request = ExportRequest(SIX, Unit.parse("stack", SIX), STRAYED, "fp16", MAX_POSITIONS)
    return export_bundle(request, folder, validated=False)


def test_a_right_graph_that_a_control_excuses_is_asked_what_it_means(strayed, capsys):
    result = compare_bundle(strayed, REQUEST, weights=STRAYED)
    (graph,) = result.results
    assert result.passed and graph.control and graph.meaning.passed
    assert to_dict(result)["results"][0]["meaning"]["judged_by"] == "operations"
    print_result(result)
    assert "does the graph mean what the definition means? yes" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("fault", OUTPUT_FAULTS)
def test_a_wrong_output_fails_however_far_the_control_strays(strayed, tmp_path, fault):
    wrong = doctored(strayed, tmp_path / "wrong", OUTPUT_FAULTS[fault])
    (graph,) = compare_bundle(wrong, REQUEST, weights=STRAYED).results
    assert not graph.passed and not graph.meaning.passed
    assert any("hidden_states_out" in line for line in graph.meaning.failures)
