"""An engine's record names the bytes that it was built from. Bytes that are not the manifest's are refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
import types
from pathlib import Path

import onnx
import pytest

from engines.building import build
from engines.building.build import build_bundle, build_onnx, build_parts
from engines.building.preparation import BuildRequest
from engines.building.refit import refit_bundle
from engines.commands.main import main
from engines.comparison.compare import CompareRequest, compare_bundle
from engines.comparison.polygraphy_files import save_outputs
from engines.library.backend import Backend, choose_backend
from engines.library.gpu import Gpu
from exporter.bundle.bundle import ENGINES_FILE, Bundle, sha256_of
from exporter.bundle.engine_records import EngineRecord, records_json
from exporter.bundle.manifest import DATA_FILE, GRAPH_FILE
from exporter.common.errors import BundleError
from exporter.graph.fixed_capacity import fix_capacity
from exporter.validation.scenarios import RunLimits
from tests.exporter.bundle.test_origin import overwrite
from tests.support.doubles.cuda_double import ILogger, engine_record

SMALL = BuildRequest(max_batch=2, max_seq_len=8, cache_capacity=64)
CHANGED = rf"{DATA_FILE.replace('.', '[.]')} has another SHA-256 than the manifest says"
CAPACITY, FIXED_GRAPH, PLAN = 64, "model.c64.onnx", b"a plan"


@pytest.fixture(scope="module")
def rtx() -> Backend:
    return choose_backend("tensorrt-rtx")


@pytest.fixture
def bundle(tiny_bundle, tmp_path) -> Bundle:
    shutil.copytree(tiny_bundle("block", "fp16").folder, tmp_path / "bundle")
    return Bundle.open(tmp_path / "bundle")


def checksums(folder: Path) -> dict[str, str]:
    return {name: sha256_of(folder / name) for name in (GRAPH_FILE, DATA_FILE)}


# --- build ------------------------------------------------------------------------------------------------------------


def test_changed_weights_are_not_built(bundle, rtx):
    overwrite(bundle.folder / DATA_FILE)
    with pytest.raises(BundleError, match=CHANGED):
        build_bundle(bundle, rtx, SMALL)
    assert not (bundle.folder / ENGINES_FILE).exists() and not list(bundle.folder.glob("*.engine"))


def test_changed_weights_of_a_later_part_are_not_built(tiny_bundle, tmp_path, rtx):
    shutil.copytree(tiny_bundle("stack", "fp16", n_parts=2).folder, tmp_path / "parts")
    parts = Bundle.open(tmp_path / "parts")
    overwrite(parts.folder / "part1" / DATA_FILE)
    with pytest.raises(BundleError, match=f"bundle .*part1: {CHANGED}"):
        build_parts(parts, rtx, SMALL)


def test_the_command_refuses_changed_weights(bundle, capsys):
    overwrite(bundle.folder / DATA_FILE)
    assert main(["build", str(bundle.folder), "--backend", "tensorrt-rtx"]) == 2
    assert f"{DATA_FILE} has another SHA-256" in capsys.readouterr().err


def test_the_lineage_is_what_was_read(bundle, rtx):
    assert build_bundle(bundle, rtx, SMALL).lineage == checksums(bundle.folder)


def change_while_compiling(monkeypatch, path: Path) -> None:
    plain = build.compile_network

    def compile_network(*arguments):
        overwrite(path)
        return plain(*arguments)

    monkeypatch.setattr(build, "compile_network", compile_network)


def test_weights_that_change_during_a_build_leave_no_engine(bundle, rtx, monkeypatch):
    change_while_compiling(monkeypatch, bundle.folder / DATA_FILE)
    with pytest.raises(BundleError, match=f"{DATA_FILE} changed while in use; the result is void"):
        build_bundle(bundle, rtx, SMALL)
    assert not (bundle.folder / ENGINES_FILE).exists() and not list(bundle.folder.glob("*.engine"))


def test_data_of_an_onnx_file_that_changes_during_a_build_leaves_no_engine(bundle, rtx, tmp_path, monkeypatch):
    path, request = bundle.graph_path, SMALL
    record = build_onnx(path, tmp_path / "first", rtx, request)
    assert record.lineage == checksums(bundle.folder)
    change_while_compiling(monkeypatch, bundle.folder / DATA_FILE)
    with pytest.raises(BundleError, match=f"{DATA_FILE} changed while in use"):
        build_onnx(path, tmp_path / "second", rtx, request)
    assert not list((tmp_path / "second").glob("*.engine"))


# --- refit ------------------------------------------------------------------------------------------------------------


class Trt(types.SimpleNamespace):
    """A double of TensorRT's refitter, which returns another plan."""

    def __init__(self, refitted=lambda: None):
        self.ILogger, self.refitted = ILogger, refitted
        self.SerializationFlag = types.SimpleNamespace(EXCLUDE_WEIGHTS=1)

    def Runtime(self, logger):
        config = types.SimpleNamespace(clear_flag=lambda flag: None)
        engine = types.SimpleNamespace(
            create_serialization_config=lambda: config, serialize_with_config=lambda config: b"another plan"
        )
        return types.SimpleNamespace(deserialize_cuda_engine=lambda plan: engine)

    def Refitter(self, engine, logger):
        return types.SimpleNamespace(refit_cuda_engine=lambda: True)

    def OnnxParserRefitter(self, refitter, logger):
        return types.SimpleNamespace(refit_from_file=lambda path: self.refitted() is None)


