"""`python -m engines build`: what it builds, and what an interrupted build leaves."""

from __future__ import annotations

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

import exporter.commands.main
from engines.building.build import build_bundle
from engines.building.preparation import BuildRequest
from engines.commands.main import main
from engines.library.backend import choose_backend
from engines.library.usable_engines import check_engine, check_lineage
from exporter.bundle.bundle import ENGINES_FILE, Bundle, sha256_of
from exporter.bundle.engine_records import read_records
from exporter.bundle.manifest import GRAPH_FILE
from exporter.common.errors import InputError
from exporter.export import ExportRequest, export_bundle
from exporter.model.weights import RandomWeights
from exporter.placing.temporaries import temporary_file
from exporter.spec.unit import Unit
from tests.conftest import MAX_POSITIONS, ROOT, TINY
from tests.engines.commands.conftest import ENGINE, SHAPES, names, only_record, spelt

pytestmark = pytest.mark.slow


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


def test_a_graph_without_a_cache_is_not_limited_by_one(tiny_bundle, tmp_path):
    folder = shutil.copytree(tiny_bundle("component:rms_norm", "fp16").folder, tmp_path / "bundle")
    assert main(["build", str(folder), "--max-seq-len", "4096"]) == 0


# --- interrupted builds ---------------------------------------------------------------------------------------


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
        while not list(folder.glob(f".{ENGINE}.partial-*")):  # other files are only checked to be writable
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
