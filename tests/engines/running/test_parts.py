"""A unit in several graphs, with one manifest, one session and one engine per graph; and slices that a caller joins."""

from __future__ import annotations

import json
import shutil

import numpy as np
import onnx
import onnxruntime
import pytest

from engines.building.build import build_bundle, build_parts
from engines.building.preparation import BuildRequest
from engines.commands.main import main as engines_main
from engines.comparison.compare import CompareRequest, compare_bundle
from engines.library.backend import choose_backend
from engines.library.usable_engines import check_lineage
from engines.running.tensorrt_parts import TensorRTParts
from engines.running.tensorrt_stepper import TensorRTStepper
from exporter.bundle.bundle import Bundle
from exporter.bundle.engine_records import read_records
from exporter.bundle.manifest import MANIFEST_FILE
from exporter.commands.main import main as exporter_main
from exporter.common.errors import BundleError, InputError
from exporter.costs.stored_size import parts_within
from exporter.export import ExportRequest, export_bundle
from exporter.graph.weight_reader import GraphWeights, bundle_weights
from exporter.model.weights import RandomWeights
from exporter.spec.graph_spec import GraphSpec
from exporter.spec.tensors import graph_contract
from exporter.spec.unit import Unit, part_bounds
from exporter.steppers.onnxruntime_stepper import OnnxruntimeStepper
from exporter.steppers.parts_stepper import PartsStepper
from exporter.validation.bundle_validation import validate_bundle
from exporter.validation.stored_values import STORED
from runtime import DecodeSession
from tests.conftest import MAX_POSITIONS, TINY
from tests.support.doubles.cuda_double import ENGINE, CudaDouble, engine_record, tensorrt_double
from tests.support.planted_faults import scale_weight


def export_parts(folder, unit="model", dtype="fp16", n_parts=2) -> Bundle:
    request = ExportRequest(TINY, Unit.parse(unit, TINY), RandomWeights(TINY, 0), dtype, MAX_POSITIONS, n_parts=n_parts)
    return export_bundle(request, folder, validated=False)


@pytest.fixture(scope="module")
def parted(tmp_path_factory):
    """Bundles of the tiny model in parts, made once."""
    made: dict[tuple, Bundle] = {}

    def export(unit: str = "model", dtype: str = "fp32", n_parts: int = 2) -> Bundle:
        key = (unit, dtype, n_parts)
        if key not in made:
            made[key] = export_parts(tmp_path_factory.mktemp("parts") / "bundle", *key)
        return made[key]

    return export


@pytest.mark.parametrize(
    ("n_layers", "n_parts", "bounds"),
    [
        (3, 1, [(0, 3)]),
        (3, 2, [(0, 2), (2, 3)]),
        (32, 4, [(0, 8), (8, 16), (16, 24), (24, 32)]),
        (5, 3, [(0, 2), (2, 4), (4, 5)]),
    ],
)
def test_parts_are_consecutive_and_nearly_equal(n_layers, n_parts, bounds):
    assert part_bounds(n_layers, n_parts) == tuple(bounds)


def test_a_part_has_hidden_states_at_its_seams_and_the_units_cache_numbers(parted):
    bundle = parted()
    whole = graph_contract(TINY, Unit.parse("model", TINY), "fp32")
    assert bundle.manifest.contract == whole and bundle.manifest.parts == ((0, 2), (2, 3))
    first, second = (part.manifest.contract for part in bundle.parts)
    assert [spec.name for spec in (*first.step_inputs[:1], *first.step_outputs)] == ["input_ids", "hidden_states_out"]
    assert [spec.name for spec in (*second.step_inputs[:1], *second.step_outputs)] == ["hidden_states", "logits"]
    assert first.cache_pairs + second.cache_pairs == whole.cache_pairs
    graph = onnx.load(bundle.parts[1].graph_path, load_external_data=False).graph
    assert {"past_key_values.2.key", "hidden_states"} <= {value.name for value in graph.input}
    assert any(node.name == "blocks.2.mlp.gate_up_proj" for node in graph.node)


