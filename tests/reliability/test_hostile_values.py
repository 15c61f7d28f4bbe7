"""Extreme and hostile values: each ends in the project's own error, never in a traceback."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import engines.commands.main
import runtime.commands.main
from exporter.bundle.bundle import Bundle
from exporter.common.errors import BundleError, InputError
from exporter.export import ExportRequest, export_bundle
from exporter.model.weights import RandomWeights
from exporter.spec.catalogue import ModelConfig
from exporter.spec.unit import Unit
from runtime import DecodeSession
from runtime.text.sampling import Sampler
from tests.conftest import TINY

pytestmark = pytest.mark.slow


@pytest.fixture
def damaged(tiny_bundle, tmp_path):
    """Makes a bundle whose manifest is changed by a function of its JSON data, or replaced by a text."""

    def make(change):
        folder = tmp_path / "bundle"
        shutil.copytree(tiny_bundle("block").folder, folder)
        path = folder / "manifest.json"
        if isinstance(change, str):
            path.write_text(change)
        else:
            data = json.loads(path.read_text())
            change(data)
            path.write_text(json.dumps(data))
        return folder

    return make


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["files"]["model.onnx"].update(size_bytes=float("inf")),
        lambda m: m["unit"].update(n_layers=10**30),
        lambda m: m["unit"].update(first_layer="0"),
        lambda m: m["unit"].update(first_layer=-1),
        lambda m: m["unit"].update(first_layer=3),
        lambda m: m["unit"].update(component="attention"),
        lambda m: m.update(opset=None),
        lambda m: m.update(dtype="x" * 10**6),
        lambda m: m["config"].update(intermediate_size=10**400),
        lambda m: m["config"].update(n_heads=10**30),
        lambda m: m["config"].update(rope_theta=10**400),
        "[" * 100_000,
        '{"a":' * 100_000,
    ],
)
def test_a_hostile_manifest_is_refused_in_a_few_words(damaged, change):
    with pytest.raises(BundleError) as caught:
        Bundle.open(damaged(change))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "change",
    [
        {"file": None},
        {"file": "../x"},
        {"lineage": []},
        {"size_bytes": "1"},
        {"options": {}},
        {"profiles": [{}]},
        {"build_seconds": None},
        {"dtypes": 3},
    ],
)
def test_a_hostile_engine_record_is_refused_by_the_command(tiny_bundle, tmp_path, capsys, change):
    from engines.building.build import BuildRequest, build_bundle
    from engines.library.backend import choose_backend

    folder = tmp_path / "bundle"
    shutil.copytree(tiny_bundle("block", "fp16").folder, folder)
    build_bundle(Bundle.open(folder), choose_backend("tensorrt-rtx"), BuildRequest(2, 8, 32))
    data = json.loads((folder / "engines.json").read_text())
    data["engines"][0].update(change)
    (folder / "engines.json").write_text(json.dumps(data))
    assert engines.commands.main.main(["inspect", str(folder)]) == 2
    assert "engines.json: it is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("max_positions", [1, 2, 7, 8, 9])
def test_every_number_of_positions_validates(tmp_path, max_positions):
    request = ExportRequest(TINY, Unit.parse("block", TINY), RandomWeights(TINY, 0), "fp32", max_positions)
    report = export_bundle(request, tmp_path / "bundle").read_report()["validation"]
    longest = max(len(c["shapes"]) for c in report["meaning"]["comparisons"])
    assert report["passed"] and longest >= min(max_positions, 4)  # more than one step of 1×1 where more fits


@pytest.mark.parametrize(("hidden_size", "intermediate_size"), [(4, 1), (1, 4)])
def test_units_of_width_one_can_be_exported(tmp_path, hidden_size, intermediate_size):
    config = ModelConfig(hidden_size, 1, 2, 1, 4, intermediate_size, 5, 16)
    export_bundle(
        ExportRequest(config, Unit.parse("component:swiglu_mlp", config), RandomWeights(config, 0), "fp32"),
        tmp_path / "bundle",
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.prefill([[1, 2], [3]]),
        lambda s: s.prefill(np.ones((3, 2), int), lengths=[1, [2], 1]),
        lambda s: s.release([1]),
        lambda s: s.fork(None),
        lambda s: s.step({"a": [1]}),
    ],
)
def test_a_session_refuses_arguments_that_are_no_array_or_slot(tiny_bundle, call):
    with DecodeSession.open(tiny_bundle("model").folder) as session, pytest.raises(InputError):
        call(session)


@pytest.mark.parametrize("max_batch", [True, 10**30, 1.0])
def test_a_hostile_batch_is_refused(tiny_bundle, max_batch):
    with pytest.raises(InputError, match="max_batch"):
        DecodeSession.open(tiny_bundle("model").folder, max_batch=max_batch)


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-9, 1e9])
def test_extreme_temperatures_sample_a_token(temperature):
    logits = np.array([0.0, 30.0, -30.0], np.float32)
    token = Sampler(temperature=temperature)(logits)
    assert token == 1 if temperature < 1 else token in (0, 1, 2)


def test_a_prompt_that_is_not_unicode_is_refused(smollm2_bundle, capsys):
    folder = str(smollm2_bundle("fp16").folder)
    assert runtime.commands.main.main(["generate", folder, "--prompt", "a\udcff"]) == 2
    assert "not valid UTF-8" in capsys.readouterr().err
