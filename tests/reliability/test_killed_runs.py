"""Runs that are killed or run at once: the bundle is the whole old or the whole new one, and leftovers are removed."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import exporter.placing.folders
from benchmarks.campaigns.children import fork, run_in_child
from exporter.bundle.bundle import Bundle
from exporter.placing.folders import new_folder
from tests.conftest import ROOT, TINY
from tests.support import bundle_folders
from tests.support.bundle_folders import contents, identity
from tests.support.checkpoint_folders import write_huggingface

pytestmark = pytest.mark.slow

bundle, component = bundle_folders.bundle, bundle_folders.component  # fixtures


def fill(target: Path, source: Path) -> None:
    with new_folder(target) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True)


@pytest.mark.parametrize("name", ["bundle", "a [1]*"])
def test_leftovers_of_a_killed_run_are_removed_and_other_folders_stay(tmp_path, component, name):
    for folder in (f".{name}.partial-x", ".other.partial-x", f"{name}.partial-x"):
        (tmp_path / folder).mkdir()
    fill(tmp_path / name, component)
    assert {path.name for path in tmp_path.iterdir()} == {name, "component", ".other.partial-x", f"{name}.partial-x"}


def test_the_folder_of_a_live_run_is_not_removed(tmp_path, component):
    living = tmp_path / ".bundle.partial-x"
    living.mkdir()
    lock = "fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)"
    hold = f"import fcntl, os, sys; {lock}; print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, living], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout.readline() == b"held\n"
        fill(tmp_path / "bundle", component)
        assert living.is_dir()
        holder.stdin.close()
    fill(tmp_path / "bundle", component)  # the process with the lock has ended
    assert not living.exists()


def test_two_runs_at_once_both_succeed_and_the_later_one_wins(tmp_path, component, bundle):
    with new_folder(tmp_path / "target") as slow:
        fill(tmp_path / "target", component)
        shutil.copytree(bundle, slow, dirs_exist_ok=True)
    assert identity(tmp_path / "target") == identity(bundle)
    assert {path.name for path in tmp_path.iterdir()} == {"target", "component", "bundle"}


KILL_POINTS = {
    "before its lock is held": (fcntl, "flock"),
    "before it is put in place": (exporter.placing.folders, "_put_in_place"),
    "after it was put in place": (shutil, "rmtree"),
}


@pytest.mark.parametrize("point", KILL_POINTS)
def test_a_run_killed_at_a_known_point_leaves_a_good_bundle_and_no_lasting_leftovers(
    tmp_path, bundle, component, point
):
    target = Path(shutil.copytree(component, tmp_path / "target"))

    def body() -> int:
        setattr(*KILL_POINTS[point], lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        fill(target, bundle)
        return 0

    assert run_in_child(body) == -signal.SIGKILL
    Bundle.open(target, verify="full")
    assert identity(target) == identity(bundle if point == "after it was put in place" else component)
    fill(target, bundle)
    assert {path.name for path in tmp_path.iterdir()} == {"target", "component", "bundle"}


def test_a_run_killed_at_any_time_leaves_the_old_or_the_new_bundle(tmp_path, bundle, component):
    target = Path(shutil.copytree(component, tmp_path / "target"))
    delays = random.Random(0)

    def fill_for_ever() -> None:
        while True:
            fill(target, bundle)
            fill(target, component)

    for _ in range(12):
        child = fork(fill_for_ever)
        time.sleep(delays.uniform(0.001, 0.06))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL  # it was still running
        Bundle.open(target, verify="full")
        assert identity(target) in (identity(bundle), identity(component))


@pytest.mark.parametrize("with_old", [False, True], ids=["first export", "over an old bundle"])
def test_a_killed_export_leaves_no_bundle_or_the_old_or_a_whole_one(tmp_path, component, with_old):
    checkpoint = write_huggingface(tmp_path / "checkpoint", TINY)
    target = tmp_path / "out" / "bundle"
    target.parent.mkdir()
    if with_old:
        shutil.copytree(component, target)
    unit = ["--checkpoint", checkpoint, "--unit", "component:swiglu_mlp"]
    command = [sys.executable, "-m", "exporter", "export", *unit, "-o", target]
    delays = random.Random(with_old)
    for _ in range(2):
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
            while process.poll() is None and not list(target.parent.glob(".bundle.partial-*")):
                time.sleep(0.005)
            time.sleep(delays.uniform(0, 0.8))
            process.kill()
        if with_old or target.exists():
            whole = Bundle.open(target, verify="full")
            assert str(whole.manifest.unit) == "component:swiglu_mlp" or contents(target) == contents(component)
    fill(target, component)
    assert [path.name for path in target.parent.iterdir()] == ["bundle"]