@pytest.fixture
def stripped(bundle, monkeypatch) -> EngineRecord:
    """The record of an engine that was built to be refitted, with its files in the bundle."""
    monkeypatch.setattr("engines.building.refit.visible_gpus", lambda: [Gpu("a GPU", "9.0")])
    graph = onnx.load(bundle.graph_path, load_external_data=False)
    fix_capacity(graph, CAPACITY)
    onnx.save(graph, bundle.folder / FIXED_GRAPH)
    record = engine_record(bundle, CAPACITY)
    (bundle.folder / record.file).write_bytes(PLAN)
    record = dataclasses.replace(
        record,
        size_bytes=len(PLAN),
        sha256=sha256_of(bundle.folder / record.file),
        graph_file=FIXED_GRAPH,
        lineage=record.lineage | {DATA_FILE: "1" * 64},
        options=record.options | {"strip_plan": True, "refit": True},
    )
    (bundle.folder / ENGINES_FILE).write_text(records_json([record]))
    return record


def refit(bundle: Bundle, record: EngineRecord, trt: Trt) -> EngineRecord:
    return refit_bundle(bundle, Backend(record.backend, trt, record.version, "a double"), record)  # type: ignore[arg-type]


def test_a_refit_records_what_was_read(bundle, stripped):
    assert refit(bundle, stripped, Trt()).lineage == checksums(bundle.folder)
    assert json.loads((bundle.folder / ENGINES_FILE).read_text())["engines"][0]["lineage"] == checksums(bundle.folder)


def test_a_refit_refuses_changed_weights(bundle, stripped):
    overwrite(bundle.folder / DATA_FILE)
    with pytest.raises(BundleError, match=CHANGED):
        refit(bundle, stripped, Trt())
    assert (bundle.folder / stripped.file).read_bytes() == PLAN


def test_a_refit_refuses_an_engine_with_other_content(bundle, stripped):
    (bundle.folder / stripped.file).write_bytes(PLAN[::-1])
    with pytest.raises(BundleError, match=r"it is not the file that was built \(another SHA-256\)"):
        refit(bundle, stripped, Trt())


def test_a_refit_refuses_another_graph_beside_the_engine(bundle, stripped):
    graph = onnx.load(bundle.folder / FIXED_GRAPH, load_external_data=False)
    del graph.graph.node[3]
    onnx.save(graph, bundle.folder / FIXED_GRAPH)
    with pytest.raises(BundleError, match=f"{FIXED_GRAPH}: it is not {GRAPH_FILE} with cache_capacity fixed at 64"):
        refit(bundle, stripped, Trt())


def test_weights_that_change_during_a_refit_leave_the_old_engine(bundle, stripped):
    with pytest.raises(BundleError, match=f"{DATA_FILE} changed while in use"):
        refit(bundle, stripped, Trt(lambda: overwrite(bundle.folder / DATA_FILE)))
    assert (bundle.folder / stripped.file).read_bytes() == PLAN
    assert json.loads((bundle.folder / ENGINES_FILE).read_text())["engines"][0]["sha256"] == stripped.sha256


# --- compare ----------------------------------------------------------------------------------------------------------


def test_changed_weights_are_not_compared(bundle):
    overwrite(bundle.folder / DATA_FILE)
    for request in (CompareRequest(("eager", "onnxruntime")), CompareRequest(("eager", "onnxruntime"), audit=True)):
        with pytest.raises(BundleError, match=CHANGED):
            compare_bundle(bundle, request)
    with pytest.raises(BundleError, match=CHANGED):
        save_outputs(bundle, bundle.folder / "outputs.json", 0, RunLimits())
    assert not (bundle.folder / "outputs.json").exists()


def test_a_comparison_names_what_it_read(bundle):
    assert compare_bundle(bundle, CompareRequest(("eager", "onnxruntime"))).files == checksums(bundle.folder)


def test_weights_that_change_during_a_comparison_void_it(bundle):
    def say(line: str) -> None:
        if line == "run: onnxruntime":
            overwrite(bundle.folder / GRAPH_FILE, 0)
            (bundle.folder / GRAPH_FILE).touch()

    with pytest.raises(BundleError, match=f"{GRAPH_FILE} changed while in use"):
        compare_bundle(bundle, CompareRequest(("eager", "onnxruntime")), say)
