"""Where a bundle may go: behind links, beside mounts, over files of other users.

A target that is refused is refused before the work.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

import engines.commands.main
import exporter.commands.main
import exporter.placing.folders
import runtime.commands.main
from exporter.bundle.bundle import Bundle
from exporter.bundle.manifest import DATA_FILE, MANIFEST_FILE
from exporter.common.errors import InputError
from exporter.placing.files import check_writable, write_atomically
from exporter.placing.folders import new_folder
from tests.support import bundle_folders
from tests.support.bundle_folders import contents, identity
from tests.support.faulty_disks import NOBODY, Said, can_mount, mount_tmpfs, needs_root, remount, run_apart

bundle, component = bundle_folders.bundle, bundle_folders.component  # fixtures


def fill(target: Path, source: Path) -> None:
    with new_folder(target) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True)


def refused(target: Path | str, reason: str) -> None:
    """Asserts that a target is refused before the content is made."""
    with pytest.raises(InputError, match=reason), new_folder(target):
        pytest.fail("the body ran")


# --- links ------------------------------------------------------------------------------------------------------------


def test_a_link_keeps_pointing_and_only_the_bundle_behind_it_is_replaced(tmp_path, bundle, component):
    (bundle / "notes.txt").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "latest"
    link.symlink_to("../bundle")
    fill(link, component)
    assert link.readlink() == Path("../bundle")
    assert identity(bundle) == identity(component)
    assert (bundle / "notes.txt").read_text() == "mine"
    assert [path.name for path in link.parent.iterdir()] == ["latest"]


def test_a_link_to_nothing_is_filled_where_it_points(tmp_path, component):
    (tmp_path / "latest").symlink_to(tmp_path / "later")
    fill(tmp_path / "latest", component)
    assert (tmp_path / "latest").is_symlink()
    assert identity(tmp_path / "later") == identity(component)


def test_links_that_lead_in_a_circle_are_refused(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    refused(tmp_path / "a", "circle")
    refused(tmp_path / "a" / "bundle", "cannot write beside it")


def test_parents_behind_a_link_are_those_that_the_system_sees(tmp_path, component):
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "near").symlink_to("far/away")
    fill(tmp_path / "near" / ".." / "bundle", component)
    assert identity(tmp_path / "far" / "bundle") == identity(component)
    Bundle.open(tmp_path / "near" / ".." / "bundle", verify="full")


def test_a_report_behind_a_link_is_written_where_it_points(tmp_path):
    (tmp_path / "reports").mkdir()
    (tmp_path / "report.json").symlink_to("reports/report.json")
    write_atomically(tmp_path / "report.json", "new")
    assert contents(tmp_path / "reports") == {"report.json": b"new"}
    assert (tmp_path / "report.json").is_symlink()


@pytest.mark.parametrize("name", ["report.json", "engines.json"])
def test_a_bundles_own_file_that_leads_out_of_it_is_not_written(tmp_path, bundle, name):
    """A bundle may be untrusted, and its link may lead to a file of the user."""
    outside = tmp_path / "ours.json"
    outside.write_text("{}")
    (bundle / name).unlink(missing_ok=True)
    (bundle / name).symlink_to(outside)
    message = f"{name}: it is a link out of its folder, expected a file of the bundle's own; remove the link"
    with pytest.raises(InputError, match=message):
        check_writable(bundle / name, own=True)
    with pytest.raises(InputError, match="it is a link out of its folder"):
        write_atomically(bundle / name, "lost", own=True)
    assert outside.read_text() == "{}" and contents(tmp_path).keys() >= {"ours.json"}
    if name == "report.json":
        assert exporter.commands.main.main(["validate", str(bundle)]) == 2
        assert outside.read_text() == "{}"


# --- places that hold more than a bundle ------------------------------------------------------------------------------


def test_the_root_the_home_and_the_current_folder_and_what_holds_them_are_refused(tmp_path, monkeypatch):
    current, home = tmp_path / "work" / "current", tmp_path / "homes" / "me"
    for folder in (current, home):
        folder.mkdir(parents=True)
        (folder / "mine").write_text("mine")
    monkeypatch.chdir(current)
    monkeypatch.setenv("HOME", str(home))
    before = contents(tmp_path)
    for place in (".", "..", current, current.parent):
        refused(place, "current folder")
    for place in (home, home.parent):
        refused(place, "home folder")
    refused("/", "folder is there")
    assert contents(tmp_path) == before


@can_mount
def test_a_mount_point_and_a_folder_with_one_are_refused(tmp_path, component):
    def body() -> None:
        mount_tmpfs(tmp_path / "disk", "size=1m")
        (tmp_path / "disk" / "mine").write_text("mine")
        shutil.copytree(component, tmp_path / "target")
        (tmp_path / "target" / "bound").mkdir()
        assert os.system(f"mount --bind {tmp_path / 'disk'} {tmp_path / 'target' / 'bound'}") == 0
        refused(tmp_path / "disk", "is a mount point")
        refused(tmp_path / "target", "bound is a mount point")
        assert (tmp_path / "disk" / "mine").read_text() == "mine"
        fill(tmp_path / "disk" / "bundle", component)

    run_apart(body, tmp_path)


def test_files_of_another_programs_manifest_are_not_taken_for_a_bundles(tmp_path, component):
    target = tmp_path / "site"
    target.mkdir()
    (target / MANIFEST_FILE).write_text('{"files": {"a.txt": {}}}')
    (target / "a.txt").write_text("mine")
    before = contents(target)
    with pytest.raises(InputError, match=MANIFEST_FILE):
        fill(target, component)
    assert contents(target) == before


def test_what_is_put_into_a_folder_while_it_is_replaced_is_kept(tmp_path, bundle, component, monkeypatch):
    exchange = exporter.placing.folders._exchange
    (bundle / "results").mkdir()
    (bundle / "results" / "first").write_text("1")

    def late(first: Path, second: Path) -> None:
        (bundle / "late.txt").write_text("late")
        (bundle / "results" / "second").write_text("2")
        write_atomically(bundle / "results" / "first", "newer")
        exchange(first, second)

    monkeypatch.setattr(exporter.placing.folders, "_exchange", late)
    fill(bundle, component)
    kept = {name: text for name, text in contents(bundle).items() if "/" in name or name.endswith(".txt")}
    assert kept == {"late.txt": b"late", "results/second": b"2", "results/first": b"newer"}
    assert {path.name for path in tmp_path.iterdir()} == {"bundle", "component"}


def test_half_written_files_of_a_killed_build_do_not_come_along(bundle, component):
    for name in (".model.c64.tensorrt-rtx.engine.partial-abcd1234", ".report.json.partial-abcd1234"):
        (bundle / name).write_text("half")
    (bundle / ".mine.partial-abcd1234").write_text("mine")
    fill(bundle, component)
    assert [name for name in contents(bundle) if "partial" in name] == [".mine.partial-abcd1234"]


# --- other users ------------------------------------------------------------------------------------------------------


@pytest.fixture
def shared():
    """Yields a folder that all users can reach. They cannot reach the folders of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def as_nobody(body, tmp_path: Path) -> None:
    """Runs `body` as a user who may only read the files of root."""

    def turned() -> None:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        os.environ["HOME"] = "/nonexistent"
        body()

    run_apart(turned, tmp_path)


