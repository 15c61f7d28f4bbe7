"""The bundle folder: opening refuses damaged bundles, and writing is complete or does nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import tempfile
from pathlib import Path

import pytest

import exporter.bundle.bundle
from benchmarks.campaigns.children import run_in_child
from exporter.bundle.bundle import Bundle
from exporter.bundle.manifest import DATA_FILE, GRAPH_FILE, MANIFEST_FILE, Manifest
from exporter.commands.main import main
from exporter.common.errors import BundleError, InputError
from exporter.export import ExportRequest, export_bundle
from exporter.model.weights import RandomWeights
from exporter.placing.files import write_report
from exporter.placing.folders import new_folder
from exporter.spec.unit import Unit
from tests.conftest import MAX_POSITIONS, TINY
from tests.support import bundle_folders
from tests.support.bundle_folders import contents, identity
from tests.support.checkpoint_folders import write_huggingface

NOBODY = 65534
bundle, component = bundle_folders.bundle, bundle_folders.component  # fixtures

# --- opening ----------------------------------------------------------------------------------------------------------


def refusal(folder: Path, verify: str = "graph") -> str:
    with pytest.raises(BundleError) as caught:
        Bundle.open(folder, verify)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def edit_manifest(folder: Path, change) -> None:
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    change(manifest)
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))


def test_an_unharmed_bundle_opens_with_every_checksum(bundle):
    assert Bundle.open(bundle, verify="full").manifest.config == TINY


def test_a_moved_bundle_opens(bundle, tmp_path):
    moved = bundle.rename(tmp_path / "elsewhere")
    assert Bundle.open(moved, verify="full").folder == moved


def test_the_manifest_reads_back_as_it_was_written(tiny_bundle):
    manifest = tiny_bundle("block").manifest
    assert Manifest.from_json(manifest.to_json(), "manifest") == manifest


def test_missing_folder_is_refused(tmp_path):
    assert "no such folder" in refusal(tmp_path / "nowhere")


def test_a_file_is_no_bundle(bundle):
    assert "not a folder" in refusal(bundle / GRAPH_FILE)


def test_folder_without_a_manifest_is_refused(bundle):
    (bundle / MANIFEST_FILE).unlink()
    assert MANIFEST_FILE in refusal(bundle)


def test_manifest_that_is_not_json_is_refused(bundle):
    (bundle / MANIFEST_FILE).write_text("{")
    assert "not JSON" in refusal(bundle)


def test_manifest_that_is_not_text_is_refused(bundle):
    (bundle / MANIFEST_FILE).write_bytes(b"\xff\xfe\x00")
    assert MANIFEST_FILE in refusal(bundle)


@pytest.mark.parametrize("version", [2, 0, None, "1"])
def test_unknown_format_version_is_refused_with_both_numbers(bundle, version):
    edit_manifest(bundle, lambda manifest: manifest.update(format_version=version))
    message = refusal(bundle)
    assert f"got format_version {version!r}" in message
    assert "expected 1" in message


def test_unknown_key_is_refused_by_name(bundle):
    edit_manifest(bundle, lambda manifest: manifest.update(flavour="sweet"))
    assert "unknown keys ['flavour']" in refusal(bundle)


@pytest.mark.parametrize("key", ["config", "dtype", "weights", "files", "max_positions"])
def test_missing_key_is_refused_by_name(bundle, key):
    edit_manifest(bundle, lambda manifest: manifest.pop(key))
    assert f"missing keys ['{key}']" in refusal(bundle)


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {"hidden_size": 64}},
        {"unit": {"kind": "block", "colour": "red"}},
        {"unit": {"kind": "lump"}},
        {"dtype": "fp8"},
        {"dtype": ["fp32"]},
        {"attention_dtype": "fp8"},
        {"max_positions": "64"},
        {"max_positions": 0},
        {"weights": "random"},
        {"weights": {}},
        {"end_token_ids": 2},
        {"inputs": [{"name": "hidden_states"}]},
        {"files": ["model.onnx"]},
        {"files": {"model.onnx": {"size_bytes": "many", "sha256": ""}}},
    ],
    ids=str,
)
def test_malformed_value_is_refused(bundle, changes):
    edit_manifest(bundle, lambda manifest: manifest.update(changes))
    assert MANIFEST_FILE in refusal(bundle)


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest["config"].update(n_kv_heads=4),
        lambda manifest: manifest["config"].update(hidden_size=128),
        lambda manifest: manifest["unit"].update(kind="stack", n_layers=2),
        lambda manifest: manifest.update(dtype="fp16"),
        lambda manifest: manifest["inputs"][0].update(name="x"),
        lambda manifest: manifest["outputs"].reverse(),
        lambda manifest: manifest["cache_pairs"].pop(),
    ],
    ids=["kv heads", "width", "unit", "dtype", "input name", "output order", "cache pair"],
)
def test_tensors_that_contradict_the_config_are_refused(bundle, change):
    edit_manifest(bundle, change)
    assert "tensors are not those" in refusal(bundle)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "sub/model.onnx", "notes.txt"])
def test_manifest_that_names_a_foreign_file_is_refused(bundle, name):
    (bundle.parent / "x").write_bytes(b"")
    entry = exporter.bundle.bundle.file_entry(bundle.parent / "x")
    edit_manifest(bundle, lambda manifest: manifest["files"].update({name: entry}))
    assert name in refusal(bundle)


@pytest.mark.parametrize("name", [GRAPH_FILE, DATA_FILE])
def test_manifest_without_graph_or_data_is_refused(bundle, name):
    edit_manifest(bundle, lambda manifest: manifest["files"].pop(name))
    assert f"expected {GRAPH_FILE}, {DATA_FILE}" in refusal(bundle)


@pytest.mark.parametrize("name", [GRAPH_FILE, DATA_FILE])
def test_missing_file_is_refused_by_name(bundle, name):
    (bundle / name).unlink()
    assert f"{name} is missing" in refusal(bundle)


@pytest.mark.parametrize("name", [GRAPH_FILE, DATA_FILE])
@pytest.mark.parametrize("change", [-1, 1], ids=["truncated", "grown"])
def test_file_of_another_size_is_refused_with_both_sizes(bundle, name, change):
    size = (bundle / name).stat().st_size
    os.truncate(bundle / name, size + change)
    assert f"{name} has {size + change:,} bytes, expected {size:,}" in refusal(bundle)


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_changed_graph_is_refused(bundle):
    flip_byte(bundle / GRAPH_FILE)
    assert f"{GRAPH_FILE} has another SHA-256" in refusal(bundle)


def test_changed_data_is_refused_by_a_full_check(bundle):
    flip_byte(bundle / DATA_FILE)
    assert f"{DATA_FILE} has another SHA-256" in refusal(bundle, verify="full")


def test_unknown_verify_is_refused(bundle):
    with pytest.raises(InputError, match="'none'"):
        Bundle.open(bundle, verify="none")


# --- exporting again --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reexported(tiny_bundle, tmp_path_factory):
    """The tiny block, exported again over a copy of itself with foreign files and an outdated engine."""
    folder = tmp_path_factory.mktemp("again") / "bundle"
    shutil.copytree(tiny_bundle("block").folder, folder)
    (folder / "notes.txt").write_text("mine")
    (folder / "results" / "deep").mkdir(parents=True)
    (folder / "results" / "deep" / "table.csv").write_text("a,b")
    (folder / "link").symlink_to("notes.txt")
    (folder / "engines.json").write_text(
        json.dumps({"engines": [{"file": "old.engine", "graph_file": "model.c64.onnx"}]})
    )
    (folder / "old.engine").write_text("stale")
    (folder / "model.c64.onnx").write_text("stale")
    request = ExportRequest(TINY, Unit.parse("block", TINY), RandomWeights(TINY, 0), "fp32", MAX_POSITIONS)
    export_bundle(request, folder, validated=False)
    return folder


def test_equal_inputs_give_equal_bytes_and_a_second_export_does_not_grow(reexported, tiny_bundle):
    assert identity(reexported) == identity(tiny_bundle("block").folder)


def test_a_second_export_leaves_a_bundle_that_opens_and_nothing_beside_it(reexported):
    Bundle.open(reexported, verify="full")
    assert [path.name for path in reexported.parent.iterdir()] == ["bundle"]


def test_foreign_files_and_folders_survive_a_second_export(reexported):
    assert (reexported / "notes.txt").read_text() == "mine"
    assert (reexported / "results" / "deep" / "table.csv").read_text() == "a,b"
    assert (reexported / "link").readlink() == Path("notes.txt")


def test_engines_of_the_replaced_bundle_are_gone(reexported):
    assert {"engines.json", "old.engine", "model.c64.onnx"}.isdisjoint(path.name for path in reexported.iterdir())


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_the_tokenizer_of_a_folder_that_is_no_bundle_survives(tmp_path, component, name):
    """One case is an export into the checkpoint's own folder."""
    target = tmp_path / "other"
    target.mkdir()
    (target / name).write_text("mine")
    with new_folder(target) as folder:
        shutil.copy(component / MANIFEST_FILE, folder)
    assert name in contents(target)
    assert (target / name).read_text() == "mine"


