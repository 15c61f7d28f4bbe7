"""compare finds a wrong network also where its dtype's tolerance, or a control, would allow its outputs."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.campaigns.mutants.good_units import GOOD_UNITS
from benchmarks.campaigns.mutants.network_faults import network_faults
from benchmarks.campaigns.mutants.trials_of_networks import PARSER, REQUEST, planted
from engines.comparison.compare import compare_bundle
from engines.comparison.report import to_dict
from engines.library.backend import choose_backend
from engines.network.parsed import parse_network
from engines.network.source import load_source
from exporter.graph.fixed_capacity import fix_capacity

ILL = "stack fp16 of 6 ill-conditioned layers"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Returns a function that exports a good unit once, and returns it with its bundle."""
    made = {}

    def export(name):
        if name not in made:
            made[name] = GOOD_UNITS[name].export(tmp_path_factory.mktemp("good") / "bundle")
        return GOOD_UNITS[name], made[name]

    return export


def compared(unit, bundle):
    return compare_bundle(bundle, REQUEST, weights=unit.weights)


def mutations(bundle, kind, word):
    """The mutations of one kind whose site has a word."""
    model = load_source(bundle.parts[-1].graph_path)
    fix_capacity(model, 32)
    parsed = parse_network(choose_backend(PARSER), model, bundle.parts[-1].graph_path)
    return [m for m in network_faults(parsed) if m.kind == f"network: {kind}" and word in m.site]


@pytest.mark.parametrize("name", [ILL, "stack bf16 of 6 ill-conditioned layers", "stack bf16 in parts"])
def test_a_right_network_passes_with_weights_that_amplify_rounding_and_in_parts(exported, name):
    result = compared(*exported(name))
    (interpreter,) = result.results
    assert result.passed and (interpreter.meaning.audit is None) == ("parts" in name)
    assert to_dict(result)["results"][0]["meaning"]["passed"]


@pytest.mark.parametrize(
    ("name", "kind", "word"),
    [
        (ILL, "RoPE pairs halves", "blocks.2"),
        (ILL, "a matrix transposed", "blocks.3.mlp.down_proj"),
        (ILL, "a constant × 1.01", "blocks.4.mlp.gate_up_proj"),
        (ILL, "inputs swapped", "blocks.1.attention.rope_q"),
        ("block bf16", "another operation", "blocks.0.mlp.residual"),
        ("stack bf16 in parts", "RoPE pairs halves", "rope_k"),
    ],
)
def test_a_wrong_network_fails_and_the_sentence_says_so(exported, name, kind, word):
    unit, bundle = exported(name)
    found = mutations(bundle, kind, word)
    with planted(found[0]):
        result = compared(unit, bundle)
    (interpreter,) = result.results
    assert not result.passed and not interpreter.meaning.passed and "NO" in interpreter.meaning.sentence


def test_an_operation_is_excused_by_the_rounding_of_its_scores_and_by_no_more(exported):
    meaning = compared(*exported(ILL)).results[0].meaning
    assert meaning.wrong_operations == [] and not meaning.audit.passed
    heads = next(o for o in meaning.audit.operations if not o.passed)
    scores = next(o for o in meaning.audit.operations if o.step == heads.step and o.name.endswith(".scores"))
    assert heads.name.endswith("attention.heads") and scores.largest > 100
    worse = dataclasses.replace(heads, local=heads.budget.error + 1.01 * 2**-23 * scores.largest * 2)
    audit = dataclasses.replace(meaning.audit, operations=(*meaning.audit.operations, worse))
    assert dataclasses.replace(meaning, audit=audit).wrong_operations == [worse]
