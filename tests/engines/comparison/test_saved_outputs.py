"""Outputs that Polygraphy has saved: right ones pass, and no file with a planted fault does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from polygraphy.comparator import RunResults
from polygraphy.comparator.struct import IterationResult
from polygraphy.json import load_json

from engines.commands.main import main
from engines.comparison.saved_outputs import compare_outputs
from exporter.common.errors import CheckFailed, InputError

KEY, HIDDEN = "present.0.key", "hidden_states_out"


@pytest.fixture(scope="module")
def bundle(tiny_bundle):
    return tiny_bundle("block", "fp16")


@pytest.fixture(scope="module")
def saved(bundle, tmp_path_factory) -> Path:
    """A folder with inputs.json and outputs.json, and onnxruntime.json that Polygraphy's command has saved."""
    folder = tmp_path_factory.mktemp("saved")
    files = {name: str(folder / f"{name}.json") for name in ("inputs", "outputs", "onnxruntime")}
    ours = ["--save-inputs", files["inputs"], "--save-outputs", files["outputs"], "--backends", "eager,onnxruntime"]
    assert main(["compare", str(bundle.folder), *ours]) == 0
    tool = str(Path(sys.executable).with_name("polygraphy"))
    polygraphy = [tool, "run", str(bundle.graph_path), "--onnxrt", "--load-inputs", files["inputs"]]
    run = subprocess.run([*polygraphy, "--save-outputs", files["onnxruntime"]], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    return folder


def changed(path: Path, target: Path, change, step: int = 0) -> Path:
    """Writes a copy of a file of outputs with one step changed. `change` gets the step's outputs by name."""
    results = RunResults()
    for name, iterations in RunResults.load(str(path)):
        steps = [dict(iteration.items()) for iteration in iterations]
        change(steps[step])
        results.append((name, [IterationResult(outputs=outputs, runner_name=name) for outputs in steps]))
    results.save(str(target))
    return target


def drop(outputs):
    del outputs[KEY]


def rename(outputs):
    outputs["present.0.keys"] = outputs.pop(KEY)


def add(outputs):
    outputs["other"] = outputs[KEY]


def widen(outputs):
    outputs[KEY] = outputs[KEY].astype(np.float32)


def cut(outputs):
    outputs[KEY] = outputs[KEY][:, :, :-1]


def flatten(outputs):
    outputs[KEY] = outputs[KEY].reshape(-1)


def damage(outputs):
    outputs[KEY] = outputs[KEY].copy()
    outputs[KEY].flat[3] = np.nan


PLANTED = {
    drop: f"the output {KEY} is missing",
    rename: f"the output {KEY} is missing",
    add: "the output other is not one of the bundle's",
    widen: f"{KEY}: got dtype float32, expected float16",
    cut: f"{KEY}: got shape",
    flatten: rf"{KEY}: got shape \[1024\], expected \['batch_size', 2, 'cache_capacity', 16\]",
    damage: f"{KEY}: it holds inf or NaN",
}


def test_what_polygraphy_saved_passes_and_all_outputs_are_compared(bundle, saved, capsys):
    files = [str(saved / name) for name in ("outputs.json", "onnxruntime.json")]
    assert main(["compare-outputs", str(bundle.folder), *files, "--format", "json"]) == 0
    result = json.loads(capsys.readouterr().out)
    outputs = [output["output"] for output in result["outputs"]]
    assert outputs == [spec.name for spec in bundle.manifest.contract.outputs]
    assert all(
        output["passed"] and 0 < output["max_abs"] < 0.02 and output["steps"] > 15 for output in result["outputs"]
    )


@pytest.mark.parametrize("step", [0, -1], ids=["first step", "last step"])
@pytest.mark.parametrize(("change", "message"), PLANTED.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_fault_in_either_file_is_found(bundle, saved, tmp_path, change, message, step):
    ours, theirs = saved / "outputs.json", saved / "onnxruntime.json"
    with pytest.raises(CheckFailed, match=message):
        compare_outputs(bundle, ours, changed(theirs, tmp_path / "theirs.json", change, step), 1e9, 0)
    with pytest.raises(CheckFailed, match=message):
        compare_outputs(bundle, changed(ours, tmp_path / "ours.json", change, step), theirs, 1e9, 0)


def test_polygraphys_own_comparison_passes_without_an_output(bundle, saved, tmp_path):
    """Why ours exists. Where Polygraphy learns to fail here, the page can say so."""
    broken = changed(saved / "outputs.json", tmp_path / "outputs.json", drop)
    tool = str(Path(sys.executable).with_name("polygraphy"))
    polygraphy = [tool, "run", str(bundle.graph_path), "--onnxrt", "--load-inputs", str(saved / "inputs.json")]
    polygraphy += ["--load-outputs", str(broken), "--atol", "0.02", "--rtol", "0.02"]
    assert subprocess.run(polygraphy, capture_output=True).returncode == 0
    files = [str(broken), str(saved / "onnxruntime.json")]
    assert main(["compare-outputs", str(bundle.folder), *files]) == 1


def test_values_beyond_the_tolerance_fail_with_their_place(bundle, saved, tmp_path, capsys):
    def shift(outputs):
        outputs[HIDDEN] = outputs[HIDDEN].copy()
        outputs[HIDDEN][0, 0, 5] += 1

    theirs = changed(saved / "onnxruntime.json", tmp_path / "onnxruntime.json", shift, step=1)
    (failed,) = [r for r in compare_outputs(bundle, saved / "outputs.json", theirs, 0.02, 0.02) if not r.passed]
    assert (failed.output, failed.at, failed.worst.worst_index) == (HIDDEN, 1, (0, 0, 5))
    assert failed.worst.max_abs == pytest.approx(1, abs=0.02)
    assert main(["compare-outputs", str(bundle.folder), str(saved / "outputs.json"), str(theirs)]) == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith("onnxruntime.json: FAILED")


def test_missing_steps_are_refused_with_both_numbers(bundle, saved, tmp_path):
    results = RunResults()
    for name, iterations in RunResults.load(str(saved / "onnxruntime.json")):
        results.append((name, list(iterations)[:-1]))
    results.save(str(tmp_path / "short.json"))
    n_steps = len(load_json(str(saved / "inputs.json")))
    with pytest.raises(CheckFailed, match=f"got {n_steps - 1} steps, expected {n_steps}"):
        compare_outputs(bundle, saved / "outputs.json", tmp_path / "short.json", 1e9, 0)


def test_every_runner_of_a_file_is_compared(bundle, saved, tmp_path):
    both = RunResults()
    for path in (saved / "outputs.json", changed(saved / "onnxruntime.json", tmp_path / "b.json", drop)):
        both.extend(RunResults.load(str(path)))
    both.save(str(tmp_path / "both.json"))
    with pytest.raises(CheckFailed, match=r"both\.json, onnxrt.*: step 0: the output present\.0\.key is missing"):
        compare_outputs(bundle, saved / "outputs.json", tmp_path / "both.json", 1e9, 0)
    with pytest.raises(InputError, match="expected those of one runner"):
        compare_outputs(bundle, tmp_path / "both.json", saved / "outputs.json", 1e9, 0)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "5", '"x"', '[["a", 5]]', '{"lst": []}'])
def test_a_file_that_is_not_one_of_outputs_is_refused_by_name(bundle, saved, tmp_path, text):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(InputError, match=r"bad\.json"):
        compare_outputs(bundle, saved / "outputs.json", tmp_path / "bad.json", 0.02, 0.02)
    with pytest.raises(InputError, match=r"inputs\.json"):
        compare_outputs(bundle, saved / "outputs.json", saved / "inputs.json", 0.02, 0.02)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_tolerance_that_is_none_is_refused(bundle, saved, value):
    with pytest.raises(InputError, match="atol: got"):
        compare_outputs(bundle, saved / "outputs.json", saved / "onnxruntime.json", value, 0)
    with pytest.raises(InputError, match="no such file"):
        compare_outputs(bundle, saved / "outputs.json", saved / "nowhere.json", 0, 0)