@pytest.mark.parametrize(("unit", "n_parts"), [("model", 2), ("model", 3), ("stack", 3)])
def test_a_session_over_parts_gives_what_the_whole_gives(tiny_bundle, parted, unit, n_parts):
    rng = np.random.default_rng(0)
    draw = (
        (lambda b, t: rng.integers(0, 101, (b, t)))
        if unit == "model"
        else lambda b, t: rng.standard_normal((b, t, 64)).astype(np.float32)
    )
    steps = [draw(2, 5), draw(2, 1), draw(2, 1)]
    outputs, caches = [], []
    for bundle in (tiny_bundle(unit, "fp32"), parted(unit, "fp32", n_parts)):
        with DecodeSession.open(bundle.folder, max_batch=3, cache_capacity=32) as session:
            got = [session.prefill(steps[0], lengths=[5, 3])]
            got += [session.decode(step[:, 0] if unit == "model" else step) for step in steps[1:]]
            outputs.append(got)
            caches.append(session._cache.read(1, 5))
    for whole, parts in zip(*outputs, strict=True):
        np.testing.assert_allclose(parts, whole, atol=1e-5)
    for whole, parts in zip(*caches, strict=True):
        np.testing.assert_allclose(parts, whole, atol=1e-5)


def test_slots_of_a_session_over_parts_fork_travel_and_leave(parted):
    with DecodeSession.open(parted().folder, max_batch=3, cache_capacity=32) as session:
        first = session.acquire()
        session.step({first: np.array([1, 2, 3])})
        twin, state = session.fork(first), session.export_slot(first)
        session.release(first)
        third = session.import_slot(state)
        out = session.step({twin: np.array([4]), third: np.array([4])})
        np.testing.assert_array_equal(out[twin], out[third])


def test_hidden_states_pass_between_onnxruntime_parts_as_they_are(parted, monkeypatch):
    addresses, run = [], OnnxruntimeStepper._run

    def watched(self, feeds, cache, first_row):
        hidden = feeds.get("hidden_states")
        if hidden is not None:
            addresses.append(("in", type(hidden), hidden.data_ptr()))
        results = run(self, feeds, cache, first_row)
        if "hidden_states_out" in results:
            addresses.append(("out", type(results["hidden_states_out"]), results["hidden_states_out"].data_ptr()))
        return results

    monkeypatch.setattr(OnnxruntimeStepper, "_run", watched)
    with DecodeSession.open(parted(n_parts=3).folder, max_batch=1, cache_capacity=32) as session:
        session.prefill(np.array([[1, 2, 3]]))
    assert [kind for kind, _, _ in addresses] == ["out", "in", "out", "in"]
    assert all(kind is onnxruntime.OrtValue for _, kind, _ in addresses)
    assert [a for _, _, a in addresses[0::2]] == [a for _, _, a in addresses[1::2]]


def double_parts(bundle: Bundle, cuda: CudaDouble, capacity: int, tmp_path) -> TensorRTParts:
    """The TensorRT stepper for all parts. Each engine is a double that computes its part with onnxruntime."""
    steppers = []
    for part in bundle.parts:
        folder = tmp_path / part.folder.name
        folder.mkdir()
        (folder / "model.engine").write_bytes(ENGINE)
        record = engine_record(part, capacity, 4, capacity)
        module = tensorrt_double(part, record, cuda, OnnxruntimeStepper.from_bundle(part))
        steppers.append(TensorRTStepper(Bundle(folder, part.manifest), record, module, cuda))
    return TensorRTParts(bundle.manifest.contract, steppers)


def test_tensorrt_parts_share_a_stream_and_the_buffer_at_each_seam(tiny_bundle, parted, tmp_path):
    cuda = CudaDouble()
    stepper = double_parts(parted(n_parts=3), cuda, 64, tmp_path)
    seams = [
        (a._buffers["hidden_states_out"], b._buffers["hidden_states"])
        for a, b in zip(stepper.steppers, stepper.steppers[1:], strict=False)
    ]
    assert len(seams) == 2 and all(left == right for left, right in seams)
    session = DecodeSession(parted(n_parts=3), stepper, 4, 64)
    prompts = np.array([[1, 2, 3], [4, 5, 6]])
    with DecodeSession.open(tiny_bundle("model", "fp32").folder, max_batch=4, cache_capacity=64) as whole:
        np.testing.assert_allclose(session.prefill(prompts), whole.prefill(prompts), atol=1e-5)
        for token in (7, 8, 9):
            np.testing.assert_allclose(session.decode(np.full(2, token)), whole.decode(np.full(2, token)), atol=1e-5)
    session.close()
    assert cuda.allocations == 0  # a shared buffer is freed once


