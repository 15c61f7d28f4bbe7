"""`python -m exporter verify` names all problems of a bundle at once; a whole bundle passes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import onnx
import pytest

from engines.building.build import BuildRequest, build_parts
from engines.library.backend import choose_backend
from engines.library.gpu import Gpu
from engines.running.tensorrt_parts import find_engines
from exporter.bundle.bundle import ENGINES_FILE, REPORT_FILE, Bundle, sha256_of
from exporter.bundle.manifest import DATA_FILE, GENAI_CONFIG_FILE, GRAPH_FILE, MANIFEST_FILE
from exporter.commands.main import main
from exporter.common.errors import BundleError
from exporter.validation.verify import verify_bundle
from runtime import DecodeSession
from runtime.backends import open_stepper
from runtime.commands.main import main as runtime
from tests.conftest import TINY
from tests.support.planted_faults import doctored

ENGINE, FIXED_GRAPH = "model.c32.tensorrt-rtx.engine", "model.c32.onnx"


@pytest.fixture(scope="module")
def originals(tiny_bundle, tmp_path_factory):
    """Makes a stack in two parts with one engine each, and a growing model with a tokenizer."""
    folder = tmp_path_factory.mktemp("originals")
    shutil.copytree(tiny_bundle("stack", "fp16", "2", n_parts=2).folder, folder / "parts")
    build_parts(Bundle.open(folder / "parts"), choose_backend("tensorrt-rtx"), BuildRequest(2, 8, 32))
    shutil.copytree(tiny_bundle("model", cache="growing").folder, folder / "growing")
    (folder / "growing" / "tokenizer.json").write_text(json.dumps(_tokenizer(vocabulary=TINY.vocab_size)))
    relist(folder / "growing", "tokenizer.json")
    return folder


def _tokenizer(vocabulary: int) -> dict:
    words = {f"w{index}": index for index in range(vocabulary)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    return {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}


@pytest.fixture
def parts(originals, tmp_path) -> Path:
    return Path(shutil.copytree(originals / "parts", tmp_path / "parts"))


@pytest.fixture
def growing(originals, tmp_path) -> Path:
    return Path(shutil.copytree(originals / "growing", tmp_path / "growing"))


def problems(folder: Path) -> dict[str, list[str]]:
    """Returns what verify finds, by file."""
    found: dict[str, list[str]] = {}
    for problem in verify_bundle(folder).problems:
        found.setdefault(problem.file, []).append(problem.problem)
    return found


def relist(folder: Path, *names: str, **changes: object) -> None:
    """Writes the checksums of changed files into the manifest, so that the files match it."""
    manifest = json.loads((folder / MANIFEST_FILE).read_text()) | changes
    for name in names:
        manifest["files"][name] = {"size_bytes": (folder / name).stat().st_size, "sha256": sha256_of(folder / name)}
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))


def change(path: Path, edit) -> None:
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


# --- what passes ------------------------------------------------------------------------------------------------------


def test_a_whole_bundle_passes_and_its_document_names_every_file(originals, capsys):
    assert main(["verify", str(originals / "parts"), "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["passed"] and document["problems"] == document["other_files"] == []
    of_part = (GRAPH_FILE, DATA_FILE, ENGINES_FILE, ENGINE, FIXED_GRAPH)
    assert set(document["files"]) == {
        MANIFEST_FILE,
        REPORT_FILE,
        *(f"part{index}/{name}" for index in (0, 1) for name in of_part),
    }
    assert [engine["file"] for engine in document["engines"]] == [f"part0/{ENGINE}", f"part1/{ENGINE}"]
    assert document["written_by"].startswith("blockline ") and document["validation_passed"] is None
    assert document["versions"]["onnx"] == onnx.__version__


def test_a_growing_bundle_with_its_tokenizer_passes(originals):
    verification = verify_bundle(originals / "growing")
    assert verification.problems == () and {GENAI_CONFIG_FILE, "tokenizer.json"} <= set(verification.files)


def test_other_files_are_named_and_are_no_problem(growing, capsys):
    (growing / "notes.txt").write_text("mine")
    (growing / "old.engine").write_text("nobody's")
    assert main(["verify", str(growing)]) == 0
    assert "not looked at: notes.txt, old.engine" in capsys.readouterr().err


# --- damage is gathered, then reported once ---------------------------------------------------------------------------


def test_all_problems_are_reported_at_once_and_exit_2(parts, capsys):
    os.truncate(parts / "part0" / DATA_FILE, 4096)
    (parts / "part1" / GRAPH_FILE).unlink()
    with open(parts / "part1" / ENGINE, "r+b") as file:
        file.write(b"x")
    (parts / "part0" / ENGINE).unlink()
    (parts / REPORT_FILE).write_text("[]")
    assert main(["verify", str(parts), "--format", "json"]) == 2
    captured = capsys.readouterr()
    found = {
        problem["file"]: problem["problem"]
        for problem in json.loads(captured.out)["problems"]
        if problem["kind"] == "damage"
    }
    assert "4,096 bytes, expected" in found[f"part0/{DATA_FILE}"]
    assert "is missing" in found[f"part1/{GRAPH_FILE}"]
    assert "another SHA-256" in found[f"part1/{ENGINE}"]
    assert "it is missing" in found[f"part0/{ENGINE}"]
    assert "got a JSON list" in found[REPORT_FILE]
    error = captured.err.splitlines()
    assert error[0].startswith(f"error: bundle {parts}: ") and "problems:" in error[0] and len(error) > len(found)


def test_an_unreadable_manifest_is_the_one_problem_of_the_document(growing, capsys):
    (growing / MANIFEST_FILE).write_text("{")
    assert main(["verify", str(growing), "--format", "json"]) == 2
    document = json.loads(capsys.readouterr().out)
    (problem,) = document["problems"]
    assert problem["file"] == MANIFEST_FILE and "not JSON" in problem["problem"]


def test_a_graph_that_is_no_onnx_is_named(growing):
    (growing / GRAPH_FILE).write_bytes(b"\xff" * 100)
    assert any("cannot be read as ONNX" in problem for problem in problems(growing)[GRAPH_FILE])


# --- a graph that is as the manifest says and breaks its contract -----------------------------------------------------


def _rename_input(model: onnx.ModelProto) -> None:
    model.graph.input[1].name = "positions"


def _freeze_axis(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 2


def _widen_dtype(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT


def _lower_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 23


def _foreign_domain(model: onnx.ModelProto) -> None:
    model.graph.node[0].domain = "com.microsoft"
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))


def _part_a_cache_pair(model: onnx.ModelProto) -> None:
    scatter = next(node for node in model.graph.node if node.op_type == "TensorScatter")
    others = (node for node in model.graph.node if node.op_type == "TensorScatter" and node is not scatter)
    scatter.input[0] = next(others).input[0]


def _move_weight(model: onnx.ModelProto) -> None:
    tensor = next(tensor for tensor in model.graph.initializer if tensor.external_data)
    next(entry for entry in tensor.external_data if entry.key == "offset").value = str(10**9)


def _foreign_data(model: onnx.ModelProto) -> None:
    tensor = next(tensor for tensor in model.graph.initializer if tensor.external_data)
    next(entry for entry in tensor.external_data if entry.key == "location").value = MANIFEST_FILE


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (_rename_input, "inputs: got ('positions'"),
        (_freeze_axis, "outputs: got"),
        (_widen_dtype, "outputs: got"),
        (_lower_opset, "expected the default domain at 24 only"),
        (_foreign_domain, "com.microsoft"),
        (_part_a_cache_pair, "one TensorScatter for each of"),
        (_move_weight, "bytes 1,000,000,000 to"),
        (_foreign_data, "its data is in 'manifest.json'"),
    ],
)
def test_a_broken_contract_is_named_and_exits_1(tiny_bundle, tmp_path, capsys, fault, said):
    folder = doctored(tiny_bundle("block", "fp16"), tmp_path / "bundle", fault).folder
    assert any(said in problem for problem in problems(folder)[GRAPH_FILE])
    assert main(["verify", str(folder)]) == 1
    assert said in capsys.readouterr().err


# --- engines ----------------------------------------------------------------------------------------------------------


def test_an_engine_of_other_weights_is_named_with_both_checksums(parts):
    lineage = Bundle.open(parts).parts[1].lineage
    change(parts / "part1" / ENGINES_FILE, lambda data: data["engines"][0]["lineage"].update({DATA_FILE: "0" * 64}))
    ((name, (said,)),) = problems(parts).items()
    assert name == f"part1/{ENGINE}"
    checksums = f"SHA-256 000000000000…, the bundle's is {lineage[DATA_FILE][:12]}…"
    assert f"it came from another {DATA_FILE} ({checksums})" in said


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (
            lambda record: record["dtypes"].update(hidden_states_out="fp32"),
            "other tensors or dtypes than the bundle at hidden_states_out",
        ),
        (lambda record: record.update(cache_capacity=None), "cache_capacity None for a stack"),
        (
            lambda record: record.update(cache_capacity=65),
            "cache_capacity 65 for a stack of layers 0:1 of 64 positions",
        ),
        (lambda record: record.update(size_bytes=7), "bytes, expected 7"),
        (
            lambda record: record["profiles"][0]["ranges"]["position_ids"].update(max=[4, 1]),
            "max position_ids: got [4, 1], expected [2, 1]",
        ),
        (
            lambda record: record["profiles"][1]["ranges"]["past_key_values.1.key"].update(opt=[2, 2, 64, 16]),
            "opt past_key_values.1.key: got [2, 2, 64, 16], expected [2, 2, 32, 16]",
        ),
        (
            lambda record: record["profiles"][1]["ranges"]["attention_mask"].update(max=[2, 65]),
            "total_sequence_length is 65 in max",
        ),
        (lambda record: record["profiles"][0]["ranges"].pop("write_indices"), "expected ['attention_mask', "),
    ],
)
def test_a_record_that_does_not_fit_the_bundle_is_named(parts, edit, said):
    change(parts / "part1" / ENGINES_FILE, lambda data: edit(data["engines"][0]))
    assert any(said in problem for problem in problems(parts)[f"part1/{ENGINE}"])


@pytest.mark.parametrize("content", ["{", '{"format_version": 1, "engines": [{}]}'])
def test_damaged_records_are_named(parts, content):
    (parts / "part0" / ENGINES_FILE).write_text(content)
    assert "it is damaged" in problems(parts)[f"part0/{ENGINES_FILE}"][0]


def test_two_records_of_one_engine_are_damage(parts):
    change(parts / "part0" / ENGINES_FILE, lambda data: data["engines"].append(data["engines"][0]))
    assert f"several records of {ENGINE}" in problems(parts)[f"part0/{ENGINES_FILE}"][0]


def _other_capacity(path: Path) -> None:
    model = onnx.load(path, load_external_data=False)
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            dim.dim_value = 33 if dim.dim_value == 32 else dim.dim_value
    onnx.save(model, path)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (Path.unlink, "it is missing"),
        (lambda path: path.write_bytes(b"\xff" * 50), "it is not model.onnx with cache_capacity fixed at 32"),
        (_other_capacity, "it is not model.onnx with cache_capacity fixed at 32"),
    ],
    ids=["missing", "random data", "another capacity"],
)
def test_a_fixed_graph_that_is_not_the_bundles_is_named(parts, damage, said):
    damage(parts / "part0" / FIXED_GRAPH)
    assert said in problems(parts)[f"part0/{FIXED_GRAPH}"][0]


# --- settings and tokenizer -------------------------------------------------------------------------------------------


def test_settings_of_another_model_are_named_by_key(growing):
    change(growing / GENAI_CONFIG_FILE, lambda data: data["model"]["decoder"].update(head_size=17))
    relist(growing, GENAI_CONFIG_FILE)
    assert problems(growing) == {GENAI_CONFIG_FILE: ["model.decoder.head_size: got 17, expected 16; export again"]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "it is not JSON"),
        ("{}", "it is no tokenizer"),
        (json.dumps(_tokenizer(102)), "its largest token is 101, expected one below"),
    ],
    ids=["cut", "empty", "too large"],
)
def test_a_tokenizer_that_is_none_or_another_models_is_named(growing, content, said):
    (growing / "tokenizer.json").write_text(content)
    relist(growing, "tokenizer.json")
    assert said in problems(growing)["tokenizer.json"][0]


def test_tokens_and_settings_that_the_unit_cannot_have_are_named(growing, tiny_bundle, tmp_path):
    relist(growing, end_token_ids=[2, 101])
    assert "end_token_ids [101]" in problems(growing)[MANIFEST_FILE][0]
    block = Path(shutil.copytree(tiny_bundle("block", "fp16").folder, tmp_path / "block"))
    for name in (GENAI_CONFIG_FILE, "tokenizer.json"):
        shutil.copy(growing / name, block)
    relist(block, GENAI_CONFIG_FILE, "tokenizer.json")
    first, second, *_ = problems(block)[MANIFEST_FILE]
    assert "genai_config.json for a cache that is in_place" in first and "lists tokenizer.json for a block" in second


# --- the same checks when a bundle is opened --------------------------------------------------------------------------


def flip_byte(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(100)
        byte = file.read(1)[0]
        file.seek(100)
        file.write(bytes([byte ^ 1]))


def test_opening_names_every_damaged_file_at_once(parts):
    os.truncate(parts / "part0" / DATA_FILE, 4096)
    (parts / "part1" / GRAPH_FILE).unlink()
    expected = r"2 problems:\n  part0/model\.onnx\.data has 4,096 bytes.*\n  part1/model\.onnx is missing"
    with pytest.raises(BundleError, match=expected):
        Bundle.open(parts)


def test_changed_weights_are_refused_where_a_full_check_is_asked_for(parts, capsys):
    flip_byte(parts / "part1" / DATA_FILE)
    with DecodeSession.open(parts, cache_capacity=16):
        pass
    with pytest.raises(BundleError, match=r"part1/model\.onnx\.data has another SHA-256"):
        DecodeSession.open(parts, verify="full")
    arguments = ["decode", str(parts), "--prompt-len", "2", "--steps", "1", "--cache-capacity", "16"]
    assert runtime(arguments) == 0
    assert runtime([*arguments, "--verify", "full"]) == 2
    assert "part1/model.onnx.data has another SHA-256" in capsys.readouterr().err


def test_a_changed_engine_is_refused_where_a_full_check_is_asked_for(parts, monkeypatch):
    monkeypatch.setattr("engines.running.choose_engine.visible_gpus", lambda: [Gpu("NVIDIA Test 9000", "8.9")])
    bundle = Bundle.open(parts)
    assert [record.file for record in find_engines(bundle, None, "full")] == [ENGINE, ENGINE]
    flip_byte(parts / "part1" / ENGINE)
    assert len(find_engines(bundle, None)) == 2
    for backend in ("tensorrt", "auto"):  # auto must not take onnxruntime instead
        with pytest.raises(BundleError, match=r"part1/.*engine: it is not the file that was built"):
            open_stepper(bundle, backend, None, 1, None, "full")
