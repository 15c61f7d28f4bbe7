"""The commands of the exporter: exit codes, one line for an error, JSON on stdout, and bundles from end to end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from exporter.bundle.bundle import Bundle
from exporter.bundle.manifest import DATA_FILE
from exporter.commands.main import main as exporter
from exporter.validation import tolerances
from runtime.commands.main import main as runtime
from tests.conftest import ROOT, TINY
from tests.exporter.commands.conftest import EXPORTS
from tests.support.checkpoint_folders import write_huggingface
from tests.support.command_output import json_output, refusal

# --- bad input: export ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--model llama9", ["model", "'llama9'", "llama3-8b", "smollm2-135m"]),
        ("", ["either --model", "--checkpoint"]),
        ("--checkpoint nowhere", ["nowhere", "no such folder"]),
        ("--model llama3-8b --unit lump", ["unit", "'lump'", "block", "component:NAME"]),
        ("--model llama3-8b --unit block:0", ["unit", "'block:0'"]),
        ("--model llama3-8b --unit component", ["component", "repeat_kv"]),
        ("--model llama3-8b --unit component:mlp", ["component", "'mlp'", "swiglu_mlp"]),
        ("--model llama3-8b --dtype fp8", ["dtype", "'fp8'", "fp16, fp32, bf16"]),
        ("--model llama3-8b --attention-dtype bf16", ["attention dtype", "'bf16'", "fp16 or fp32"]),
        ("--model llama3-8b --unit stack --layers 30:33", ["layers", "'30:33'", "32"]),
        ("--model llama3-8b --unit stack --layers 0", ["layers", "'0'", "32"]),
        ("--model llama3-8b --unit stack --layers 3:3", ["layers", "'3:3'"]),
        ("--model llama3-8b --unit stack --layers=-1:2", ["layers", "'-1:2'"]),
        ("--model llama3-8b --unit stack --layers few", ["layers", "'few'", "A:B"]),
        ("--model llama3-8b --layers 2", ["layers", "'2'", "stack"]),
        ("--model llama3-8b --unit model --layers 1:2", ["layers", "'1:2'", "stack"]),
        ("--model llama3-8b --max-positions 8193", ["max_positions", "8193", "8192"]),
        ("--model llama3-8b --max-positions 0", ["max_positions", "got 0", "8192"]),
        ("--model llama3-8b --unit model --logits first", ["logits", "'first'", "last, all"]),
        ("--model llama3-8b --logits all", ["logits", "'all'", "model"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_export_refuses_what_cannot_be(capsys, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    error = refusal(capsys, exporter, "export", *arguments.split(), "-o", "made")
    for words in said:
        assert words in error
    assert list(tmp_path.iterdir()) == []


def test_export_onto_a_file_is_refused_and_the_file_kept(capsys, tmp_path, checkpoint):
    (tmp_path / "file").write_text("mine")
    error = refusal(capsys, exporter, "export", "--checkpoint", checkpoint, "-o", tmp_path / "file")
    assert str(tmp_path / "file") in error
    assert "it is a file" in error
    assert (tmp_path / "file").read_text() == "mine"


def test_export_from_a_damaged_checkpoint_names_the_file(capsys, tmp_path):
    folder = write_huggingface(tmp_path / "checkpoint", TINY)
    os.truncate(folder / "model.safetensors", 5000)
    assert str(folder / "model.safetensors") in refusal(
        capsys, exporter, "export", "--checkpoint", folder, "-o", tmp_path / "bundle"
    )
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("command", ["validate", "verify"])
def test_a_missing_bundle_is_refused(capsys, tmp_path, command):
    assert "no such folder" in refusal(capsys, exporter, command, tmp_path / "nowhere")


def test_validate_refuses_a_negative_seed(capsys, bundles):
    assert "-1" in refusal(capsys, exporter, "validate", bundles("component:swiglu_mlp", "fp16"), "--seed=-1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("export --model smollm2-135m --checkpoint= -o out", "checkpoint: got an empty path"),
        ("export --model= -o out", "model: got ''"),
        ("export --model smollm2-135m --unit model --logits= -o out", "logits: got ''"),
        ("params --model smollm2-135m --roofline --bandwidth 1 --flops 1 --unit=", "unit: got ''"),
        ("import smollm2-135m --output=", "output: got an empty path"),
    ],
)
def test_an_empty_text_is_no_default(capsys, monkeypatch, tmp_path, arguments, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("exporter.checkpoint.smollm2._fetch_gguf", lambda scratch: pytest.fail("it fetches"))
    assert said in refusal(capsys, exporter, *arguments.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["export", "--model", "llama3-8b"],
        ["params"],
        ["params", "--model", "llama3-8b", "--format", "xml"],
        ["compile"],
        ["import", "gpt"],
        [],
    ],
    ids=" ".join,
)
def test_wrong_usage_of_the_exporter_exits_2(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        exporter(arguments)
    assert caught.value.code == 2
    assert "usage: blockline-export" in capsys.readouterr().err


# --- params -----------------------------------------------------------------------------------------------------------


def test_params_prints_the_numbers_of_the_specification_as_one_json_document(capsys):
    data = json_output(capsys, exporter, "params", "--model", "llama3-8b", "--format", "json")
    components = data["components"]
    rows = {
        row["name"]: (row["calculation"], row["parameters"])
        for component in components.values()
        for row in component["rows"]
    }
    assert data["model"] == "llama3-8b"
    assert rows["query projection"] == ("4,096 × 4,096", 16_777_216)
    assert rows["key projection"] == ("4,096 × (8 × 128)", 4_194_304)
    assert rows["value projection"] == ("4,096 × (8 × 128)", 4_194_304)
    assert rows["output projection"] == ("4,096 × 4,096", 16_777_216)
    assert rows["gate projection"] == ("4,096 × 14,336", 58_720_256)
    assert rows["up projection"] == ("4,096 × 14,336", 58_720_256)
    assert rows["down projection"] == ("14,336 × 4,096", 58_720_256)
    totals = {name: (component["per_block"], component["all_blocks"]) for name, component in components.items()}
    assert totals["prepare_qkv"] == (25_165_824, 805_306_368)
    assert totals["merge_project"] == (16_777_216, 536_870_912)
    assert totals["swiglu_mlp"] == (176_160_768, 5_637_144_576)
    assert totals["attention_norm"][0] == totals["ffn_norm"][0] == 4096
    assert components["swiglu_mlp"]["per_block_bytes"]["fp16"] == 336 * 2**20
    assert [step["result"] for step in data["mlp_width"]] == [16_384, 10_922, 14_198, 14_336]
    assert data["gelu_mlp"]["same_width"]["parameters"] == 117_440_512
    assert data["gelu_mlp"]["same_width"]["bytes"]["fp16"] == 224 * 2**20
    assert data["gelu_mlp"]["width_4d"]["parameters"] == 134_217_728
    assert data["model_parameters"] == 8_030_261_248
    assert data["decode_token"]["past_len"] == 1000


def test_params_prints_its_tables_to_stderr(capsys):
    assert exporter(["params", "--model", "smollm2-135m", "--past-len", "7"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("Totals\n")
    assert "smollm2-135m: swiglu_mlp" in captured.err
    assert "P = 7" in captured.err


@pytest.mark.parametrize(
    ("arguments", "said"), [(["--model", "gpt-2"], "'gpt-2'"), (["--model", "llama3-8b", "--past-len=-1"], "-1")]
)
def test_params_refuses_what_cannot_be(capsys, arguments, said):
    assert said in refusal(capsys, exporter, "params", *arguments)


# --- export to verify -------------------------------------------------------------------------------------------------


@pytest.fixture
def block(bundles, tmp_path) -> Path:
    return Path(shutil.copytree(bundles("block", "fp32"), tmp_path / "block"))


@pytest.mark.parametrize(("unit", "dtype"), EXPORTS)
def test_an_export_is_validated_and_can_be_verified_and_validated_again(capsys, bundles, unit, dtype):
    folder = bundles(unit, dtype)
    opened = Bundle.open(folder, verify="full")
    assert (opened.manifest.unit.kind, opened.manifest.dtype, opened.manifest.weights) == (
        unit.partition(":")[0],
        dtype,
        {"source": "checkpoint"},
    )
    assert opened.read_report()["validation"]["passed"]
    assert exporter(["verify", str(folder)]) == 0
    again = json_output(capsys, exporter, "validate", folder, "--format", "json")
    assert again["passed"]
    assert again["meaning"]["through"] == ("the graph itself" if dtype == "fp32" else "float32 twin")
    assert 0 < again["meaning"]["max_error"] <= again["meaning"]["tolerance"]["allowed"]


def test_the_arguments_of_an_export_are_in_its_manifest(bundles):
    stack = Bundle.open(bundles("stack", "fp16")).manifest
    assert (stack.unit.first_layer, stack.unit.n_layers, stack.attention_dtype) == (1, 2, "fp32")
    model = Bundle.open(bundles("model", "bf16")).manifest
    assert (model.max_positions, model.end_token_ids, model.unit.n_layers) == (64, (2,), 3)
    assert Bundle.open(bundles("block", "fp32")).manifest.max_positions == TINY.context_length


def test_half_precision_halves_the_data(bundles):
    values = 3 * TINY.hidden_size * TINY.intermediate_size
    assert values * 2 <= (bundles("component:swiglu_mlp", "fp16") / DATA_FILE).stat().st_size < values * 4


def test_an_export_says_that_weights_are_random_and_whether_it_validated(capsys, tmp_path):
    target = tmp_path / "bundle"
    arguments = ["--model", "smollm2-135m", "--unit", "component:rms_norm", "--seed", "5", "--no-validate"]
    assert exporter(["export", *arguments, "-o", str(target)]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "random, from seed 5" in captured.err
    assert "not validated" in captured.err
    assert Bundle.open(target).manifest.weights == {"source": "random", "seed": 5}
    assert "validation" not in Bundle.open(target).read_report()


def test_a_corrupted_data_file_fails_verify(capsys, block):
    data = bytearray((block / DATA_FILE).read_bytes())
    data[100] ^= 1
    (block / DATA_FILE).write_bytes(data)
    error = refusal(capsys, exporter, "verify", block)
    assert DATA_FILE in error
    assert "SHA-256" in error


@pytest.mark.parametrize("main", [exporter, runtime])
def test_a_truncated_data_file_is_refused_by_every_command(capsys, block, main):
    os.truncate(block / DATA_FILE, 4096)
    assert "4,096 bytes" in refusal(capsys, main, "validate" if main is exporter else "decode", block)


def test_a_failed_validation_exits_1_and_leaves_no_bundle(capsys, monkeypatch, tmp_path, checkpoint):
    monkeypatch.setitem(tolerances.OUTPUTS["eager", "onnxruntime"], "fp32", ({"component": 0.0}, "planted"))
    arguments = ["--checkpoint", str(checkpoint), "--unit", "component:swiglu_mlp", "-o", str(tmp_path / "bundle")]
    assert exporter(["export", *arguments]) == 1
    error = capsys.readouterr().err
    assert "failed: " in error
    assert "delta_mlp differs by" in error
    assert list(tmp_path.iterdir()) == []


def test_a_failed_validation_leaves_the_old_bundle(monkeypatch, block, checkpoint):
    before = {path.name: path.read_bytes() for path in block.iterdir()}
    monkeypatch.setitem(tolerances.OUTPUTS["eager", "onnxruntime"], "fp32", ({"component": 0.0}, "planted"))
    assert (
        exporter(["export", "--checkpoint", str(checkpoint), "--unit", "component:swiglu_mlp", "-o", str(block)]) == 1
    )
    assert {path.name: path.read_bytes() for path in block.iterdir()} == before


def test_validate_exits_1_where_the_comparison_fails_and_records_it(capsys, monkeypatch, block):
    monkeypatch.setitem(tolerances.OUTPUTS["eager", "onnxruntime"], "fp32", ({"block": 0.0}, "planted"))
    monkeypatch.setitem(tolerances.OPERATIONS, "projection", (0.0, 0.0, 0.0, 0.0, "planted"))
    assert exporter(["validate", str(block), "--format", "json"]) == 1
    assert not json.loads(capsys.readouterr().out)["passed"]
    assert not Bundle.open(block).read_report()["validation"]["passed"]


# --- as real processes ------------------------------------------------------------------------------------------------


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=120)


HELP = {exporter: ["params", "import", "export", "validate", "verify"], runtime: ["decode", "generate", "report"]}


@pytest.mark.parametrize(
    ("main", "command"), [(main, command) for main, commands in HELP.items() for command in [None, *commands]]
)
def test_help_exits_0(capsys, main, command):
    with pytest.raises(SystemExit) as caught:
        main([*([command] if command else []), "--help"])
    assert caught.value.code == 0
    assert (
        f"usage: {'blockline-export' if main is exporter else 'blockline-run'}{f' {command}' if command else ''}"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("package", ["exporter", "runtime"])
def test_help_of_the_module_lists_its_commands(package):
    result = run(package, "--help")
    assert (result.returncode, result.stderr) == (0, "")
    for command in HELP[exporter if package == "exporter" else runtime]:
        assert command in result.stdout


def test_bad_input_to_a_real_process_exits_2_with_one_line():
    result = run("exporter", "export", "--model", "llama9", "-o", "build/never")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: model: got 'llama9'")
    assert len(result.stderr.splitlines()) == 1
    assert not (ROOT / "build" / "never").exists()