@pytest.mark.slow
def test_every_part_is_compiled_and_recorded_beside_its_graph(parted, tmp_path, capsys):
    folder = tmp_path / "bundle"
    shutil.copytree(parted(dtype="fp16").folder, folder)
    bundle, rtx = Bundle.open(folder), choose_backend("tensorrt-rtx")
    with pytest.raises(InputError, match="2 parts"):
        build_bundle(bundle, rtx, BuildRequest())
    lines: list[str] = []
    records = build_parts(bundle, rtx, BuildRequest(2, 8, 32), lines.append)
    assert [line for line in lines if line.startswith("part")] == ["part 1 of 2: layers 0:2", "part 2 of 2: layers 2:3"]
    for part, record in zip(bundle.parts, records, strict=True):
        assert read_records(part.folder) == [record] and (part.folder / record.file).stat().st_size == record.size_bytes
        check_lineage(part, record)
    with pytest.raises(BundleError, match="changed since it was built"):
        check_lineage(bundle.parts[0], records[1])
    assert exporter_main(["verify", str(folder)]) == 0
    assert "part1/model.c32.tensorrt-rtx.engine" in capsys.readouterr().err
    assert engines_main(["inspect", str(folder), "--cache-capacity", "32", "--format", "json"]) == 0
    inspected = json.loads(capsys.readouterr().out)["parts"]
    assert [part["kv_cache_updates"] for part in inspected] == [4, 2] and all(
        len(part["engines"]) == 1 for part in inspected
    )


@pytest.mark.slow
def test_exporting_again_takes_engines_away_and_leaves_other_peoples_files(tmp_path):
    folder = tmp_path / "bundle"
    bundle = export_parts(folder, n_parts=3)
    build_parts(bundle, choose_backend("tensorrt-rtx"), BuildRequest(2, 8, 32))
    (folder / "part2" / "notes.txt").write_text("mine")
    (folder / "notes.txt").write_text("mine too")
    export_parts(folder, n_parts=2)
    left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert left == sorted(
        [
            "manifest.json",
            "report.json",
            "notes.txt",
            "part2/notes.txt",
            *(f"part{i}/model.onnx{end}" for i in (0, 1) for end in ("", ".data")),
        ]
    )
    export_bundle(
        ExportRequest(TINY, Unit.parse("model", TINY), RandomWeights(TINY, 0), "fp16", MAX_POSITIONS),
        folder,
        validated=False,
    )
    assert (folder / "part2" / "notes.txt").read_text() == "mine" and not (folder / "part0").exists()


def test_damage_in_any_part_is_found(tmp_path):
    bundle = export_parts(tmp_path / "bundle")
    path = tmp_path / "bundle" / "part1" / "model.onnx.data"
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    Bundle.open(bundle.folder)
    with pytest.raises(BundleError, match=r"part1/model\.onnx\.data has another SHA-256"):
        Bundle.open(bundle.folder, verify="full")
    path.write_bytes(data[:-1])
    with pytest.raises(BundleError, match=r"part1/model\.onnx\.data has .* bytes"):
        Bundle.open(bundle.folder)


@pytest.mark.parametrize("parts", [[[0, 1]], [[0, 2], [1, 3]], [[0, 1], [1, 3]], [[0, 4]], [[]], "ab", 7])
def test_a_manifest_with_impossible_parts_is_refused(parted, tmp_path, parts):
    folder = tmp_path / "bundle"
    shutil.copytree(parted(dtype="fp16").folder, folder)
    manifest = json.loads((folder / MANIFEST_FILE).read_text()) | {"parts": parts}
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    with pytest.raises(BundleError):
        Bundle.open(folder)


@pytest.mark.parametrize(("unit", "dtype"), [("model", "fp16"), ("stack", "bf16")])
def test_validation_whole_and_by_layer_and_comparison_take_parts(parted, unit, dtype):
    bundle = parted(unit, dtype)
    for by_layer in (False, True):
        assert validate_bundle(bundle, RandomWeights(TINY, 0), by_layer=by_layer)[0]["passed"]
    result = compare_bundle(bundle, CompareRequest())
    assert result.passed and [r.backend for r in result.results] == ["onnxruntime", "interpreter"]
    assert "in 2 parts" in result.results[1].description


