"""A result names the checksums of the bytes that it was made from. Files that are not the manifest's are refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from exporter.bundle.bundle import REPORT_FILE, Bundle, sha256_of
from exporter.bundle.manifest import DATA_FILE, GRAPH_FILE
from exporter.bundle.origin import Origin
from exporter.commands.main import main
from exporter.common.errors import BundleError
from exporter.model.weights import RandomWeights
from exporter.validation import bundle_validation
from exporter.validation.bundle_validation import validate_bundle
from exporter.validation.verify import verify_bundle
from tests.conftest import TINY


def overwrite(path: Path, n_bytes: int = 2000) -> None:
    """Inverts bytes in the middle of a file; its size stays."""
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        old = file.read(n_bytes)
        file.seek(-len(old), os.SEEK_CUR)
        file.write(bytes(255 - value for value in old))


@pytest.fixture
def bundle(tiny_bundle, tmp_path) -> Bundle:
    shutil.copytree(tiny_bundle("block").folder, tmp_path / "bundle")
    return Bundle.open(tmp_path / "bundle")


@pytest.fixture
def parts(tiny_bundle, tmp_path) -> Bundle:
    shutil.copytree(tiny_bundle("stack", n_parts=2).folder, tmp_path / "parts")
    return Bundle.open(tmp_path / "parts")


# --- what is recorded -------------------------------------------------------------------------------------------------


def test_an_origin_has_the_checksums_of_every_graph_and_its_weights(bundle, parts):
    assert Origin.of_bundle(bundle).checksums == {
        name: sha256_of(bundle.folder / name) for name in (GRAPH_FILE, DATA_FILE)
    }
    names = [f"part{index}/{name}" for index in range(2) for name in (GRAPH_FILE, DATA_FILE)]
    assert Origin.of_bundle(parts).checksums == {name: sha256_of(parts.folder / name) for name in names}


@pytest.mark.parametrize("name", [GRAPH_FILE, DATA_FILE])
def test_bytes_that_are_not_the_manifests_are_refused_with_both_checksums(bundle, name):
    expected = bundle.manifest.files[name]["sha256"]
    overwrite(bundle.folder / name)
    got = sha256_of(bundle.folder / name)
    with pytest.raises(BundleError) as refused:
        Origin.of_bundle(bundle)
    message = str(refused.value)
    assert message.startswith(f"bundle {bundle.folder}: {name} has another SHA-256 than the manifest says")
    assert f"({got[:12]}…, expected {expected[:12]}…)" in message and "export again" in message


def test_a_missing_file_is_refused_with_its_name(bundle):
    (bundle.folder / DATA_FILE).unlink()
    with pytest.raises(BundleError, match=rf"{DATA_FILE}: it cannot be read \(No such file"):
        Origin.of_bundle(bundle)


# --- changes during the use -------------------------------------------------------------------------------------------


def test_an_unchanged_file_passes(bundle):
    origin = Origin.of_bundle(bundle)
    (bundle.folder / DATA_FILE).read_bytes()
    (bundle.folder / "a file beside it").write_text("")
    origin.check_unchanged()


def put_back(path: Path) -> None:
    """Changes a file and puts the old bytes and the old time of change back."""
    before, content = path.stat(), path.read_bytes()
    overwrite(path)
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced(path: Path) -> None:
    """Puts another file with the same bytes and times at the path."""
    shutil.copy2(path, path.with_name("copy"))
    os.replace(path.with_name("copy"), path)


@pytest.mark.parametrize("change", [overwrite, put_back, replaced])
def test_a_change_after_the_checksum_was_taken_voids_the_result(bundle, change):
    origin = Origin.of_bundle(bundle)
    change(bundle.folder / DATA_FILE)
    with pytest.raises(BundleError, match=f"{DATA_FILE} changed while in use; the result is void; run again"):
        origin.check_unchanged()


def test_a_change_just_after_another_one_is_seen(bundle):
    path = bundle.folder / DATA_FILE
    for _ in range(20):
        content = path.read_bytes()
        path.write_bytes(content)  # its times are now those of this moment
        origin = Origin(bundle.folder, [DATA_FILE])
        path.write_bytes(content)
        with pytest.raises(BundleError, match="changed while in use"):
            origin.check_unchanged()


# --- validation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_changed_weights_are_not_validated(tiny_bundle, tmp_path, dtype, by_layer):
    """Both sides of a validation read the changed weights, so that it would pass."""
    shutil.copytree(tiny_bundle("stack", dtype).folder, tmp_path / "bundle")
    bundle = Bundle.open(tmp_path / "bundle")
    overwrite(bundle.folder / DATA_FILE)
    with pytest.raises(BundleError, match=f"{DATA_FILE} has another SHA-256"):
        validate_bundle(bundle, by_layer=by_layer)


def test_changed_weights_of_one_part_are_not_validated(parts):
    overwrite(parts.folder / "part1" / DATA_FILE)
    with pytest.raises(BundleError, match=f"part1/{DATA_FILE} has another SHA-256"):
        validate_bundle(parts)


def test_the_command_refuses_changed_weights_and_leaves_the_report(bundle, capsys):
    report = (bundle.folder / REPORT_FILE).read_bytes()
    overwrite(bundle.folder / DATA_FILE)
    assert main(["validate", str(bundle.folder)]) == 2
    assert f"{DATA_FILE} has another SHA-256 than the manifest says" in capsys.readouterr().err
    assert (bundle.folder / REPORT_FILE).read_bytes() == report


def test_weights_that_change_during_a_validation_void_it(bundle, monkeypatch):
    plain = bundle_validation.compare

    def compare(*arguments):
        overwrite(bundle.folder / DATA_FILE)  # both sides have run
        return plain(*arguments)

    monkeypatch.setattr(bundle_validation, "compare", compare)
    with pytest.raises(BundleError, match=f"{DATA_FILE} changed while in use"):
        validate_bundle(bundle)


def test_a_validation_names_what_it_read_and_verify_compares_it(bundle):
    section, _ = validate_bundle(bundle, RandomWeights(TINY, 0))
    assert section["files"] == {name: sha256_of(bundle.folder / name) for name in (GRAPH_FILE, DATA_FILE)}
    report = bundle.folder / REPORT_FILE
    report.write_text(json.dumps({"validation": section}))
    assert verify_bundle(bundle.folder).problems == ()
    report.write_text(json.dumps({"validation": section | {"files": section["files"] | {DATA_FILE: "0" * 64}}}))
    (problem,) = verify_bundle(bundle.folder).problems
    assert str(problem) == f"{REPORT_FILE}: its validation read other files than the manifest lists; validate again"
    del section["files"]  # an older report does not say
    report.write_text(json.dumps({"validation": section}))
    assert verify_bundle(bundle.folder).problems == ()
