"""`python -m engines` as its users run it: what it refuses, what it builds, and what an interrupted build leaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from engines.building.publishing import EngineRecord, read_records
from engines.commands.main import main
from engines.library.usable_engines import check_engine, check_lineage
from exporter.bundle.bundle import ENGINES_FILE, Bundle, sha256_of
from exporter.bundle.manifest import GRAPH_FILE
from exporter.common.errors import InputError
from exporter.export import ExportRequest, export_bundle
from exporter.model.weights import RandomWeights
from exporter.placing.temporaries import temporary_file
from exporter.spec.unit import Unit
from tests.conftest import MAX_POSITIONS, ROOT, TINY

pytestmark = pytest.mark.slow

ENGINE = "model.c64.tensorrt-rtx.engine"
SHAPES = {  # of the tiny block's inputs, by the size of batch, sequence and total
    which: {
        "hidden_states": (batch, sequence, 64),
        "position_ids": (batch, sequence),
        "write_indices": (batch,),
        "attention_mask": (batch, total),
        "past_key_values.0.key": (batch, 2, 64, 16),
        "past_key_values.0.value": (batch, 2, 64, 16),
    }
    for which, (batch, sequence, total) in {"min": (1, 1, 1), "opt": (2, 4, 32), "max": (3, 8, 64)}.items()
}


@pytest.fixture(autouse=True)
def no_gpu_and_no_tensorrt(monkeypatch):
    """The same machine for every test, also where there is a GPU."""
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    for module in ("library.backend", "building.build", "building.inspection", "building.refit"):
        monkeypatch.setattr(f"engines.{module}.visible_gpus", list)


@pytest.fixture
def bundle(tiny_bundle, tmp_path) -> Path:
    """A copy of the tiny block's bundle."""
    return Path(shutil.copytree(tiny_bundle("block", "fp16").folder, tmp_path / "bundle"))


@pytest.fixture(scope="module")
def built(tiny_bundle, tmp_path_factory) -> Path:
    """The tiny block with one engine; not to be written to."""
    folder = Path(shutil.copytree(tiny_bundle("block", "fp16").folder, tmp_path_factory.mktemp("built") / "bundle"))
    assert main(["build", str(folder), "--backend", "tensorrt-rtx"]) == 0
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def spelt(which: str, spelling: str) -> list[str]:
    if spelling == "trtexec":
        return [
            f"--{which}-shapes",
            ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in SHAPES[which].items()),
        ]
    return [f"--{which}-shapes", *(f"{name}:[{','.join(map(str, shape))}]" for name, shape in SHAPES[which].items())]


# --- what it refuses ---------------------------------------------------------------------------------------------------


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
    [[], ["BUNDLE", "--onnx", "x.onnx", "-o", "out"], ["--onnx", "x.onnx"], ["BUNDLE", "-o", "out"]],
    ids=str,
)
def test_a_build_takes_either_a_bundle_or_an_onnx_file_with_an_output(capsys, arguments):
    assert "give either a BUNDLE, or --onnx FILE with -o FOLDER" in refusal(capsys, "build", *arguments)


