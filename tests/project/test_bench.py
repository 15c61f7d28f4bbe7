"""The benchmark compares outputs before it times them: a wrong, missing or dead contender has a reason and no time."""

from __future__ import annotations

import copy
import json
import shutil

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file

from benchmarks.contenders.bare_products import BareProducts, bare_graph
from benchmarks.machine.bytes_read import BITS, bytes_read
from benchmarks.machine.machine_limits import Limits
from benchmarks.machine.step_profile import component_of, read_profile
from benchmarks.output.record_form import TOP, check_record
from benchmarks.peers.environments import PACKAGES, PeerMissing
from benchmarks.race import models
from benchmarks.race.gguf_file import convert, gguf_name
from benchmarks.race.harness import ENOUGH_SAMPLES, WARM_STEPS, ContenderFailed, Lane, judge, race
from benchmarks.race.lineup import FLOORS, LINEUP, OURS, REFERENCE, Entry
from benchmarks.race.models import random_checkpoint
from benchmarks.race.run import Run
from benchmarks.race.targets import TARGETS, figures, measured_targets
from benchmarks.race.workloads import FULL, QUICK, TINY, Decode, Workload
from exporter.checkpoint.formats import open_checkpoint
from exporter.costs.ledger import Ledger
from exporter.costs.roofline import Step, step_costs
from exporter.spec.parameters import weight_shapes
from exporter.spec.unit import Unit

pytestmark = pytest.mark.slow

FEW = {"rounds": 2, "steps": 2, "prefill_rounds": 2, "prompts": 2, "tokens": 6}
LIMITS = Limits(1e10, 1e11)
WORKLOAD = Workload("planted faults", TINY, (Decode(16, 2, 64),), prefills=(8,), filled=True, **FEW)
FAULTS = (
    Entry("altered", "eager", "altered"),
    Entry("missing", "eager", "refused"),
    Entry("dies", "no_such_module", "checkpoint"),
)


def altered(made, file, arguments) -> dict:
    """The checkpoint with one number of one weight changed."""
    shutil.copytree(made.checkpoint, file)
    (shard,) = file.glob("*.safetensors")
    weights = load_file(shard)
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] += 0.5
    save_file(weights, shard, metadata={"format": "pt"})
    return {}


