"""What `python -m engines` refuses, with which message, and that it then changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.commands.main import main
from exporter.bundle.bundle import ENGINES_FILE
from exporter.bundle.manifest import GRAPH_FILE
from tests.engines.commands.conftest import ENGINE, SHAPES, names, spelt


def refusal(capsys, *arguments: str | Path) -> str:
    """Runs a command that is refused and returns its one line."""
    assert main([*map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = [line for line in captured.err.splitlines() if not line.startswith("backend:")]
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["BUNDLE", "--onnx", "x.onnx", "-o", "out"],
        ["--onnx", "x.onnx"],
        ["BUNDLE", "-o", "out"],
        ["BUNDLE", "--onnx="],
        ["BUNDLE", "-o", ""],
    ],
    ids=str,
)
def test_a_build_takes_either_a_bundle_or_an_onnx_file_with_an_output(capsys, arguments):
    assert "give either a BUNDLE, or --onnx FILE with -o FOLDER" in refusal(capsys, "build", *arguments)


@pytest.mark.parametrize("command", ["build", "inspect", "refit"])
def test_a_missing_bundle_is_refused_with_the_command_that_makes_one(capsys, tmp_path, command):
    message = refusal(capsys, command, tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in message
    assert "python -m exporter export" in message


def test_an_empty_output_is_not_the_current_folder(capsys, monkeypatch, bundle, tmp_path):
    monkeypatch.chdir(tmp_path)
    before = names(tmp_path)
    assert "output: got an empty path" in refusal(capsys, "build", "--onnx", bundle / GRAPH_FILE, "-o", "")
    assert names(tmp_path) == before


def test_a_missing_onnx_file_is_refused_and_its_output_is_not_made(capsys, tmp_path):
    assert "x.onnx: no such file" in refusal(capsys, "build", "--onnx", tmp_path / "x.onnx", "-o", tmp_path / "out")
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--backend tensorrtx", "expected one of auto, tensorrt, tensorrt-rtx"),
        ("--backend tensorrt", "pip install 'blockline[tensorrt]'"),
        ("--min-shapes x=1 --opt-shapes x:1 --max-shapes x:1", "got 'x=1', expected NAME:1x16"),
        ("--min-shapes x:1", "got 1 min_shapes, 0 opt_shapes and 0 max_shapes"),
        (
            "--min-shapes x:1 --opt-shapes x:1 --max-shapes x:1 --max-batch 2",
            "max_batch or max_seq_len beside explicit shapes",
        ),
        ("--max-batch 0", "max_batch: got 0"),
        ("--max-seq-len 65", "max_seq_len: got 65, expected at most the cache capacity 64"),
        ("--max-seq-len 33 --cache-capacity 32", "max_seq_len: got 33, expected at most the cache capacity 32"),
        ("--cache-capacity 65", "cache_capacity: got 65"),
        ("--cache-capacity 0", "cache_capacity: got 0"),
        ("--workspace 0", "workspace_mib: got 0, expected 1 to"),
        ("--builder-optimization-level 9", "builder_optimization_level: got 9, expected 0 to 5"),
        (
            "--profiling-verbosity loud",
            "profiling_verbosity: got 'loud', expected one of layer_names_only, none, detailed",
        ),
        ("--hardware-compatibility turing", "hardware_compatibility: got 'turing', expected one of none, ampere_plus"),
        ("--hardware-compatibility ampere_plus", "hardware_compatibility: tensorrt-rtx"),
        ("--timing-cache x.cache", "timing_cache: tensorrt-rtx"),
        ("--version-compatible", "version_compatible: tensorrt-rtx"),
        ("--strip-plan", "strip_plan: tensorrt-rtx"),
        ("--refit", "refit=True: tensorrt-rtx"),
    ],
)
def test_a_build_that_cannot_be_is_refused_by_name_and_leaves_the_bundle_as_it_was(capsys, bundle, arguments, message):
    before = names(bundle)
    assert message in refusal(capsys, "build", bundle, *arguments.split())
    assert names(bundle) == before


def test_explicit_shapes_beyond_the_cache_are_refused(capsys, bundle):
    shapes = [
        text.replace("attention_mask:3x64", "attention_mask:3x65")
        for which in SHAPES
        for text in spelt(which, "trtexec")
    ]
    assert "reads up to 65 cached tokens, the cache capacity is 64" in refusal(capsys, "build", bundle, *shapes)


@pytest.mark.parametrize("spelling", ["trtexec", "Polygraphy"])
@pytest.mark.parametrize(
    ("which", "changed", "message"),
    [
        ("max", {"position_ids": (3, 4)}, "sequence_length: got 8 in hidden_states and 4 in position_ids"),
        ("max", {"attention_mask": (4, 64)}, "batch_size: got 3 in hidden_states and 4 in attention_mask"),
        ("max", {"write_indices": (4,)}, "batch_size: got 3 in hidden_states and 4 in write_indices"),
        ("max", {"past_key_values.0.value": (4, 2, 64, 16)}, "batch_size: got 3 in hidden_states and 4 in past_key"),
        ("opt", {"attention_mask": (2, 3)}, "got 4 new tokens in hidden_states and 3 tokens to read"),
        ("min", {"hidden_states": (1, 2, 64), "position_ids": (1, 2)}, "got 2 new tokens in hidden_states and 1 token"),
    ],
)
def test_shapes_that_contradict_each_other_are_refused(capsys, monkeypatch, bundle, spelling, which, changed, message):
    before = names(bundle)
    monkeypatch.setitem(SHAPES, which, SHAPES[which] | changed)
    shapes = [text for kind in SHAPES for text in spelt(kind, spelling)]
    refused = refusal(capsys, "build", bundle, *shapes)
    assert f"profile 0 {which}" in refused and message in refused
    assert names(bundle) == before


def test_a_capacity_for_a_graph_without_a_cache_is_refused(capsys, tiny_bundle):
    folder = tiny_bundle("component:rms_norm", "fp16").folder
    assert "cache_capacity: got 64 for a component:rms_norm" in refusal(
        capsys, "build", folder, "--cache-capacity", "64"
    )


def test_a_damaged_record_is_refused(capsys, bundle):
    (bundle / ENGINES_FILE).write_text("{")
    assert "it is damaged" in refusal(capsys, "inspect", bundle)


def test_refit_of_an_engine_not_built_for_it_is_refused_with_the_options_that_are(capsys, built):
    message = refusal(capsys, "refit", built)
    assert "build again with refit=True or strip_plan=True (on the command line: --strip-plan, --refit)" in message


def test_refit_of_an_unknown_engine_is_refused_with_the_known_ones(capsys, built):
    assert ENGINE in refusal(capsys, "refit", built, "--engine", "other.engine")


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_capacity_below_one_is_refused_for_an_onnx_file_too(capsys, bundle, tmp_path, capacity):
    message = refusal(
        capsys, "build", "--onnx", bundle / GRAPH_FILE, "-o", tmp_path / "out", "--cache-capacity", capacity
    )
    assert f"cache_capacity: got {capacity}" in message
