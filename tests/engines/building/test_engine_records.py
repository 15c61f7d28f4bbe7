"""engines.json: publishing keeps it complete, also when it is killed or two builds end at once; usable engines."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from engines.building.publishing import publish
from engines.library.backend import Backend
from engines.library.gpu import Gpu
from engines.library.usable_engines import backend_of, check_engine, check_lineage, check_runnable
from engines.network.build_options import BuildOptions
from engines.running.choose_engine import find_engine
from exporter.bundle.bundle import ENGINES_FILE, Bundle, sha256_of
from exporter.bundle.engine_records import EngineRecord, read_records, records_json
from exporter.bundle.manifest import DATA_FILE, GRAPH_FILE
from exporter.common.errors import BackendError, BundleError

GPU = Gpu("NVIDIA Test 9000", "9.0")
FORK = multiprocessing.get_context("fork")
RECORD = EngineRecord(
    file="a.engine",
    size_bytes=0,
    sha256="0" * 64,
    graph_file="model.c64.onnx",
    backend="tensorrt-rtx",
    version="1.7.1",
    compute_capability=None,
    portability="portable",
    profiles=[{"name": "decode", "ranges": {"x": {"min": [1], "opt": [2], "max": [4]}}}],
    cache_capacity=64,
    dtypes={"x": "fp16"},
    lineage={GRAPH_FILE: "1" * 64, DATA_FILE: "2" * 64},
    options=BuildOptions().to_dict(),
    build_seconds=1.5,
    peak_memory_bytes=7,
)


def publish_engine(folder: Path, name: str, content: bytes) -> EngineRecord:
    """Publishes an engine with that content, as a build does."""
    temporary = folder / f".{name}.partial-{os.getpid()}"
    temporary.write_bytes(content)
    record = replace(RECORD, file=name, size_bytes=len(content), sha256=sha256_of(temporary))
    publish(folder, temporary, record)
    return record


# --- publishing ---------------------------------------------------------------------------------------------


def test_a_folder_without_engines_has_no_records(tmp_path):
    assert read_records(tmp_path) == []


def test_a_record_reads_back_as_it_was_published_beside_its_engine(tmp_path):
    record = publish_engine(tmp_path, "a.engine", b"plan")
    assert read_records(tmp_path) == [record]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.engine", ENGINES_FILE]
    assert (tmp_path / "a.engine").read_bytes() == b"plan"


def test_publishing_again_replaces_the_engine_and_its_record_and_keeps_others(tmp_path):
    publish_engine(tmp_path, "a.engine", b"old")
    other = publish_engine(tmp_path, "b.engine", b"other")
    new = publish_engine(tmp_path, "a.engine", b"newer")
    assert read_records(tmp_path) == [other, new]
    assert (tmp_path / "a.engine").read_bytes() == b"newer"


def publish_many(folder: Path, writer: str, start) -> None:
    start.wait()
    for index in range(20):
        publish_engine(folder, f"{writer}{index}.engine", f"{writer}{index}".encode())


def test_two_processes_that_publish_at_once_lose_no_record(tmp_path):
    start = FORK.Barrier(2)
    processes = [FORK.Process(target=publish_many, args=(tmp_path, writer, start)) for writer in "ab"]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=30)
    assert [process.exitcode for process in processes] == [0, 0]
    records = read_records(tmp_path)
    assert {record.file for record in records} == {f"{writer}{index}.engine" for writer in "ab" for index in range(20)}
    assert len(records) == 40
    for record in records:
        check_engine(tmp_path, record, verify="full")


def killed_publish(folder: Path, fatal_call: int, before: bool) -> None:
    """Publishes a new a.engine and dies at the given call of os.replace, just before or after it takes effect."""
    calls, real = 0, os.replace

    def replace_or_die(source, target):
        nonlocal calls
        calls += 1
        if not (before and calls == fatal_call):
            real(source, target)
        if calls == fatal_call:
            os.kill(os.getpid(), signal.SIGKILL)

    os.replace = replace_or_die  # in the child only
    publish_engine(folder, "a.engine", b"newer")


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("fatal_call", [1, 2, 3])
def test_a_killed_publish_leaves_no_record_of_another_engine(tmp_path, fatal_call, before):
    publish_engine(tmp_path, "a.engine", b"old")
    other = publish_engine(tmp_path, "b.engine", b"other")
    process = FORK.Process(target=killed_publish, args=(tmp_path, fatal_call, before))
    process.start()
    process.join(timeout=30)
    assert process.exitcode == -signal.SIGKILL
    records = read_records(tmp_path)
    assert other in records
    for record in records:
        check_engine(tmp_path, record, verify="full")
    new = publish_engine(tmp_path, "a.engine", b"newest")  # the killed process holds no lock
    assert read_records(tmp_path) == [other, new]


# --- a damaged engines.json ---------------------------------------------------------------------------------


DAMAGED = {
    "empty": "",
    "cut": "{",
    "list": "[]",
    "null": "null",
    "no version": "{}",
    "no engines": '{"format_version": 1}',
    "null engines": '{"format_version": 1, "engines": null}',
    "number": '{"format_version": 1, "engines": [1]}',
    "missing keys": '{"format_version": 1, "engines": [{"file": "a.engine"}]}',
    "no cache rows": json.dumps({"format_version": 1, "engines": [asdict(RECORD) | {"cache_capacity": 0}]}),
    "option as text": json.dumps(
        {"format_version": 1, "engines": [asdict(RECORD) | {"options": RECORD.options | {"version_compatible": "no"}}]}
    ),
    "unknown key": json.dumps({"format_version": 1, "engines": [asdict(RECORD) | {"colour": 1}]}),
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_refused_by_name(tmp_path, text):
    (tmp_path / ENGINES_FILE).write_text(text)
    with pytest.raises(BundleError, match=f"{ENGINES_FILE}: it is damaged"):
        read_records(tmp_path)


def test_a_file_that_is_not_text_is_refused(tmp_path):
    (tmp_path / ENGINES_FILE).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BundleError, match="damaged"):
        read_records(tmp_path)


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_an_unknown_format_is_refused_with_both_numbers(tmp_path, version):
    (tmp_path / ENGINES_FILE).write_text(json.dumps({"format_version": version, "engines": []}))
    with pytest.raises(BundleError, match=f"got format_version {version!r}, expected 1"):
        read_records(tmp_path)


# --- the engine's file --------------------------------------------------------------------------------------


def test_an_unharmed_engine_passes_every_check(tmp_path):
    check_engine(tmp_path, publish_engine(tmp_path, "a.engine", b"plan"), verify="full")


def test_a_missing_engine_is_refused(tmp_path):
    record = publish_engine(tmp_path, "a.engine", b"plan")
    (tmp_path / "a.engine").unlink()
    with pytest.raises(BundleError, match=r"a\.engine: it is missing"):
        check_engine(tmp_path, record)


@pytest.mark.parametrize("size", [0, 3, 5])
def test_an_engine_of_another_size_is_refused(tmp_path, size):
    record = publish_engine(tmp_path, "a.engine", b"plan")
    os.truncate(tmp_path / "a.engine", size)
    with pytest.raises(BundleError, match=r"a\.engine: it is not the file that was built"):
        check_engine(tmp_path, record)


def test_an_engine_of_other_content_is_refused_by_a_full_check(tmp_path):
    record = publish_engine(tmp_path, "a.engine", b"plan")
    (tmp_path / "a.engine").write_bytes(b"plot")
    check_engine(tmp_path, record)  # the size alone is right
    with pytest.raises(BundleError, match="it is not the file that was built"):
        check_engine(tmp_path, record, verify="full")


def test_an_engine_to_decode_with_has_a_capacity():
    assert RECORD.decode_capacity() == 64
    with pytest.raises(BundleError, match=r"a\.engine: its record has no cache_capacity"):
        replace(RECORD, cache_capacity=None).decode_capacity()


# --- where it came from -------------------------------------------------------------------------------------


@pytest.fixture
def bundle(tiny_bundle) -> Bundle:
    return tiny_bundle("component:rms_norm")


def changed(bundle: Bundle, *names: str) -> Bundle:
    """The bundle as if an export had changed the content of those files."""
    files = bundle.manifest.files | {name: bundle.manifest.files[name] | {"sha256": "0" * 64} for name in names}
    return replace(bundle, manifest=replace(bundle.manifest, files=files))


def test_an_engine_of_this_graph_and_these_weights_is_allowed(bundle):
    check_lineage(bundle, replace(RECORD, lineage=bundle.lineage))


@pytest.mark.parametrize(
    "names", [(GRAPH_FILE,), (DATA_FILE,), (GRAPH_FILE, DATA_FILE)], ids=["graph", "weights", "both"]
)
def test_an_engine_of_other_files_is_refused_with_their_names_alone(bundle, names):
    with pytest.raises(BundleError, match=f": {', '.join(names)} changed since it was built"):
        check_lineage(changed(bundle, *names), replace(RECORD, lineage=bundle.lineage))


def test_an_engine_of_unknown_origin_is_refused(bundle):
    with pytest.raises(BundleError, match=f"{GRAPH_FILE}, {DATA_FILE} changed"):
        check_lineage(bundle, replace(RECORD, lineage={}))


# --- where it runs ------------------------------------------------------------------------------------------


def test_an_engine_of_this_backend_version_and_gpu_runs():
    check_runnable(RECORD, "tensorrt-rtx", "1.7.1", [GPU])
    check_runnable(replace(RECORD, compute_capability="9.0"), "tensorrt-rtx", "1.7.1", [GPU])


def test_an_engine_of_another_backend_is_refused_even_if_version_compatible():
    record = replace(RECORD, options=BuildOptions(version_compatible=True).to_dict())
    with pytest.raises(BundleError, match=r"a\.engine: built with tensorrt-rtx 1\.7\.1, this is tensorrt 10\.16"):
        check_runnable(record, "tensorrt", "10.16", [GPU])


def test_an_engine_of_another_version_is_refused_with_both():
    with pytest.raises(BundleError, match=r"a\.engine: built with tensorrt-rtx 1\.7\.1, this is 1\.8\.0"):
        check_runnable(RECORD, "tensorrt-rtx", "1.8.0", [GPU])


def test_a_version_compatible_engine_of_an_earlier_version_runs():
    check_runnable(
        replace(RECORD, options=BuildOptions(version_compatible=True).to_dict()), "tensorrt-rtx", "1.8.0", [GPU]
    )


def test_a_version_compatible_engine_of_a_later_version_is_refused():
    record = replace(RECORD, version="1.10.0", options=BuildOptions(version_compatible=True).to_dict())
    with pytest.raises(BundleError, match=r"this is 1\.9\.2, and only a newer version reads"):
        check_runnable(record, "tensorrt-rtx", "1.9.2", [GPU])


@pytest.mark.parametrize("allowed", [False, True])
def test_an_engine_with_code_for_the_cpu_is_found_only_where_that_is_allowed(bundle, tmp_path, monkeypatch, allowed):
    monkeypatch.setattr("engines.running.choose_engine.visible_gpus", lambda: [GPU])
    double = Backend("tensorrt-rtx", object(), RECORD.version, "a double")
    monkeypatch.setattr("engines.running.choose_engine.backend_of", lambda record: double)
    folder = Path(shutil.copytree(bundle.folder, tmp_path / "bundle"))
    (folder / "a.engine").write_bytes(b"plan")
    options = BuildOptions(version_compatible=True).to_dict()
    record = replace(RECORD, size_bytes=4, lineage=bundle.lineage, cache_capacity=32, options=options)
    (folder / ENGINES_FILE).write_text(records_json([record]))
    if allowed:
        assert find_engine(Bundle.open(folder), None, allow_host_code=True) == record
        return
    with pytest.raises(BackendError, match="so it holds code that runs on the CPU; allow_host_code is off"):
        find_engine(Bundle.open(folder), None)


def test_an_engine_of_a_backend_that_is_not_installed_says_what_it_was_built_with(monkeypatch):
    monkeypatch.setattr("engines.library.backend._installed", lambda name: name == "tensorrt-rtx")
    with pytest.raises(BackendError, match=r"a\.engine: built with tensorrt 10\.15\.1, which this machine lacks .*pip"):
        backend_of(replace(RECORD, backend="tensorrt", version="10.15.1"))


def test_a_search_for_engines_says_what_each_was_built_with(bundle, tmp_path, monkeypatch):
    monkeypatch.setattr("engines.library.backend._installed", lambda name: name == "tensorrt-rtx")
    monkeypatch.setattr("engines.running.choose_engine.visible_gpus", lambda: [GPU])
    folder = Path(shutil.copytree(bundle.folder, tmp_path / "bundle"))
    (folder / "a.engine").write_bytes(b"plan")
    record = replace(RECORD, backend="tensorrt", version="10.15.1", size_bytes=4, lineage=bundle.lineage)
    (folder / ENGINES_FILE).write_text(records_json([record]))
    with pytest.raises(BackendError, match=r"engine a\.engine: built with tensorrt 10\.15\.1, which this"):
        find_engine(Bundle.open(folder), None)


def test_an_engine_needs_a_gpu():
    with pytest.raises(BundleError, match=r"a\.engine: it needs a GPU, and none is visible"):
        check_runnable(RECORD, "tensorrt-rtx", "1.7.1", [])


def test_an_engine_for_another_compute_capability_is_refused_with_both_and_the_gpu():
    with pytest.raises(BundleError, match=r"built for compute capability 8\.6, this is NVIDIA Test 9000 with 9\.0"):
        check_runnable(replace(RECORD, compute_capability="8.6"), "tensorrt-rtx", "1.7.1", [GPU])
