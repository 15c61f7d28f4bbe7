"""A small run of the campaign in benchmarks/campaigns/mutants lets nothing wrong pass, and it can fail."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.campaigns.mutants import mutant_campaign, trials_of_graphs
from benchmarks.campaigns.mutants.drafts import Draft
from benchmarks.campaigns.mutants.good_units import GOOD_UNITS
from benchmarks.campaigns.mutants.mutant_campaign import Job, run_jobs
from benchmarks.campaigns.mutants.twin_oracle import change, twin_outputs

pytestmark = pytest.mark.slow

SEED = 3
JOBS = [  # unit, place, number of mutants
    ("block fp16", "graph", 8),
    ("block fp16", "network", 4),
    ("block fp16", "record", 10),
    ("block fp16", "profile", 10),
    ("stack fp16 of 6 ill-conditioned layers", "graph", 8),
    ("stack bf16 in parts", "graph", 6),
    ("model fp16 in int4", "graph", 8),
    ("model fp32 growing", "graph", 6),
]


def job(unit: str, place: str, at_most: int) -> Job:
    return Job(unit, GOOD_UNITS[unit], place, 1 if place in ("graph", "network") else 10, at_most)


def test_nothing_wrong_passes_among_sixty_mutants():
    result = run_jobs([job(*entry) for entry in JOBS], SEED)
    assert result["wrongly passed"] == []
    assert result["mutants"] >= 55 and result["compute something else"] >= 40
    assert all("reason" in survivor for survivor in result["equivalent survivors"])


def test_the_campaign_names_a_mutant_that_no_check_catches(monkeypatch):
    monkeypatch.setattr(trials_of_graphs, "check_meaning", lambda bundle, weights: type("", (), {"passed": True}))
    monkeypatch.setattr(mutant_campaign, "caught_by_export", lambda bundle, unit: (None, ""))
    lines: list[str] = []
    result = run_jobs([job("block fp16", "graph", 12)], SEED, lines.append)
    assert result["passed wrongly"] == len(result["wrongly passed"]) > 3
    assert sum(line.startswith("passed: block fp16") for line in lines) == result["passed wrongly"]


def test_the_oracle_sees_a_wrong_value_and_no_change_where_inputs_of_a_sum_are_swapped(tmp_path):
    bundle = GOOD_UNITS["block fp16"].export(tmp_path / "good")
    good = Draft.read(bundle)
    outputs = twin_outputs(bundle.manifest, [good])
    swapped, wrong = good.copy(), good.copy()
    inputs = swapped.node_of("blocks.0.mlp.residual").input
    inputs[0], inputs[1] = inputs[1], inputs[0]
    wrong.array("blocks.0.mlp.down_proj.weight")[:] *= np.float16(1.01)
    assert change(outputs, twin_outputs(bundle.manifest, [swapped])) == (0.0, "")
    assert change(outputs, twin_outputs(bundle.manifest, [wrong]))[0] > 1e-3