def test_a_wrong_weight_in_a_later_part_fails(parted, tmp_path):
    folder = tmp_path / "bundle"
    shutil.copytree(parted(dtype="fp16").folder, folder)
    scale_weight(Bundle.open(folder).parts[1], "blocks.2.mlp.up_proj.weight", 1.1)
    broken = Bundle.open(folder)
    assert not validate_bundle(broken, RandomWeights(TINY, 0))[0]["passed"]
    _, comparisons = validate_bundle(broken, RandomWeights(TINY, 0), by_layer=True)
    assert {c.scenario.split(":")[0] for c in comparisons if not c.passed} == {"layer 2", STORED}


def test_the_parts_weights_are_the_wholes(tiny_bundle, parted):
    whole, parts = bundle_weights(tiny_bundle("model", "fp16")), bundle_weights(parted("model", "fp16", 3))
    assert isinstance(whole, GraphWeights)
    for name in whole.names - {"rope.cos_table", "rope.sin_table"}:
        assert whole.read(name).equal(parts.read(name)), name


def test_a_budget_makes_as_few_parts_as_fit(capsys, tmp_path):
    from exporter.spec.catalogue import CATALOGUE

    config = CATALOGUE["llama3-8b"]
    spec = GraphSpec(config, Unit.parse("model", config), "fp16", 8192)
    assert parts_within(spec, 60 << 30) == 1
    counts = [parts_within(spec, gib << 30) for gib in (24, 14, 8)]
    assert counts == sorted(counts) and counts[0] >= 2
    with pytest.raises(InputError, match="what compiling one layer takes"):
        parts_within(spec, 1 << 30)
    base = ["export", "--model", "smollm2-135m", "--no-validate", "-o", str(tmp_path / "x")]
    for arguments, word in (
        ("--unit model --parts 0", "expected 1 to 30"),
        ("--unit model --parts 31", "expected 1 to 30"),
        ("--unit component:rms_norm --parts 1", ""),
        ("--unit model --parts 2 --part-budget 9", "either --parts"),
        ("--unit model --cache growing --parts 2", "cache in place"),
        ("--unit model --part-budget 0.01", "one layer takes"),
    ):
        code = exporter_main([*base, *arguments.split()])
        assert (code, word in capsys.readouterr().err) == ((0, True) if not word else (2, True)), arguments


def test_stacks_chained_by_the_caller_equal_the_whole(tiny_bundle):
    x = np.random.default_rng(0).standard_normal((2, 6, 64)).astype(np.float32)
    whole, first, second = (tiny_bundle("stack", "fp32", layers) for layers in (None, "0:2", "2:3"))
    assert second.manifest.unit.first_layer == 2
    sessions = [DecodeSession.open(bundle.folder, max_batch=2, cache_capacity=16) for bundle in (whole, first, second)]
    for step in (x[:, :4], x[:, 4:5], x[:, 5:]):
        expected, middle = (
            session.decode(step) if session.lengths.any() else session.prefill(step) for session in sessions[:2]
        )
        got = sessions[2].decode(middle) if sessions[2].lengths.any() else sessions[2].prefill(middle)
        np.testing.assert_allclose(got, expected, atol=1e-5)
    for session in sessions:
        session.close()


def test_a_failing_part_leaves_the_session_as_it_was(parted, monkeypatch):
    with DecodeSession.open(parted().folder, max_batch=1, cache_capacity=32) as session:
        session.prefill(np.array([[1, 2, 3]]))
        before = session._cache.read(0, 8)
        stepper: PartsStepper = session._stepper
        monkeypatch.setattr(
            stepper.steppers[1], "run", lambda *arguments: (_ for _ in ()).throw(RuntimeError("planted"))
        )
        with pytest.raises(RuntimeError, match="planted"):
            session.decode(np.array([4]))
        assert session.lengths.tolist() == [3]
        for old, new in zip(before, session._cache.read(0, 8), strict=True):
            np.testing.assert_array_equal(old, new)