def test_a_path_with_spaces_and_other_letters_works(tmp_path):
    target = tmp_path / "mein Ordner" / "Bündel 模型 [1]*"
    request = ExportRequest(
        TINY, Unit.parse("component:swiglu_mlp", TINY), RandomWeights(TINY, 0), "fp32", MAX_POSITIONS
    )
    export_bundle(request, target)  # validated: onnxruntime opens it there too
    Bundle.open(target, verify="full")
    assert main(["verify", str(target)]) == 0
    assert main(["validate", str(target)]) == 0


def test_a_relative_target_is_taken_from_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with new_folder("made") as folder:
        (folder / "a").write_text("1")
    assert contents(tmp_path) == {"made/a": b"1"}


def test_a_target_that_links_to_a_bundle_replaces_what_it_links_to(bundle, component, tmp_path):
    link = tmp_path / "latest"
    link.symlink_to(bundle)
    with new_folder(link) as folder:
        shutil.copytree(component, folder, dirs_exist_ok=True)
    assert link.is_symlink()
    assert link.resolve() == bundle
    assert identity(bundle) == identity(component)


# --- what fails leaves nothing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_in_the_body_leaves_the_old_bundle_and_no_leftovers(bundle, error):
    before = contents(bundle.parent)
    with pytest.raises(error), new_folder(bundle) as folder:
        (folder / GRAPH_FILE).write_text("half")
        raise error
    assert contents(bundle.parent) == before
    assert [path.name for path in bundle.parent.iterdir()] == ["bundle"]


