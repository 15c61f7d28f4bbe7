"""Untrusted links, paths and names: no file outside is read or changed, no control character is printed.

Each test keeps a fault fixed that the campaign (benchmarks/campaigns/hostile_input) once found.
"""

from __future__ import annotations

import json
import os
import shutil

import pytest

import engines.commands.main
import exporter.commands.main
from engines.network.source import load_source
from exporter.bundle.bundle import Bundle, file_entry
from exporter.checkpoint.formats import open_checkpoint
from exporter.common import terminal
from exporter.common.errors import BundleError, CheckpointError, InputError
from exporter.placing.files import write_atomically
from exporter.placing.folders import new_folder
from exporter.placing.foreign_files import foreign_entries
from exporter.validation.verify import verify_bundle
from runtime import DecodeSession
from tests.conftest import TINY
from tests.support import hostile_bundles
from tests.support.checkpoint_folders import write_huggingface
from tests.support.doubles.cuda_double import engine_record
from tests.support.hostile_bundles import SECRET, change_manifest, refusal

originals, bundle = hostile_bundles.originals, hostile_bundles.bundle  # fixtures


@pytest.mark.parametrize("name", ["manifest.json", "model.onnx", "model.onnx.data"])
def test_a_link_out_of_the_bundle_is_refused_and_not_read(bundle, name):
    if name != "manifest.json":
        shutil.move(bundle / name, bundle.parent / "secret")
    (bundle / name).unlink(missing_ok=True)
    (bundle / name).symlink_to("../secret")
    assert "leads out of" in refusal(bundle)
    assert SECRET not in refusal(bundle)


def test_a_report_that_is_a_link_out_is_refused(bundle):
    (bundle / "report.json").unlink()
    (bundle / "report.json").symlink_to("../secret")
    with pytest.raises(BundleError, match="leads out of"):
        Bundle.open(bundle).read_report()


def test_links_into_the_blobs_of_a_download_cache_are_followed(originals, tmp_path):
    """Hugging Face's cache: snapshots/REVISION has links to ../../blobs/HASH."""
    snapshot = tmp_path / "models--somebody--something" / "snapshots" / "0123"
    shutil.copytree(originals / "block", snapshot)
    (tmp_path / "models--somebody--something" / "blobs").mkdir()
    for name in ("manifest.json", "model.onnx", "model.onnx.data"):
        shutil.move(snapshot / name, snapshot.parents[1] / "blobs" / name)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    Bundle.open(snapshot, "full")
    DecodeSession.open(snapshot).close()


@pytest.fixture(params=[".", "variants/fp32"])
def nested(tmp_path, request):
    """A checkpoint in a revision of a download cache, or two folders below; its files are links into the blobs."""
    repository = tmp_path / "models--somebody--something"
    folder = repository / "snapshots" / "0123" / request.param
    write_huggingface(folder, TINY)
    (folder / "tokenizer.json").write_text("{}")
    (repository / "blobs").mkdir()
    for path in list(folder.iterdir()):
        shutil.move(path, repository / "blobs" / path.name)
        path.symlink_to(os.path.relpath(repository / "blobs" / path.name, folder))
    return folder


def test_links_below_the_root_of_a_cached_revision_are_followed_into_the_blobs(nested):
    assert [path.name for path in open_checkpoint(nested).tokenizer_files] == ["tokenizer.json"]


@pytest.mark.parametrize("where", ["refs", "snapshots/4567", "../models--somebody--else/blobs", ".."])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_links_from_a_cached_revision_to_any_other_place_are_refused(nested, tmp_path, where, name):
    repository = tmp_path / "models--somebody--something"
    target = repository / where
    target.mkdir(parents=True, exist_ok=True)
    shutil.move(repository / "blobs" / name, target / "moved")
    (nested / name).unlink()
    (nested / name).symlink_to(target / "moved")
    with pytest.raises(CheckpointError, match="leads out of"):
        open_checkpoint(nested)


