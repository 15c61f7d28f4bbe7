"""What `python -m engines inspect` prints."""

from __future__ import annotations

import json
import shutil

import pytest

from engines.commands.main import main
from exporter.bundle.bundle import ENGINES_FILE, sha256_of
from tests.engines.commands.conftest import ENGINE


@pytest.fixture
def inspected(built, capsys) -> dict:
    assert main(["inspect", str(built), "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_inspect_shows_the_network_as_it_was_meant(inspected):
    assert inspected["backend"] == "tensorrt-rtx"
    assert inspected["kv_cache_updates"] == 2
    (attention,) = inspected["attention"]
    assert attention["name"]
    assert attention["mask"] is True
    assert (attention["causal_kind"], attention["n_heads"], attention["n_kv_heads"], attention["head_dim"]) == (
        "NONE",
        4,
        2,
        16,
    )


def test_inspect_shows_which_tensors_share_memory(inspected):
    aliases = {tensor["name"]: tensor["alias"] for tensor in inspected["io"]}
    assert {name: alias for name, alias in aliases.items() if alias} == {
        "past_key_values.0.key": "present.0.key",
        "past_key_values.0.value": "present.0.value",
        "present.0.key": "past_key_values.0.key",
        "present.0.value": "past_key_values.0.value",
    }
    assert "hidden_states_out" in aliases


def test_inspect_lists_the_engine_and_says_that_it_needs_a_gpu(inspected, built):
    (engine,) = inspected["engines"]
    assert (engine["file"], engine["sha256"]) == (ENGINE, sha256_of(built / ENGINE))
    assert "needs a GPU" in engine["usable"]


def test_inspect_says_that_an_engine_of_other_weights_is_not_usable(built, tmp_path, capsys):
    folder = shutil.copytree(built, tmp_path / "bundle")
    records = json.loads((folder / ENGINES_FILE).read_text())
    records["engines"][0]["lineage"]["model.onnx.data"] = "0" * 64
    (folder / ENGINES_FILE).write_text(json.dumps(records))
    assert main(["inspect", str(folder), "--format", "json"]) == 0
    (engine,) = json.loads(capsys.readouterr().out)["engines"]
    assert "model.onnx.data changed since it was built" in engine["usable"]


def test_inspect_writes_its_table_for_people_to_stderr(built, capsys):
    assert main(["inspect", str(built)]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "attention: 1 layers, 1 with an explicit mask and no causal kind" in captured.err
