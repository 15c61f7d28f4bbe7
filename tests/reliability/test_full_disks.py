"""Full disks and limits on file sizes: one line with folder and bytes, exit code 2, a whole old bundle."""

from __future__ import annotations

import re
import resource
import shutil
import tempfile
from pathlib import Path

import pytest

import engines.commands.main
import exporter.commands.main
from exporter.bundle.bundle import Bundle
from exporter.common.errors import InputError
from exporter.placing.folders import new_folder
from exporter.spec.catalogue import CATALOGUE
from tests.conftest import TINY
from tests.support.bundle_folders import contents
from tests.support.faulty_disks import PAGE, Said, can_mount, leave_free, mount_tmpfs, run_apart

pytestmark = pytest.mark.slow

EXPORT = ("export", "--model", "tiny", "--unit", "component:rms_norm")
BUILD = ("--backend", "tensorrt-rtx", "--cache-capacity", "32", "--max-seq-len", "8", "--max-batch", "1")


@pytest.fixture(autouse=True)
def tiny_model(monkeypatch):
    monkeypatch.setitem(CATALOGUE, "tiny", TINY)


def undisturbed(folder: Path) -> dict[str, bytes]:
    """Returns all files of a small disk, without the file that fills it."""
    return {name: content for name, content in contents(folder).items() if name != "ballast"}


def check_refused(said: Said, disk: Path, before: dict[str, bytes]) -> None:
    assert said.code == 2
    assert str(disk) in said.error
    assert re.search(r"[\d,]+ bytes (were )?free", said.error), said.error
    assert undisturbed(disk) == before


@can_mount
def test_an_export_onto_a_disk_that_fills_up_at_any_page(tiny_bundle, tmp_path):
    old = tiny_bundle("component:swiglu_mlp").folder

    def body() -> None:
        disk = tmp_path / "disk"
        mount_tmpfs(disk, "size=4m")
        shutil.copytree(old, disk / "bundle")
        before = undisturbed(disk)
        errors = set()
        for n_pages in range(20):
            leave_free(disk, n_pages)
            said = Said(exporter.commands.main.main, *EXPORT, "-o", disk / "bundle")
            if said.code == 0:
                break
            check_refused(said, disk, before)
            errors.add(said.error.replace(f"{n_pages * PAGE:,}", "N"))
        assert said.code == 0
        assert Bundle.open(disk / "bundle", verify="full").manifest.unit.component == "rms_norm"
        assert {name.partition("/")[0] for name in undisturbed(disk)} == {"bundle"}
        assert len(errors) == 2  # one refusal before writing, one while writing

    run_apart(body, tmp_path)


@can_mount
def test_a_validation_without_room_for_its_report_is_refused(tiny_bundle, tmp_path):
    def body() -> None:
        disk = tmp_path / "disk"
        mount_tmpfs(disk, "size=4m")
        shutil.copytree(tiny_bundle("component:rms_norm").folder, disk / "bundle")
        before = undisturbed(disk)
        leave_free(disk, 0)
        check_refused(Said(exporter.commands.main.main, "validate", disk / "bundle"), disk, before)
        assert Said(exporter.commands.main.main, "validate", "--no-report", disk / "bundle").code == 0
        leave_free(disk, 1)
        assert Said(exporter.commands.main.main, "validate", disk / "bundle").code == 0
        assert "validation" in Bundle.open(disk / "bundle").read_report()

    run_apart(body, tmp_path)


@can_mount
def test_a_build_without_room_for_its_engine_its_graph_or_its_record_is_refused(tiny_bundle, tmp_path):
    def body() -> None:
        disk = tmp_path / "disk"
        mount_tmpfs(disk, "size=64m")
        shutil.copytree(tiny_bundle("block", "fp16").folder, disk / "bundle")
        before = undisturbed(disk)
        command = (engines.commands.main.main, "build", disk / "bundle", *BUILD)
        assert Said(*command).code == 0
        pages = {
            path.name: -(-path.stat().st_size // PAGE)
            for path in (disk / "bundle").iterdir()
            if path.name not in before
        }
        shutil.rmtree(disk / "bundle")
        shutil.copytree(tiny_bundle("block", "fp16").folder, disk / "bundle")
        engine, graph, record = (
            pages[name] for name in ("model.c32.tensorrt-rtx.engine", "model.c32.onnx", "engines.json")
        )
        for n_pages in (engine // 2, engine + graph):
            leave_free(disk, n_pages)
            said = Said(*command)
            assert said.code == 2
            assert re.search(r"[\d,]+ bytes (were )?free", said.error), said.error
            left = undisturbed(disk)
            assert {name: left[name] for name in before} == before
            assert set(left) - set(before) <= {
                "bundle/model.c32.onnx"
            }  # a whole graph may stay: other tools can use it
        leave_free(disk, engine + graph + 3 * record)
        assert Said(*command).code == 0

    run_apart(body, tmp_path)


@can_mount
def test_a_temporary_folder_that_fills_up_is_named_and_left_empty(tiny_bundle, tmp_path):
    bundle = tiny_bundle("block", "bf16").folder  # its validation writes a twin bundle to the temporary folder

    def body() -> None:
        disk = tmp_path / "disk"
        mount_tmpfs(disk, "size=1m")
        tempfile.tempdir = str(disk)
        leave_free(disk, 3)
        for options in ((), ("--by-layer",)):
            said = Said(exporter.commands.main.main, "validate", "--no-report", bundle, *options)
            check_refused(said, disk, {})
            assert "TMPDIR" in said.error

    run_apart(body, tmp_path)


def test_a_limit_on_file_sizes_is_named(tiny_bundle, tmp_path):
    folder = Path(shutil.copytree(tiny_bundle("component:swiglu_mlp").folder, tmp_path / "out" / "bundle"))
    twin = tiny_bundle("component:swiglu_mlp", "bf16").folder

    def body() -> None:
        before = contents(folder.parent)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, -1))
        said = [
            Said(exporter.commands.main.main, *EXPORT, "-o", folder),
            Said(exporter.commands.main.main, "validate", "--no-report", twin),
            Said(engines.commands.main.main, "build", folder, "--backend", "tensorrt-rtx"),
        ]
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
        assert [(each.code, "at most (ulimit -f)" in each.error) for each in said] == [(2, True)] * 3, [
            each.error for each in said
        ]
        assert contents(folder.parent) == before

    run_apart(body, tmp_path)


def test_a_folder_that_cannot_fit_is_refused_before_it_is_made(tmp_path):
    with (
        pytest.raises(InputError, match=r"bytes free, expected at least 1,000,000,000,000,000"),
        new_folder(tmp_path / "a" / "new", 10**15),
    ):
        pytest.fail("the folder was made")
    assert list(tmp_path.iterdir()) == []