@pytest.mark.parametrize("command", ["build", "inspect", "refit"])
def test_a_missing_bundle_is_refused_with_the_command_that_makes_one(capsys, tmp_path, command):
    message = refusal(capsys, command, tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in message
    assert "python -m exporter export" in message


def test_a_missing_onnx_file_is_refused_and_its_output_is_not_made(capsys, tmp_path):
    assert "x.onnx: no such file" in refusal(capsys, "build", "--onnx", tmp_path / "x.onnx", "-o", tmp_path / "out")
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--backend tensorrtx", "expected one of auto, tensorrt, tensorrt-rtx"),
        ("--backend tensorrt", "pip install 'blockline[tensorrt]'"),
        ("--min-shapes x=1 --opt-shapes x:1 --max-shapes x:1", "got 'x=1', expected NAME:1x16"),
        ("--min-shapes x:1", "got 1 --min-shapes, 0 --opt-shapes and 0 --max-shapes"),
        (
            "--min-shapes x:1 --opt-shapes x:1 --max-shapes x:1 --max-batch 2",
            "--max-batch or --max-seq-len beside explicit shapes",
        ),
        ("--max-batch 0", "max_batch: got 0"),
        ("--max-seq-len 65", "max_seq_len: got 65, expected at most the cache capacity 64"),
        ("--max-seq-len 33 --cache-capacity 32", "max_seq_len: got 33, expected at most the cache capacity 32"),
        ("--cache-capacity 65", "cache_capacity: got 65"),
        ("--cache-capacity 0", "cache_capacity: got 0"),
        ("--workspace 0", "workspace: got 0 MiB"),
        ("--builder-optimization-level 9", "builder-optimization-level: got 9, expected 0 to 5"),
        (
            "--profiling-verbosity loud",
            "profiling-verbosity: got 'loud', expected one of layer_names_only, none, detailed",
        ),
        ("--hardware-compatibility turing", "hardware-compatibility: got 'turing', expected one of none, ampere_plus"),
        ("--hardware-compatibility ampere_plus", "hardware-compatibility: tensorrt-rtx"),
        ("--timing-cache x.cache", "timing-cache: tensorrt-rtx"),
        ("--version-compatible", "version-compatible: tensorrt-rtx"),
        ("--strip-plan", "strip-plan: tensorrt-rtx"),
        ("--refit", "refit: tensorrt-rtx"),
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


def test_a_capacity_for_a_graph_without_a_cache_is_refused(capsys, tiny_bundle):
    folder = tiny_bundle("component:rms_norm", "fp16").folder
    assert "cache_capacity: got 64 for a component:rms_norm" in refusal(
        capsys, "build", folder, "--cache-capacity", "64"
    )


def test_a_damaged_record_is_refused(capsys, bundle):
    (bundle / ENGINES_FILE).write_text("{")
    assert "it is damaged" in refusal(capsys, "inspect", bundle)


def test_refit_of_an_engine_not_built_for_it_is_refused_with_the_options_that_are(capsys, built):
    assert "build again with --refit or --strip-plan" in refusal(capsys, "refit", built)


def test_refit_of_an_unknown_engine_is_refused_with_the_known_ones(capsys, built):
    assert ENGINE in refusal(capsys, "refit", built, "--engine", "other.engine")


# --- what it builds ----------------------------------------------------------------------------------------------------


def only_record(folder: Path) -> EngineRecord:
    (record,) = read_records(folder)
    return record


def test_a_build_leaves_the_engine_its_graph_and_one_record_and_nothing_else(built, tiny_bundle):
    assert set(names(built)) - set(names(tiny_bundle("block", "fp16").folder)) == {
        ENGINE,
        "model.c64.onnx",
        ENGINES_FILE,
    }
    record = only_record(built)
    assert (record.file, record.graph_file, record.cache_capacity, record.backend) == (
        ENGINE,
        "model.c64.onnx",
        64,
        "tensorrt-rtx",
    )


def test_the_record_has_the_size_and_checksum_of_the_engine(built):
    record = only_record(built)
    assert record.size_bytes == (built / ENGINE).stat().st_size > 0
    assert record.sha256 == sha256_of(built / ENGINE)


def test_the_record_has_the_origin_and_the_dtypes(built):
    record, opened = only_record(built), Bundle.open(built, verify="full")
    check_lineage(opened, record)
    contract = opened.manifest.contract
    assert record.dtypes == {spec.name: spec.dtype for spec in (*contract.inputs, *contract.outputs)}


def test_building_again_replaces_the_record(bundle):
    assert main(["build", str(bundle)]) == 0
    assert main(["build", str(bundle), "--max-batch", "2", "--tf32"]) == 0
    record = only_record(bundle)
    assert record.options["tf32"] is True
    assert record.profiles[0]["ranges"]["write_indices"]["max"] == [2]
    check_engine(bundle, record, verify="full")


@pytest.mark.parametrize("spelling", ["trtexec", "Polygraphy"])
def test_explicit_shapes_build_and_are_recorded(bundle, spelling):
    assert main(["build", str(bundle), *(text for which in SHAPES for text in spelt(which, spelling))]) == 0
    (profile,) = only_record(bundle).profiles
    for which, shapes in SHAPES.items():
        assert {name: tuple(r[which]) for name, r in profile["ranges"].items()} == shapes


def test_an_onnx_file_builds_into_a_folder_of_its_own(bundle, tmp_path):
    before = names(bundle)
    assert (
        main(["build", "--onnx", str(bundle / GRAPH_FILE), "-o", str(tmp_path / "out"), "--cache-capacity", "64"]) == 0
    )
    assert names(tmp_path / "out") == [ENGINES_FILE, "model.tensorrt-rtx.engine"]
    check_engine(tmp_path / "out", only_record(tmp_path / "out"), verify="full")
    assert names(bundle) == before


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_capacity_below_one_is_refused_for_an_onnx_file_too(capsys, bundle, tmp_path, capacity):
    message = refusal(
        capsys, "build", "--onnx", bundle / GRAPH_FILE, "-o", tmp_path / "out", "--cache-capacity", capacity
    )
    assert f"cache_capacity: got {capacity}" in message


def test_a_graph_without_a_cache_is_not_limited_by_one(tiny_bundle, tmp_path):
    folder = shutil.copytree(tiny_bundle("component:rms_norm", "fp16").folder, tmp_path / "bundle")
    assert main(["build", str(folder), "--max-seq-len", "4096"]) == 0


# --- what it shows -----------------------------------------------------------------------------------------------------


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


# --- what an interrupted build leaves ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large_bundle(tmp_path_factory) -> Path:
    """Many layers of the tiny model, which take seconds to build; not to be written to."""
    config = replace(TINY, n_layers=20)
    folder = tmp_path_factory.mktemp("large") / "bundle"
    export_bundle(
        ExportRequest(config, Unit.parse("stack", config), RandomWeights(config, 0), "fp16", MAX_POSITIONS),
        folder,
        validated=False,
    )
    return folder


def hear_signals() -> None:
    """A shell starts what runs in its background with SIGINT ignored, and a child would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def signalled_build(folder: Path, number: int) -> int:
    """Builds in a process of its own, sends it a signal while TensorRT is at work, and returns its exit status."""
    command = [sys.executable, "-m", "engines", "build", str(folder), "--backend", "tensorrt-rtx"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=hear_signals
    )
    try:
        deadline = time.monotonic() + 60
        while not list(folder.glob(".*.partial-*")):
            assert process.poll() is None, "it ended before it began to build"
            assert time.monotonic() < deadline, "it never began to build"
            time.sleep(0.01)
        time.sleep(0.5)
        assert process.poll() is None, "it was done too early: give it more layers"
        process.send_signal(number)
        return process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()


def test_an_interrupted_build_exits_130_and_leaves_the_bundle_as_it_was(large_bundle, tmp_path):
    folder = Path(shutil.copytree(large_bundle, tmp_path / "bundle"))
    assert signalled_build(folder, signal.SIGINT) == 130
    assert names(folder) == names(large_bundle)


def test_a_killed_build_leaves_no_engine_and_the_next_one_removes_its_partial_file(large_bundle, bundle, tmp_path):
    folder = Path(shutil.copytree(large_bundle, tmp_path / "large"))
    assert signalled_build(folder, signal.SIGKILL) == -signal.SIGKILL
    (partial,) = set(names(folder)) - set(names(large_bundle))
    assert partial.startswith(f".{ENGINE}.partial-")
    assert read_records(folder) == []
    (folder / partial).rename(bundle / partial)  # the next build is of the small bundle, to be quick
    assert main(["build", str(bundle)]) == 0
    assert [name for name in names(bundle) if "partial" in name] == []
    check_engine(bundle, only_record(bundle), verify="full")


def test_the_partial_file_of_a_build_still_at_work_is_kept(tmp_path):
    with temporary_file(tmp_path, "x.engine") as first, temporary_file(tmp_path, "x.engine") as second:
        assert first != second
        assert names(tmp_path) == sorted([first.name, second.name])
    assert names(tmp_path) == []


def test_a_partial_file_taken_for_a_leftover_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    """Two builds at once: the other one removes this one's file between its making and its locking."""
    make, made = tempfile.mkstemp, []

    def raced(*arguments, **keywords):
        made.append(make(*arguments, **keywords))
        if len(made) == 1:
            os.unlink(made[0][1])
        return made[-1]

    monkeypatch.setattr(tempfile, "mkstemp", raced)
    with temporary_file(tmp_path, "x.engine") as path:
        assert path.is_file()


def test_a_body_that_fails_leaves_no_file(tmp_path):
    with pytest.raises(InputError, match="No space left"), temporary_file(tmp_path, "x.engine"):
        raise OSError(28, os.strerror(28))
    assert names(tmp_path) == []


def test_verify_finds_a_changed_byte_of_an_engine(tiny_bundle, tmp_path, capsys):
    import exporter.commands.main
    from engines.building.build import BuildRequest, build_bundle
    from engines.library.backend import choose_backend
    from exporter.bundle.bundle import Bundle

    folder = tmp_path / "bundle"
    shutil.copytree(tiny_bundle("block", "fp16").folder, folder)
    record = build_bundle(Bundle.open(folder), choose_backend("tensorrt-rtx"), BuildRequest(2, 8, 32))
    assert exporter.commands.main.main(["verify", str(folder)]) == 0
    assert record.file in capsys.readouterr().err
    content = bytearray((folder / record.file).read_bytes())
    content[5000] ^= 1
    (folder / record.file).write_bytes(content)
    assert exporter.commands.main.main(["verify", str(folder)]) == 2
    assert f"{record.file}: it is not the file that was built (another SHA-256)" in capsys.readouterr().err