def test_an_error_in_the_body_of_a_first_export_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), new_folder(tmp_path / "new") as folder:
        (folder / GRAPH_FILE).write_text("half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path):
    with pytest.raises(InputError, match="No space left"), new_folder(tmp_path / "new"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_is_a_file_is_refused_and_kept(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="it is a file"), new_folder(tmp_path / "file"):
        pass
    assert contents(tmp_path) == {"file": b"mine"}


def test_a_parent_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="cannot write"), new_folder(tmp_path / "file" / "bundle"):
        pass


def test_a_parent_that_cannot_be_written_is_refused():
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, 0o555)

        def body() -> int:
            if os.geteuid() == 0:  # root may write anywhere
                os.setuid(NOBODY)
            try:
                with new_folder(Path(parent) / "bundle"):
                    return 1
            except InputError as error:
                return 0 if parent in str(error) and "Permission denied" in str(error) else 2

        assert run_in_child(body) == 0
        assert os.listdir(parent) == []


def test_a_report_that_cannot_be_written_is_refused_by_name(tiny_bundle):
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, 0o555)
        opened = Bundle(Path(parent), tiny_bundle("block").manifest)

        def body() -> int:
            if os.geteuid() == 0:
                os.setuid(NOBODY)
            try:
                write_report(opened, {})
                return 1
            except InputError as error:
                return 0 if parent in str(error) else 2

        assert run_in_child(body) == 0


# --- no network -------------------------------------------------------------------------------------------------------


def test_nothing_asks_the_network(tmp_path, monkeypatch):
    asked = []

    def refuse(*arguments, **_):
        asked.append(arguments)
        raise OSError("this test has no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    checkpoint = write_huggingface(tmp_path / "checkpoint", TINY)
    target = str(tmp_path / "bundle")
    assert main(["export", "--checkpoint", str(checkpoint), "--unit", "component:rms_norm", "-o", target]) == 0
    assert main(["validate", target]) == 0
    assert main(["verify", target]) == 0
    assert asked == []