def test_a_tokenizer_that_is_a_link_out_of_the_checkpoint_is_not_copied(tmp_path):
    folder = write_huggingface(tmp_path / "checkpoint", TINY)
    (tmp_path / "secret").write_text(SECRET)
    (folder / "chat_template.jinja").symlink_to("../secret")
    with pytest.raises(CheckpointError, match="leads out of"):
        open_checkpoint(folder)


def test_an_engine_that_is_a_link_out_is_refused(bundle):
    record = engine_record(Bundle.open(bundle), 32).__dict__ | {
        "file": "x.engine", "sha256": file_entry(bundle.parent / "secret")["sha256"],
        "size_bytes": (bundle.parent / "secret").stat().st_size,
    }  # fmt: skip
    (bundle / "engines.json").write_text(json.dumps({"format_version": 1, "engines": [record]}))
    (bundle / "x.engine").symlink_to("../secret")
    with pytest.raises(BundleError, match="a link that leads out of the folder"):
        verify_bundle(bundle).check()


def test_a_part_that_is_a_link_is_not_emptied_by_an_export(bundle):
    outside = bundle.parent / "outside"
    outside.mkdir()
    (outside / "mine").write_text("mine")
    (bundle / "part0").symlink_to(outside)
    with pytest.raises(InputError, match="part0"), new_folder(bundle) as folder:
        (folder / "part0").mkdir()
    assert (outside / "mine").read_text() == "mine"


# --- names and paths --------------------------------------------------------------------------------------------


def test_control_characters_and_markup_in_names_do_not_reach_the_terminal(bundle, capsys):
    change_manifest(bundle, lambda data: data.update({"\x1b]0;owned\x07[/bold]:smile:": 1}))
    assert exporter.commands.main.main(["verify", str(bundle)]) == 2
    said = capsys.readouterr().err
    assert "\x1b" not in said and "\x07" not in said and "[/bold]:smile:" in said
    assert terminal.printable("a\x1b[31m\nb\x9b") == "a\\x1b[31m\nb\\x9b"


@pytest.mark.parametrize(
    "words",
    [("--max-batch", "2147483648"), ("--max-seq-len", "9" * 40), ("--workspace", "9" * 17),
    ("--cache-capacity", "9" * 40),
     ("--min-shapes", "x:" + "9" * 5000, "--opt-shapes", "x:1", "--max-shapes", "x:1")],
    ids=lambda words: words[0],
)  # fmt: skip
def test_sizes_that_no_engine_has_are_refused(bundle, words, capsys):
    assert engines.commands.main.main(["build", str(bundle), *words]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert words[0].strip("-").replace("-", "_").removeprefix("min_") in said and len(said) < 600


def test_an_empty_output_is_refused(tmp_path, monkeypatch):
    """An unset variable, for example, would otherwise mean the working folder."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="empty"), new_folder(""):
        pass


def test_a_path_that_is_not_unicode_is_refused(bundle, tmp_path):
    """C++ libraries reject such a path, each with another error."""
    other = bundle.rename(tmp_path / "a\udcff")
    with pytest.raises(BundleError, match="not valid UTF-8"):
        Bundle.open(other)
    with pytest.raises(InputError, match="not valid UTF-8"), new_folder(tmp_path / "b\udcff"):
        pass
    with pytest.raises(BundleError, match="not valid UTF-8"):
        load_source(other / "model.onnx")


def test_only_a_plain_file_is_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="no plain file"):
        write_atomically(tmp_path / "pipe", "x")
    assert (tmp_path / "pipe").is_fifo()


def test_files_elsewhere_that_a_manifest_names_are_not_its_own(bundle):
    neighbour = bundle.parent / "neighbour" / "model.onnx"
    neighbour.parent.mkdir()
    neighbour.write_text("mine")
    change_manifest(
        bundle,
        lambda manifest: manifest["files"].update({"../neighbour/model.onnx": {"size_bytes": 4, "sha256": "0" * 64}}),
    )
    assert foreign_entries(bundle) == []
    with new_folder(bundle) as folder:
        (folder / "model.onnx").write_text("new")
    assert neighbour.read_text() == "mine" and neighbour.parent.is_dir()