def all_may_read(folder: Path) -> bool:
    """Whether every user can reach this folder and list it. A home of root is often closed."""
    return all(path.stat().st_mode & 0o005 == 0o005 for path in (folder, *folder.parents))


def commands_that_write(bundle: Path) -> list[Said]:
    unit = ("--model", "smollm2-135m", "--unit", "component:rms_norm")
    return [
        Said(exporter.commands.main.main, "export", *unit, "-o", bundle),
        Said(exporter.commands.main.main, "validate", bundle),
        Said(engines.commands.main.main, "build", bundle, "--backend", "tensorrt-rtx"),
        Said(engines.commands.main.main, "compare", bundle, "--html", bundle / "page.html"),
    ]


def check_only_read(bundle: Path) -> None:
    """Checks that commands that write are refused in their first lines, and that commands that read work."""
    before = contents(bundle.parent)
    for said in commands_that_write(bundle):
        assert said.code == 2
        assert str(bundle) in said.error
        assert len(said.lines) <= 2, said.lines  # they are refused before any work that prints a line
    assert Said(exporter.commands.main.main, "verify", bundle).code == 0
    assert Said(exporter.commands.main.main, "validate", "--no-report", bundle).code == 0
    sizes = ("--prompt-len", "4", "--steps", "2", "--cache-capacity", "16")
    assert Said(runtime.commands.main.main, "decode", bundle, *sizes).code == 0
    assert contents(bundle.parent) == before