def refused(made, file, arguments) -> dict:
    raise PeerMissing("Building wheel\n  error: no compiler\n")


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """A small run with planted faults: its record and its progress lines."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(models.MAKERS, "altered", altered)
        patch.setitem(models.MAKERS, "refused", refused)
        good = [entry for entry in LINEUP if entry.name in (REFERENCE, "eager", OURS)]
        run = Run([*good, *FAULTS], 1, None, tmp_path_factory.mktemp("bench"), lambda: LIMITS, said.append)
        workload = run.workload(WORKLOAD)
    record = dict.fromkeys(TOP, "") | {
        "limits": LIMITS.to_dict(),
        "workloads": {WORKLOAD.name: workload},
        "exports by depth": [],
    }
    return json.loads(json.dumps(record)), said


def contenders(outcome) -> dict:
    return outcome[0]["workloads"][WORKLOAD.name]["contenders"]


def test_contenders_that_agree_are_timed_in_every_case(outcome):
    workload = outcome[0]["workloads"][WORKLOAD.name]
    for case in [*workload["decode"], *workload["prefill"]]:
        assert set(case["results"]) == {"transformers", "eager", "ours"}
        assert all(result["median_ms"] > 0 for result in case["results"].values())
    for case in [*workload["decode"], *workload["prefill"]]:
        assert case["limits"] == LIMITS.to_dict()
        assert all(r["share"] == pytest.approx(r["at_limit_ms"] / r["median_ms"]) for r in case["results"].values())
    assert workload["decode"][0]["results"]["ours"]["n"] == WORKLOAD.rounds * WORKLOAD.steps
    assert {part["name"] for part in workload["roofline"][0]["components"]} >= {
        "attention.qkv_proj",
        "attention.heads",
        "lm_head",
    }


def test_a_contender_with_one_altered_weight_is_reported_and_not_timed(outcome):
    entry = contenders(outcome)["altered"]
    assert entry["status"] == "disagrees" and "largest error of rms: got" in entry["reason"]
    assert any("altered disagrees" in line for line in outcome[1])


def test_a_contender_that_cannot_be_made_is_missing_by_name_with_the_last_line_of_the_reason(outcome):
    assert contenders(outcome)["missing"] == {"status": "missing", "reason": "error: no compiler"}


def test_a_contender_that_dies_is_reported_with_the_last_line_of_its_error(outcome):
    entry = contenders(outcome)["dies"]
    assert (
        entry["status"] == "failed"
        and "ModuleNotFoundError: No module named 'benchmarks.contenders.no_such_module'" in entry["reason"]
    )


def test_the_record_has_its_form_and_a_damaged_one_is_refused(outcome):
    check_record(outcome[0])
    name = WORKLOAD.name
    for damage, said in (
        (lambda record: record.pop("limits"), "its keys are"),
        (
            lambda record: record["workloads"][name]["contenders"]["ours"].pop("agreement"),
            "ours: its status is ran, expected an agreement",
        ),
        (
            lambda record: record["workloads"][name]["contenders"]["dies"].pop("reason"),
            "dies: its status is failed, expected a reason",
        ),
        (lambda record: record["workloads"][name]["decode"][0]["results"].pop("eager"), "expected those that ran"),
        (
            lambda record: record["workloads"][name]["prefill"][0]["results"]["ours"].update(median_ms=0),
            "prefill 8, ours: got",
        ),
        (lambda record: record["workloads"][name]["roofline"][0].update(limit_ms=1e3), "its components add up to"),
        (lambda record: record["workloads"][name]["prefill"][0].pop("limits"), "prefill 8: limits bandwidth: got None"),
        (lambda record: record["workloads"][name]["contenders"].pop("transformers"), "transformers: got None"),
    ):
        damaged = copy.deepcopy(outcome[0])
        damage(damaged)
        with pytest.raises(ValueError, match=said):
            check_record(damaged)


def test_targets_are_met_missed_or_not_measured():
    wanted = next(target for target in TARGETS if target.denominator.endswith("optimum"))
    workload, case, ours = wanted.numerator.split(" / ")

    def record(ours_ms: float) -> dict:
        results = {ours: {"median_ms": ours_ms}, "optimum": {"median_ms": 10.0}}
        rest = {"prefill": [], "capacity": [], "bare products": {"step": {}, "products": {}}}
        return {"workloads": {workload: {"decode": [{"name": case, "results": results}], **rest}}}

    for ours_ms in (9.0, 11.0):
        rows = {row["name"]: row for row in measured_targets(record(ours_ms))}
        assert rows[wanted.name]["measured"] == pytest.approx(ours_ms / 10) and rows[wanted.name]["met"] == (
            ours_ms <= 10 * wanted.wanted
        )
        assert {row["met"] for name, row in rows.items() if name != wanted.name} == {None}


def test_every_target_names_figures_of_the_full_run():
    """A target whose case was renamed would never be measured."""
    workloads = {}
    for workload in FULL.workloads:
        results = {entry.name: {"median_ms": 1.0, "memory": {"peak": 1}} for entry in LINEUP}
        sizes = {"weights_bytes": 1, "cache_bytes": 1}
        workloads[workload.name] = {
            "decode": [{"name": case.name, "results": results, "sizes": sizes} for case in workload.decodes],
            "prefill": [{"name": f"prefill {length:,}", "results": results} for length in workload.prefills],
            "contenders": {entry.name: {"open_seconds": 1.0, "agreement": {"top1": 0.99}} for entry in LINEUP},
            "capacity": [{"capacity": capacity, "median_ms": 1.0} for capacity in workload.capacities],
            "bare products": {"step": {"median_ms": 1.0}, "products": {"median_ms": 1.0}},
        }
    known = figures({"workloads": workloads})
    assert not {name for target in TARGETS for name in (target.numerator, target.denominator)} - set(known)


def test_bytes_that_a_step_must_read_follow_from_the_form_of_the_weights():
    parameters = Ledger.of(TINY).model_parameters
    norms = (2 * TINY.n_layers + 1) * TINY.hidden_size
    rows = 2 * TINY.n_layers * TINY.n_kv_heads * TINY.head_dim * 3 * (16 + 1)
    table = TINY.vocab_size * TINY.hidden_size  # the embedding; one row of it is read for each sequence
    once = parameters - (0 if TINY.tie_word_embeddings else table)
    assert bytes_read(TINY, "fp32", 3, 16) == 4 * (once + 3 * TINY.hidden_size + rows)
    matrices = once - norms - table
    others = 4 * (norms + 3 * TINY.hidden_size)
    assert bytes_read(TINY, "int4", 3, 16) == others + 4 * rows + matrices * 5 / 8 + table * 9 / 8
    assert bytes_read(TINY, "Q8_0", 3, 16) == others + 2 * rows + (matrices + table) * 8.5 / 8
    assert bytes_read(TINY, "tensorrt", 3, 16) is None
    float_forms = {"uint8", "uint4", "tensorrt"}
    assert set(FLOORS) - float_forms == set(BITS), "every contender on the CPU has its bits"


# --- the race --------------------------------------------------------------------------------------------------


class Runner:
    """A process that answers with the number of the turn, and fails at turn `fails_at`."""

    def __init__(self, name: str, turns: list[str], fails_at: int | None = None) -> None:
        self.name, self.turns, self.fails_at, self.n = name, turns, fails_at, 0

    def ask(self, do: str, count: int) -> dict:
        self.turns.append(self.name)
        self.n += 1
        if self.n == self.fails_at:
            raise ContenderFailed("out of memory")
        return {"ms": [100.0] * WARM_STEPS + [float(self.n)] * (count - WARM_STEPS)}


def test_each_round_begins_with_another_lane_and_warm_up_is_reported_separately():
    turns: list[str] = []
    lanes = [Lane(name, Runner(name, turns), "steps", {}) for name in "abc"]
    results = race(lanes, rounds=3, steps=2, say=turns.append)
    assert "".join(turns) == "abcbcacab"
    assert results["a"] == {"p10_ms": 1.0, "median_ms": 2.0, "p90_ms": 3.0, "n": 6, "warm_up_ms": 100.0}


def test_a_slow_lane_gets_fewer_steps_and_does_not_delay_the_others():
    class Slow(Runner):
        def ask(self, do: str, count: int) -> dict:
            self.turns.append(count - WARM_STEPS)
            return {"ms": [4_000.0] * count}

    counts: list[int] = []
    turns: list[str] = []
    lanes = [Lane("slow", Slow("slow", counts), "steps", {}), Lane("a", Runner("a", turns), "steps", {})]
    results = race(lanes, rounds=10, steps=2, say=turns.append)
    assert counts == [2, 1, 1, 1] and results["slow"]["n"] == ENOUGH_SAMPLES
    assert results["a"]["n"] == 20


def test_a_lane_that_fails_has_no_time_and_the_others_continue():
    said: list[str] = []
    lanes = [Lane("a", Runner("a", []), "steps", {}), Lane("b", Runner("b", [], fails_at=2), "steps", {})]
    results = race(lanes, rounds=3, steps=2, say=said.append)
    assert results["b"] == {"not_timed": "out of memory"} and results["a"]["n"] == 6 and said == ["b: out of memory"]


@pytest.mark.parametrize("weights", FLOORS)
def test_outputs_are_compared_with_the_floor_for_their_weights(weights):
    entry = Entry("x", "eager", "checkpoint", weights=weights)
    reference = np.random.default_rng(0).standard_normal((200, 50)).astype(np.float32)
    assert judge(entry, reference, reference).complaint == ""
    assert "same token" in judge(entry, reference, -reference).complaint
    assert "inf or NaN" in judge(entry, reference, np.where(reference > 2, np.nan, reference)).complaint
    near = judge(entry, reference, reference + 2e-3 * (np.arange(50) == 7)).complaint
    assert bool(near) == (weights == "fp32"), "only float32 must be close"


def test_every_entry_can_be_made_and_judged():
    assert {entry.model.split()[0] for entry in LINEUP} <= {"checkpoint", *models.MAKERS}
    assert {entry.weights for entry in LINEUP} <= set(FLOORS)
    assert {entry.environment for entry in LINEUP} <= {None, *PACKAGES}
    assert {workload.config for workload in QUICK.workloads} & {None} == set(), "a quick run fetches nothing"


# --- files that contenders read, bare products, profiles --------------------------------------------------------


def test_the_bare_graph_has_every_product_with_a_stored_weight_and_runs(tiny_bundle):
    bundle = tiny_bundle("model")
    graph = bare_graph(onnx.load(bundle.graph_path, load_external_data=False)).graph
    assert len(graph.output) == 4 * bundle.manifest.config.n_layers + 1
    assert {node.op_type for node in graph.node} <= {"MatMul", "Gemm"}
    costs = step_costs(bundle.manifest.config, bundle.manifest.unit, Step(dtype="fp32"))
    matrices = {tensor.name: tensor for tensor in graph.initializer}
    assert sum(np.prod(tensor.dims) * 4 for tensor in matrices.values()) == sum(
        cost.weight_bytes for cost in costs if cost.flops
    )
    BareProducts(bundle, batch=3).run()


def test_a_gguf_file_has_every_weight_once_with_rows_of_q_and_k_in_pairs(tmp_path):
    gguf = pytest.importorskip("gguf")
    checkpoint = open_checkpoint(random_checkpoint(tmp_path / "checkpoint", TINY))
    for kind in ("F32", "F16"):
        convert(tmp_path / "checkpoint", tmp_path / kind, kind)
        stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / kind).tensors}
        shapes = weight_shapes(TINY, Unit("model", n_layers=TINY.n_layers))
        assert set(stored) == {gguf_name(name) for name in shapes}
        for name in shapes:
            weight = checkpoint.weights.read(name).float().numpy()
            np.testing.assert_array_equal(
                stored[gguf_name(name)].data, weight.astype(stored[gguf_name(name)].data.dtype)
            )
    assert Ledger.of(TINY).model_parameters == sum(int(tensor.n_elements) for tensor in stored.values())


def test_a_profile_is_cut_into_steps_and_nodes_are_named_by_component():
    def event(name: str, ts: int, dur: int, cat: str = "Node") -> dict:
        return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "args": {"op_name": "MatMul"}}

    events = [
        event("model_run", 0, 10, "Session"),
        event("blocks.0.mlp.up_proj_kernel_time", 1, 4),
        event("blocks.0.mlp.up_proj_fence_before", 1, 1),
        event("model_run", 20, 10, "Session"),
        event("blocks.1.attention.keys_kernel_time", 21, 5),
        event("model_loading", 15, 1, "Session"),
    ]
    steps = read_profile(events)
    assert [[(kernel.node, kernel.microseconds) for kernel in step] for step in steps] == [
        [("blocks.0.mlp.up_proj", 4)],
        [("blocks.1.attention.keys", 5)],
    ]
    assert component_of("blocks.1.attention.keys") == component_of("blocks.0.present_key") == "attention.heads"
    assert (
        component_of("blocks.12.mlp.up_proj") == "mlp.up_proj"
        and component_of("attention_mask.real/Range") == "attention_mask"
    )
