"""The commands of the runtime on bundles that the exporter made: exit codes, one line for an error, JSON on stdout."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.commands.main import main as runtime
from tests.support.command_output import json_output, refusal

HAS_NVIDIA_GPU = Path("/dev/nvidiactl").exists()


@pytest.mark.parametrize("backend", ["auto", "onnxruntime", "eager"])
def test_decode_prints_one_json_document(capsys, bundles, backend):
    arguments = [
        "--backend",
        backend,
        "--batch",
        2,
        "--prompt-len",
        5,
        "--steps",
        3,
        "--cache-capacity",
        16,
        "--format",
        "json",
    ]
    data = json_output(capsys, runtime, "decode", bundles("block", "fp32"), *arguments)
    assert (data["unit"], data["dtype"], data["cache_capacity"], data["lengths"]) == (
        "block of layers 0:1",
        "fp32",
        16,
        [8, 8],
    )
    assert (data["prefill"]["tokens"], data["decode"]["tokens"]) == (10, 6)
    assert data["decode"]["median_ms"] > 0
    assert ("eager" if backend == "eager" else "onnxruntime") in data["backend"]


def test_decode_prints_its_table_and_backend_to_stderr(capsys, bundles):
    assert runtime(["decode", str(bundles("stack", "fp16"))]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "CPUExecutionProvider" in captured.err
    assert "lengths [32]" in captured.err


@pytest.mark.parametrize(
    "command", [["decode"], ["generate", "--prompt", "x"], ["report", "--prompt", "x"]], ids=lambda command: command[0]
)
def test_runtime_refuses_a_missing_bundle(capsys, tmp_path, command):
    assert "no such folder" in refusal(capsys, runtime, command[0], tmp_path / "nowhere", *command[1:])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--backend onnx", ["backend", "'onnx'", "onnxruntime"]),
        ("--provider FancyExecutionProvider", ["'FancyExecutionProvider'", "CPUExecutionProvider"]),
        ("--backend eager --provider CPUExecutionProvider", ["eager", "CPUExecutionProvider"]),
        ("--cache-capacity 129", ["cache_capacity", "129", "128"]),
        ("--cache-capacity 0", ["cache_capacity", "0"]),
        ("--cache-capacity 16 --prompt-len 17", ["17", "16"]),
        ("--cache-capacity 16 --prompt-len 10 --steps 7", ["16"]),
        ("--batch 0", ["--batch", "0"]),
        ("--prompt-len 0", ["--prompt-len", "0"]),
        ("--steps=-1", ["--steps", "-1"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_decode_refuses_what_cannot_be(capsys, bundles, arguments, said):
    error = refusal(capsys, runtime, "decode", bundles("block", "fp32"), *arguments.split())
    for words in said:
        assert words in error


@pytest.mark.skipif(HAS_NVIDIA_GPU, reason="needs a machine without an NVIDIA GPU")
@pytest.mark.parametrize("backend", ["auto", "onnxruntime"])
def test_a_provider_that_is_not_here_is_refused_and_nothing_runs_on_the_cpu(capsys, bundles, backend):
    error = refusal(
        capsys, runtime, "decode", bundles("block", "fp32"), "--backend", backend, "--provider", "CUDAExecutionProvider"
    )
    assert "CUDAExecutionProvider" in error


def test_decode_refuses_a_component(capsys, bundles):
    error = refusal(capsys, runtime, "decode", bundles("component:swiglu_mlp", "fp16"))
    assert "component:swiglu_mlp" in error
    assert "no cache" in error


def test_decode_refuses_bf16_on_the_cpu_by_name(capsys, bundles):
    error = refusal(capsys, runtime, "decode", bundles("model", "bf16"))
    assert "bf16" in error
    assert "CPUExecutionProvider" in error


@pytest.mark.parametrize("command", ["generate", "report"])
def test_text_from_random_weights_is_refused(capsys, tiny_bundle, command):
    error = refusal(capsys, runtime, command, tiny_bundle("block").folder, "--prompt", "Once")
    assert "random" in error
    assert "--checkpoint" in error


def test_generate_refuses_a_bundle_without_a_tokenizer(capsys, bundles):
    assert "tokenizer.json" in refusal(capsys, runtime, "generate", bundles("model", "bf16"), "--prompt", "Once")


def test_decode_refuses_more_steps_than_the_cache_holds_before_it_starts(tiny_bundle, capsys):
    assert runtime(["decode", str(tiny_bundle("block").folder), "--prompt-len", "16", "--steps", "100"]) == 2
    assert (
        "need 116 tokens of cache, a sequence has 64; lower them or give --cache-capacity 116"
        in capsys.readouterr().err
    )
