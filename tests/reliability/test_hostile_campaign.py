"""A small run of the campaign in benchmarks/campaigns/hostile_input finds no fault."""

from __future__ import annotations

import pytest

from benchmarks.campaigns.hostile_input.campaign import run_campaign
from benchmarks.campaigns.hostile_input.originals import make_originals

pytestmark = pytest.mark.slow

CASES = {  # kind of input → number of cases
    "manifest": 60,
    "geometry": 30,
    "graph": 60,
    "external data": 50,
    "data file": 40,
    "tokenizer": 30,
    "report and genai config": 20,
    "config": 20,
    "safetensors": 30,
    "shard index": 20,
    "params": 20,
    "pth": 30,
    "command line": 30,
    "prompt": 10,
}
LATE_GATES = {
    "sizes and checksums match",
    "graph has the bundle's form",
    "prefill ran",
    "checkpoint opened",
    "tokenizer loaded",
}


def test_a_small_campaign_finds_no_fault_and_passes_every_gate(tmp_path):
    originals = tmp_path / "originals"
    make_originals(originals, ("block", "model", "int8", "uint4"))
    result = run_campaign(CASES, seed=7, jobs=1, originals=originals)
    assert result["fault_examples"] == [] and result["faults"] == 0
    assert result["cases"] == sum(CASES.values())
    passed = {gate for kind in result["kinds"].values() for gate in kind["cases_past_each_gate"]}
    assert passed >= LATE_GATES