@needs_root
@pytest.mark.skipif(not all_may_read(Path(sys.prefix)), reason="the environment is in a folder that others cannot read")
def test_a_bundle_of_another_user_is_read_and_nothing_else(tmp_path, shared, bundle):
    there = Path(shutil.copytree(bundle, shared / "bundle"))
    as_nobody(lambda: check_only_read(there), tmp_path)


@can_mount
def test_a_bundle_on_a_read_only_disk_is_read_and_nothing_else(tmp_path, bundle):
    def body() -> None:
        disk = tmp_path / "disk"
        mount_tmpfs(disk, "size=4m")
        shutil.copytree(bundle, disk / "bundle")
        remount(disk, "ro")
        check_only_read(disk / "bundle")

    run_apart(body, tmp_path)


@needs_root
def test_a_parent_that_this_user_may_not_write_is_refused_before_the_export(tmp_path, shared):
    as_nobody(lambda: refused(shared / "new", "cannot write beside it"), tmp_path)


@needs_root
@pytest.mark.parametrize(
    "what",
    [
        *("a read-only bundle", "a read-only folder in it"),
        *("another user's where all may write", "another user's in a sticky folder"),
    ],
)
def test_a_bundle_that_could_not_be_cleared_away_is_refused_before_the_export(tmp_path, shared, bundle, what):
    target = Path(shutil.copytree(bundle, shared / "bundle"))
    (target / "results").mkdir()
    for path in (shared, target, *target.iterdir()):
        os.chown(path, *([NOBODY, NOBODY] if "read-only" in what else [1, 1]))
    shared.chmod(0o1777 if "sticky" in what else 0o777)
    target.chmod(0o555 if what == "a read-only bundle" else 0o777 if "sticky" in what else 0o755)
    (target / "results").chmod(0o555 if "folder in it" in what else 0o777)
    reason = "belongs to another user" if "sticky" in what else "read-only for this user"
    as_nobody(lambda: refused(target, reason), tmp_path)
    assert [path.name for path in shared.iterdir()] == ["bundle"]


@needs_root
def test_read_only_files_in_a_folder_of_ones_own_are_replaced(tmp_path, shared, bundle, component):
    target = Path(shutil.copytree(bundle, shared / "bundle"))
    source = Path(shutil.copytree(component, shared / "source"))
    (target / DATA_FILE).chmod(0o444)
    for path in (shared, target, *target.iterdir()):
        os.chown(path, NOBODY, NOBODY)
    as_nobody(lambda: fill(target, source), tmp_path)
    assert identity(target) == identity(source)
    assert {path.name for path in shared.iterdir()} == {"bundle", "source"}


@needs_root
def test_root_leaves_a_replaced_folder_to_whom_it_belonged(bundle, component):
    (bundle / "results").mkdir()
    os.chown(bundle, NOBODY, NOBODY)
    os.chown(bundle / "results", NOBODY, NOBODY)
    bundle.chmod(0o2775)
    fill(bundle, component)
    assert (bundle.stat().st_uid, bundle.stat().st_mode & 0o7777) == (NOBODY, 0o2775)
    assert (bundle / "results").stat().st_uid == NOBODY
