"""A small campaign of kills loses nothing and would find a loss; so do two writers and a reader at once."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

import exporter.export
import exporter.placing.folders
from benchmarks.campaigns.checkpoint_trial import CheckpointSite
from benchmarks.campaigns.children import fork, run_in_child
from benchmarks.campaigns.kills import kill_at_every_call, kill_at_random
from benchmarks.campaigns.races import EXPORT_NEW, EXPORT_OLD, VALIDATE, race, race_readers
from benchmarks.campaigns.trials import COMMANDS, FOREIGN, MODEL, BundleSite
from exporter.checkpoint import smollm2
from exporter.common.errors import BundleError
from exporter.placing.files import write_report
from exporter.placing.folder_lock import changing
from exporter.placing.folders import new_folder
from exporter.spec.catalogue import CATALOGUE
from tests.support import bundle_folders
from tests.support.bundle_folders import contents, identity

pytestmark = pytest.mark.slow

bundle, component = bundle_folders.bundle, bundle_folders.component  # fixtures
OVER_NOTHING, OVER_A_BUNDLE = COMMANDS[0], COMMANDS[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    yield BundleSite(tmp_path_factory.mktemp("campaign"), engine=False)
    del CATALOGUE[MODEL]


@pytest.mark.parametrize("command", [OVER_NOTHING, OVER_A_BUNDLE, VALIDATE], ids=lambda command: command.name)
def test_a_kill_before_any_call_of_placing_or_at_a_random_moment_loses_nothing(site, command):
    seen = kill_at_random(site, command, 4, random.Random(0))
    assert seen["losses"] == []
    seen = kill_at_every_call(site, command, only=range(1, 60, 6))
    assert seen["losses"] == []
    assert len(seen["states"]) >= 2


def test_the_next_import_removes_leftovers_of_one_killed_right_after_its_last_rename(tmp_path):
    site = CheckpointSite(tmp_path)
    seen = kill_at_every_call(site, site.commands[0], only=range(20, 29, 4))
    assert seen["losses"] == []
    assert "in place" in seen["states"]


def in_two_steps(first: Path, second: Path) -> None:
    """Replaces a folder without atomicity: removes the old one, then renames."""
    shutil.rmtree(second)
    os.rename(first, second)


def test_the_campaign_finds_a_replacement_that_is_not_atomic(site, monkeypatch):
    monkeypatch.setattr(exporter.placing.folders, "_exchange", in_two_steps)
    losses = kill_at_every_call(site, OVER_A_BUNDLE, only=range(30, 50, 4))["losses"]
    assert any("bundle" in loss for loss in losses), losses


def test_the_campaign_finds_lost_files_of_others(site, monkeypatch):
    monkeypatch.setattr(exporter.placing.folders, "take_along", lambda old, new: None)
    monkeypatch.setattr(exporter.placing.folders, "take_latecomers", lambda old, new: None)
    losses = kill_at_every_call(site, OVER_A_BUNDLE, only=range(10, 20, 5))["losses"]
    for name in FOREIGN:
        assert any(loss.endswith(f"{name} is gone") for loss in losses) == name.startswith("target/"), losses


def test_two_exports_and_an_export_and_a_validation_at_once_end_in_one_whole_bundle(site):
    for second in (EXPORT_OLD, VALIDATE):
        seen = race(site, EXPORT_NEW, second, 2, random.Random(0))
        assert seen["losses"] == [], seen


def test_readers_of_a_bundle_that_is_often_replaced_see_the_old_or_the_new_one(site, tmp_path):
    seen = race_readers(tmp_path, 15)
    assert seen["losses"] == [], seen


# --- signals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_run_that_gets_a_signal_removes_its_files_and_exits_with_its_number(site, number, tmp_path):
    site.reset(OVER_A_BUNDLE)
    before, validating = contents(site.folder), tmp_path / "validating"

    def wait(*_: object, **__: object) -> None:
        validating.touch()
        time.sleep(60)

    def body() -> int | None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
        # The export waits, so that a slow parent finds it running and no signal is lost in a destructor.
        exporter.export.validate_bundle = wait
        return OVER_A_BUNDLE.main(OVER_A_BUNDLE.line(site.target))

    child = fork(body)
    while not validating.exists():
        time.sleep(0.001)
    assert list(site.folder.glob(".target.partial-*/model.onnx"))
    os.kill(child, number)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + number
    assert contents(site.folder) == before


# --- a kernel that cannot swap two folders ----------------------------------------------------------------------


@pytest.fixture
def without_exchange(monkeypatch):
    """A file system without the exchange of renameat2."""
    monkeypatch.setattr(exporter.placing.folders.ctypes, "CDLL", lambda *_, **__: object())


@pytest.mark.usefixtures("without_exchange")
@pytest.mark.parametrize("fatal", [1, 2, 3])
def test_a_run_killed_between_three_renames_loses_no_bundle(tmp_path, bundle, component, fatal):
    def body() -> int:
        rename, calls = os.rename, []

        def counted(first, second) -> None:
            calls.append(first)
            if len(calls) == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            rename(first, second)

        os.rename = counted
        with new_folder(bundle) as folder:
            shutil.copytree(component, folder, dirs_exist_ok=True)
        return 0

    old = identity(bundle)
    assert run_in_child(body) == -signal.SIGKILL
    with pytest.raises(RuntimeError), new_folder(bundle):
        raise RuntimeError  # the next run fails, and the bundle is restored
    assert identity(bundle) == (identity(component) if fatal == 3 else old)
    assert {path.name for path in tmp_path.iterdir()} == {"bundle", "component"}


# --- a bundle that was replaced in the meantime -----------------------------------------------------------------


def test_a_report_of_an_older_bundle_is_not_written_into_the_new_one(tiny_bundle, bundle):
    opened = exporter.bundle.bundle.Bundle.open(bundle)
    with new_folder(bundle) as folder:
        # The same files, but another export.
        shutil.copytree(tiny_bundle("block").folder, folder, dirs_exist_ok=True)
    before = contents(bundle)
    with pytest.raises(BundleError, match="an export has replaced it"), changing(opened):
        write_report(opened, {})
    assert contents(bundle) == before


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_process_that_an_import_started_ends_with_the_import(tmp_path):
    """pip would continue after its import was killed, and write into the folder of the next import."""
    started = tmp_path / "started"

    def body() -> int:
        line = ["sh", "-c", f"echo $$ > {started}.part; mv {started}.part {started}; exec sleep 60"]
        return subprocess.run(line, preexec_fn=partial(smollm2._end_with, os.getpid())).returncode

    child = fork(body)
    while not started.exists():
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    process = Path("/proc") / started.read_text().strip()
    deadline = time.monotonic() + 10
    while process.exists() and "Z (zombie)" not in (process / "status").read_text():
        assert time.monotonic() < deadline, "the process still runs"
        time.sleep(0.01)
