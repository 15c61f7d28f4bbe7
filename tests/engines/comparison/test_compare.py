"""The comparison of backends: it passes sound bundles, finds every planted fault, and writes its reports."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from engines.commands.main import main
from engines.comparison import compare as comparison
from engines.comparison.audit import BackendAudit
from engines.comparison.compare import CompareRequest, compare_bundle, run_limits
from engines.comparison.html_page import to_html
from engines.comparison.report import to_dict
from engines.comparison.results import StepDifference
from engines.interpreter.stepper import InterpreterStepper
from exporter.common.errors import BackendError, InputError
from exporter.export import ExportRequest, export_bundle
from exporter.spec.unit import COMPONENTS, Unit
from exporter.steppers.onnxruntime_stepper import OnnxruntimeStepper
from exporter.validation.scenarios import RunLimits, cache_scenarios
from tests.conftest import MAX_POSITIONS
from tests.support.doubles.cuda_double import double_session, engine_record
from tests.support.planted_faults import causal_with_key_lengths, doctored, scale_weight
from tests.support.strayed_weights import OUTPUT_FAULTS, SIX, STRAYED

PAIR = ("onnxruntime", "interpreter")


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("unit", ["block", "stack", "model", *(f"component:{name}" for name in COMPONENTS)])
def test_eager_onnxruntime_and_interpreter_agree_on_every_unit(tiny_bundle, unit, dtype):
    result = compare_bundle(tiny_bundle(unit, dtype), CompareRequest())
    assert [r.backend for r in result.results] == list(PAIR)
    assert result.passed, to_dict(result)
    assert all(r.control is None and r.audit is None for r in result.results)
    assert "tensorrt" in result.left_out
    if unit == "block":
        scenarios = {t.comparison.scenario for t in result.results[0].tensors}
        assert scenarios == {scenario.name for scenario in cache_scenarios(64)}
        assert all(len(t.steps) > 0 and t.steps[0].worst_index is not None for t in result.results[1].tensors)


@pytest.mark.parametrize("unit", ["block", "model"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_onnxruntime_can_be_the_reference(tiny_bundle, unit, dtype):
    result = compare_bundle(tiny_bundle(unit, dtype), CompareRequest(PAIR))
    assert [r.backend for r in result.results] == ["interpreter"] and result.passed
    if dtype == "fp32":
        assert max(t.comparison.max_error for t in result.results[0].tensors) < 1e-4


def test_the_fault_that_tensorrts_parser_makes_silently_shows_without_a_gpu(tiny_bundle, tmp_path, capsys, monkeypatch):
    """is_causal with nonpad_kv_seqlen is valid ONNX, and onnxruntime runs it right; the parser builds a wrong mask."""
    broken = doctored(tiny_bundle("stack", "fp16", "2"), tmp_path / "broken", causal_with_key_lengths)
    result = compare_bundle(broken, CompareRequest(PAIR))
    assert not result.passed
    decode = {
        t.comparison.scenario: t for t in result.results[0].tensors if t.comparison.tensor == "hidden_states_out"
    }["decode"]
    wrong = [step.max_abs > 0.05 for step in decode.steps]
    assert wrong == [False, True, True, True]  # the prefill is right, and every later step is wrong
    first = result.results[0].audit.first_failure
    assert first.name == "blocks.0.attention.heads" and first.step == 1
    # the check of the graph's form knows none of the operators that count the lengths
    monkeypatch.setattr("exporter.bundle.bundle.check_graph_form", lambda *_: None)
    assert main(["compare", str(broken.folder), "--backends", "onnxruntime,interpreter"]) == 1
    assert "blocks.0.attention.heads" in capsys.readouterr().err
    sound = compare_bundle(broken, CompareRequest(("eager", "onnxruntime")))
    failed = {t.comparison.scenario for t in sound.results[0].tensors if not t.comparison.passed}
    # lengths do not count leading pads, and count trailing pads as queries
    assert failed <= {"left-padded mask", "ragged batch"}


class Damaged(OnnxruntimeStepper):
    """onnxruntime whose outputs are damaged after each step."""

    damage = staticmethod(lambda outputs: outputs)

    def run(self, feeds, cache=None, first_row=0):
        return self.damage(super().run(feeds, cache, first_row))


def scaled(outputs):
    return {name: x * np.asarray(1.1, x.dtype) for name, x in outputs.items()}


def one_nan(outputs):
    ((name, x),) = outputs.items()
    x = x.copy()
    x.flat[-1] = np.nan
    return {name: x}


def one_wrong_row(outputs):
    ((name, x),) = outputs.items()
    x = x.copy()
    x[-1, -1] += np.asarray(0.1, x.dtype)
    return {name: x}


def renamed(outputs):
    return {f"{name}_1": x for name, x in outputs.items()}


@pytest.mark.parametrize("damage", [scaled, one_nan, one_wrong_row, renamed])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_damaged_output_fails_the_comparison(tiny_bundle, monkeypatch, capsys, damage, dtype):
    monkeypatch.setattr(Damaged, "damage", staticmethod(damage))
    monkeypatch.setattr(comparison, "OnnxruntimeStepper", Damaged)
    bundle = tiny_bundle("block", dtype)
    result = compare_bundle(bundle, CompareRequest(("eager", "onnxruntime")))
    assert not result.passed
    assert {t.comparison.tensor for t in result.results[0].tensors if not t.comparison.passed} == {"hidden_states_out"}
    options = ["--backends", "eager,onnxruntime", "--no-audit", "--format", "json"]
    assert main(["compare", str(bundle.folder), *options]) == 1
    document = json.loads(capsys.readouterr().out)
    failed = [t for r in document["results"] for t in r["tensors"] if not t["passed"]]
    assert failed and not document["passed"]


def test_one_wrong_row_of_4096_has_its_index_named():
    reference = np.random.default_rng(0).standard_normal((4096, 8))
    wrong = reference.copy()
    wrong[1234, 5] += 0.5
    difference = StepDifference.measure(reference, wrong)
    assert difference.worst_index == (1234, 5) and difference.max_abs == pytest.approx(0.5)
    assert 0.99 < difference.cosine < 1 and difference.mean_abs == pytest.approx(0.5 / reference.size)


def test_a_step_that_is_missing_misshapen_or_not_finite_is_infinitely_far():
    a = np.ones((2, 3))
    for b in (None, np.ones((3, 2)), np.array([[1, 1, 1], [1, np.inf, 1]])):
        difference = StepDifference.measure(a, b)
        assert math.isinf(difference.max_abs)
    assert difference.worst_index == (1, 1)


def test_a_weight_written_wrongly_fails_against_the_seed_it_came_from(tiny_bundle, tmp_path):
    broken = doctored(tiny_bundle("stack", "fp16", "2"), tmp_path / "broken")
    broken = scale_weight(broken, "blocks.1.mlp.up_proj.weight", 1.1)
    result = compare_bundle(broken, CompareRequest())
    assert [r.passed for r in result.results] == [False, False]
    assert {r.audit.first_failure.name for r in result.results} == {"blocks.1.mlp.up_proj"}


def test_requests_that_make_no_sense_are_refused(tiny_bundle):
    bundle = tiny_bundle("block", "fp16")
    for backends, word in (
        ((), "at least two"),
        (("eager",), "at least two"),
        (("eager", "eager"), "at least two"),
        (("eager", "cuda"), "'cuda'"),
    ):
        with pytest.raises(InputError, match=word):
            compare_bundle(bundle, CompareRequest(backends))
    with pytest.raises(BackendError, match=r"no GPU|no engine"):
        compare_bundle(bundle, CompareRequest(("eager", "tensorrt")))
    with pytest.raises(InputError, match="seed"):
        compare_bundle(bundle, CompareRequest(seed=-1))
    with pytest.raises(InputError, match="expected at most 64"):
        compare_bundle(bundle, CompareRequest(cache_capacity=65))
    with pytest.raises(InputError, match="has no cache"):
        compare_bundle(tiny_bundle("component:rms_norm", "fp16"), CompareRequest(cache_capacity=32))


def test_the_interpreter_is_left_out_by_name_where_no_tensorrt_is_installed(tiny_bundle, monkeypatch):
    import engines.library.backend

    monkeypatch.setattr(engines.library.backend, "_installed", lambda name: False)
    result = compare_bundle(tiny_bundle("block", "fp32"), CompareRequest())
    assert [r.backend for r in result.results] == ["onnxruntime"]
    assert "pip install" in result.left_out["interpreter"]
    with pytest.raises(BackendError, match="pip install"):
        compare_bundle(tiny_bundle("block", "fp32"), CompareRequest(PAIR))


def test_scenarios_are_cut_to_what_an_engine_takes():
    limits = RunLimits(capacity=64, max_batch=2, max_seq_len=5)
    scenarios = cache_scenarios(64, limits)
    names = {s.name for s in scenarios}
    assert "ragged batch" not in names and "left-padded mask" not in names and "near capacity" in names
    for scenario in scenarios:
        assert scenario.capacity == 64 and max(map(max, scenario.steps)) <= 5 and max(map(len, scenario.steps)) <= 2
    near = next(s for s in scenarios if s.name == "near capacity")
    assert sum(step[0] for step in near.steps) == 64


def test_a_request_is_taken_by_what_it_means():
    assert CompareRequest("eager,onnxruntime", seed=np.int64(3)) == CompareRequest(("eager", "onnxruntime"), seed=3)
    assert CompareRequest(["eager", "onnxruntime"]).backends == ("eager", "onnxruntime")
    for seed in (True, 3.0, "3", -1, None):
        with pytest.raises(InputError, match="seed: got"):
            CompareRequest(seed=seed)


def test_what_an_engine_takes_is_read_from_all_its_inputs(tiny_bundle, monkeypatch):
    bundle = tiny_bundle("block", "fp16")
    record = engine_record(bundle, 64, max_batch=4, max_seq_len=16)
    for profile in record.profiles:
        profile["ranges"]["write_indices"]["max"] = [2]
        profile["ranges"]["hidden_states"]["max"][1] = 5
    monkeypatch.setattr("engines.comparison.compare.find_engines", lambda *_, **__: [record])
    assert run_limits(bundle, CompareRequest(), ("tensorrt",)) == RunLimits(64, 2, 5)


def test_another_capacity_gives_the_same_verdict(tiny_bundle):
    result = compare_bundle(tiny_bundle("block", "fp16"), CompareRequest(cache_capacity=64))
    assert result.passed
    near = next(t for t in result.results[1].tensors if t.comparison.scenario == "near capacity")
    assert near.comparison.tensor == "hidden_states_out"
    assert sum(step.shape[1] for step in near.steps if len(step.shape) == 3) == 64


@pytest.fixture(scope="module")
def audited(tiny_bundle):
    """A comparison with one failing and one passing audit in it."""
    return compare_bundle(tiny_bundle("stack", "fp16", "2"), CompareRequest(audit=True))


def test_the_documents_hold_every_operation_and_no_number_that_json_lacks(audited):
    document = json.loads(json.dumps(to_dict(audited), allow_nan=False))
    for result in document["results"]:
        assert result["audit"]["passed"] and result["audit"]["first_failure"] is None
        names = {operation["name"] for operation in result["audit"]["operations"]}
        assert {"blocks.1.attention.scores", "blocks.0.mlp.product", "hidden_states_out"} <= names
        assert {"max_abs", "mean_abs", "max_rel", "mean_rel", "cosine", "worst_index", "shape"} == set(
            result["tensors"][0]["steps"][0]
        )


def test_the_page_needs_no_other_file_and_has_the_same_results(audited, tiny_bundle, tmp_path):
    page = to_html(audited)
    assert "http" not in page and "<script" not in page and page.count("<svg") == 4
    assert "prefers-color-scheme: dark" in page and page.count("PASSED") > 4 and "FAILED" not in page
    broken = doctored(tiny_bundle("stack", "fp16", "2"), tmp_path / "broken<b>", causal_with_key_lengths)
    failed = to_html(compare_bundle(broken, CompareRequest(PAIR)))
    assert "FAILED" in failed and "blocks.0.attention.heads" in failed and 'class="failed"' in failed


def test_the_command_writes_its_page_and_its_polygraphy_files(tiny_bundle, tmp_path, capsys):
    bundle = tiny_bundle("block", "fp16")
    files = {name: tmp_path / name for name in ("page.html", "inputs.json", "outputs.json", "loader.py")}
    arguments = ["--html", files["page.html"], "--save-inputs", files["inputs.json"]]
    arguments += ["--save-outputs", files["outputs.json"], "--save-data-loader", files["loader.py"]]
    arguments += ["--backends", "eager,interpreter"]
    assert main(["compare", str(bundle.folder), *map(str, arguments)]) == 0
    assert all(path.stat().st_size > 200 for path in files.values())
    tool = str(Path(sys.executable).with_name("polygraphy"))
    polygraphy = [tool, "run", str(bundle.graph_path), "--onnxrt", "--load-outputs", str(files["outputs.json"])]
    tolerances = ["--atol", "0.02", "--rtol", "0.02"]
    for inputs in (["--load-inputs", files["inputs.json"]], ["--data-loader-script", files["loader.py"]]):
        run = subprocess.run([*polygraphy, *map(str, inputs), *tolerances], capture_output=True, text=True)
        assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
        assert "PASSED" in run.stdout
    exact = ["--load-inputs", str(files["inputs.json"]), "--atol", "1e-7", "--rtol", "1e-7"]
    strict = subprocess.run([*polygraphy, *exact], capture_output=True, text=True)
    assert strict.returncode == 1


def test_polygraphys_own_comparator_drives_our_runners(tiny_bundle):
    from polygraphy.comparator import Comparator, SimpleCompareFunc

    from engines.comparison.polygraphy_files import StepperRunner, steps

    bundle = tiny_bundle("block", "fp16")
    runners = [
        StepperRunner(lambda: OnnxruntimeStepper.from_bundle(bundle)),
        StepperRunner(lambda: InterpreterStepper.from_bundle(bundle)),
    ]
    feeds = [inputs for inputs, _ in steps(bundle, 0, RunLimits())]
    results = Comparator.run(runners, data_loader=feeds)
    assert len(results[0][1]) == len(feeds) > 15
    assert set(results[0][1][0]) == {spec.name for spec in bundle.manifest.contract.outputs}
    assert Comparator.compare_accuracy(results, compare_func=SimpleCompareFunc(atol=0.02, rtol=0.02))
    assert not Comparator.compare_accuracy(results, compare_func=SimpleCompareFunc(atol=0, rtol=0))


def test_the_runner_binds_past_and_present_of_a_tensorrt_engine_at_one_address(tiny_bundle):
    """The double of the engine refuses to run where they are at two addresses."""
    from engines.comparison.polygraphy_files import StepperRunner, steps

    bundle = tiny_bundle("block", "fp32")
    session = double_session(bundle, max_batch=4, cache_capacity=64)
    with StepperRunner(lambda: session._stepper) as runner:
        for inputs, expected in list(steps(bundle, 0, RunLimits(capacity=64)))[:4]:
            outputs = runner.infer(inputs)
            assert set(outputs) == set(expected) and runner.last_inference_time() > 0
            for name, array in expected.items():
                np.testing.assert_allclose(outputs[name], array, atol=1e-5)


@pytest.mark.parametrize(("unit", "dtype"), [("component:rms_norm", "fp16"), ("block", "bf16")])
def test_what_polygraphys_files_cannot_hold_is_refused(tiny_bundle, tmp_path, capsys, unit, dtype):
    path = tmp_path / "inputs.json"
    assert main(["compare", str(tiny_bundle(unit, dtype).folder), "--save-inputs", str(path)]) == 2
    assert "polygraphy" in capsys.readouterr().err and not path.exists()


def test_an_audit_without_operations_is_never_a_pass_by_accident():
    assert BackendAudit("x", "x", (), (), math.nan).first_failure is None


@pytest.mark.parametrize("fault", [None, *OUTPUT_FAULTS])
def test_a_control_that_strayed_excuses_no_network(tmp_path, fault):
    request = ExportRequest(SIX, Unit.parse("stack", SIX), STRAYED, "fp16", MAX_POSITIONS)
    bundle = export_bundle(request, tmp_path / "bundle", validated=False)
    if fault is not None:
        bundle = doctored(bundle, tmp_path / "wrong", OUTPUT_FAULTS[fault])
    result = compare_bundle(bundle, CompareRequest(("eager", "interpreter")), weights=STRAYED)
    (interpreter,) = result.results
    assert interpreter.audit is not None and interpreter.audit.passed is (fault is None)
    assert result.passed is (fault is None)
    assert fault is not None or interpreter.control is not None, "the weights are meant to be ill-conditioned"
