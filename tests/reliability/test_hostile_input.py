"""Files and arguments that a stranger made: refused in the project's own words, nothing executed, nothing read outside, no end of memory.

Each named test pins a fault that the campaign (benchmarks/campaigns/hostile_input) once found; the campaign itself runs here small.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import engines.commands.main
import exporter.commands.main
import runtime.commands.main
from benchmarks.campaigns.hostile_input.campaign import run_campaign
from benchmarks.campaigns.hostile_input.originals import META, META_NAME, make_originals
from engines.building.publishing import read_records
from engines.network.source import load_source
from exporter.bundle.bundle import Bundle, file_entry, sha256_of
from exporter.checkpoint.formats import open_checkpoint
from exporter.common import terminal
from exporter.common.documents import parse_document
from exporter.common.errors import BackendError, BundleError, CheckpointError, InputError
from exporter.graph.weight_reader import bundle_weights
from exporter.placing.files import write_atomically
from exporter.placing.folders import new_folder
from exporter.placing.foreign_files import foreign_entries
from exporter.spec import catalogue
from exporter.steppers.onnxruntime_stepper import refusals
from exporter.validation.verify import verify_bundle
from runtime import DecodeSession
from tests.conftest import TINY
from tests.support.checkpoint_folders import write_huggingface
from tests.support.cuda_double import engine_record

SECRET = "what nobody may repeat"


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("originals")
    make_originals(folder, ("block", "model", "int8", "uint4"))
    return folder


@pytest.fixture
def bundle(originals, tmp_path):
    """A bundle of a block, free to be changed, with a secret beside it."""
    (tmp_path / "secret").write_text(json.dumps({"format_version": SECRET}))
    return shutil.copytree(originals / "block", tmp_path / "bundle")


@pytest.fixture
def text_bundle(originals, tmp_path):
    """A bundle of a whole model with its tokenizer, free to be changed."""
    return shutil.copytree(originals / "model", tmp_path / "bundle")


def seal(folder) -> None:
    """Writes the files' sizes and checksums into the manifest, as anybody can."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = {name: file_entry(folder / name) for name in manifest["files"]}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def change_graph(folder, change) -> None:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    change(model)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    seal(folder)


def change_manifest(folder, change) -> None:
    data = json.loads((folder / "manifest.json").read_text())
    change(data)
    (folder / "manifest.json").write_text(json.dumps(data))


def refusal(folder) -> str:
    with pytest.raises(BundleError) as caught:
        Bundle.open(folder, "full")
    return str(caught.value)


# --- the campaign ------------------------------------------------------------------------------------------------------


def test_a_small_campaign_finds_nothing_and_gets_past_every_gate(originals):
    cases = {
        "manifest": 60, "geometry": 30, "graph": 60, "external data": 50, "data file": 40, "tokenizer": 30, "report and genai config": 20,
        "config": 20, "safetensors": 30, "shard index": 20, "params": 20, "pth": 30, "command line": 30, "prompt": 10,
    }  # fmt: skip
    result = run_campaign(cases, seed=7, jobs=1, originals=originals)
    assert result["fault_examples"] == [] and result["faults"] == 0
    assert result["cases"] == sum(cases.values())
    passed = {gate for kind in result["kinds"].values() for gate in kind["cases_past_each_gate"]}
    assert {
        "sizes and checksums match",
        "graph has the bundle's form",
        "prefill ran",
        "checkpoint opened",
        "tokenizer loaded",
    } <= passed


# --- links -------------------------------------------------------------------------------------------------------------


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
    """Hugging Face's cache: snapshots/REVISION holds links to ../../blobs/HASH."""
    snapshot = tmp_path / "models--somebody--something" / "snapshots" / "0123"
    shutil.copytree(originals / "block", snapshot)
    (tmp_path / "models--somebody--something" / "blobs").mkdir()
    for name in ("manifest.json", "model.onnx", "model.onnx.data"):
        shutil.move(snapshot / name, snapshot.parents[1] / "blobs" / name)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    Bundle.open(snapshot, "full")
    DecodeSession.open(snapshot).close()


def test_a_tokenizer_that_is_a_link_out_of_the_checkpoint_is_not_copied(tmp_path):
    folder = write_huggingface(tmp_path / "checkpoint", TINY)
    (tmp_path / "secret").write_text(SECRET)
    (folder / "chat_template.jinja").symlink_to("../secret")
    with pytest.raises(CheckpointError, match="leads out of"):
        open_checkpoint(folder)


def test_an_engine_that_is_a_link_out_is_refused(bundle):
    record = engine_record(Bundle.open(bundle), 32).__dict__ | {
        "file": "x.engine", "sha256": file_entry(bundle.parent / "secret")["sha256"], "size_bytes": (bundle.parent / "secret").stat().st_size,
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


# --- JSON --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ['{"a": NaN}', '{"a": 1, "a": 2}', '"\\ud800"', "[" * 100_000, '{"a": -Infinity}', "9" * 5000, "", "\ufeff{}"],
)
def test_what_parsers_disagree_about_is_no_json(text):
    with pytest.raises(ValueError):
        parse_document(text)


def test_a_manifest_of_absurd_size_is_not_read(bundle):
    with open(bundle / "manifest.json", "ab") as file:
        file.truncate(1 << 40)
    assert "bytes, expected at most" in refusal(bundle)


def test_a_manifest_that_asks_for_a_billion_layers_is_refused_at_once(bundle):
    change_manifest(
        bundle, lambda data: (data["config"].update(n_layers=2**31 - 1), data["unit"].update(n_layers=10**9))
    )
    assert "n_layers" in refusal(bundle)


@pytest.mark.parametrize(
    "weights", [{"source": "random"}, {"source": "random", "seed": -1}, {"source": "random", "seed": "0"}]
)
def test_random_weights_need_a_seed(bundle, weights):
    change_manifest(bundle, lambda data: data.update(weights=weights))
    assert "seed" in refusal(bundle)


def test_a_number_that_no_float_holds_is_refused_as_a_config_value(bundle):
    change_manifest(bundle, lambda data: data["config"].update(norm_eps=10**30))
    assert "norm_eps" in refusal(bundle)


@pytest.mark.parametrize("report", [[], {"validation": []}, {"validation": "PASSED"}])
def test_a_report_of_another_form_is_refused(text_bundle, report, capsys):
    (text_bundle / "report.json").write_text(json.dumps(report))
    assert runtime.commands.main.main(["report", str(text_bundle), "--prompt", "he"]) == 2
    assert "report.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "validation",
    [{"passed": 1}, {"max_error": "x", "max_allowed": 1}, {"max_error": None, "max_allowed": 0.1, "passed": False}],
    ids=str,
)
def test_a_report_says_what_it_can(text_bundle, validation, capsys):
    (text_bundle / "report.json").write_text(json.dumps({"validation": validation}))
    assert runtime.commands.main.main(["report", str(text_bundle), "--prompt", "he", "--max-new-tokens", "1"]) == 0
    assert ("not finite" if "passed" in validation and len(validation) > 1 else "unknown") in capsys.readouterr().err


def test_a_damaged_tokenizer_is_refused(text_bundle, capsys):
    (text_bundle / "tokenizer.json").write_text('{"version": "1.0"}')
    seal(text_bundle)
    assert runtime.commands.main.main(["generate", str(text_bundle), "--prompt", "he"]) == 2
    assert "it is no tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"profiles": [{"name": "p", "ranges": {"x": {"min": [1], "opt": [1, 2], "max": "a"}}}]},
        {"lineage": {"a": 1}},
        {"size_bytes": -1},
        {"options": {}},
    ],
    ids=["ranges", "lineage", "size", "options"],
)
def test_engine_records_of_another_form_are_refused(bundle, change):
    record = engine_record(Bundle.open(bundle), 32).__dict__
    (bundle / "engines.json").write_text(json.dumps({"format_version": 1, "engines": [record]}))
    assert len(read_records(bundle)) == 1
    (bundle / "engines.json").write_text(json.dumps({"format_version": 1, "engines": [record | change]}))
    with pytest.raises(BundleError, match="damaged"):
        read_records(bundle)


# --- the graph ---------------------------------------------------------------------------------------------------------


def external(model):
    return next(tensor for tensor in model.graph.initializer if tensor.external_data)


def set_place(model, key, value):
    next(entry for entry in external(model).external_data if entry.key == key).value = value


def loop(model):
    model.graph.node.insert(
        0, helper.make_node("If", ["c"], ["y"], then_branch=onnx.GraphProto(), else_branch=onnx.GraphProto())
    )


def stolen_constant(model):
    tensor = TensorProto(name="t", data_type=TensorProto.UINT8, dims=[1], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="../secret")
    model.graph.node.insert(0, helper.make_node("Constant", [], ["t"], value=tensor))


def fill(model):
    model.graph.initializer.append(numpy_helper.from_array(np.array([2**40], np.int64), "huge"))


def cycle(model):
    model.graph.node[0].input[0] = model.graph.node[-1].output[0]


def function(model):
    body = [helper.make_node("Add", ["a", "a"], ["b"])]
    model.functions.append(helper.make_function("", "Add", ["a"], ["b"], body, list(model.opset_import)))


GRAPH_CHANGES = [
    loop, stolen_constant, fill, cycle, function,
    lambda m: set_place(m, "location", "../secret"), lambda m: set_place(m, "location", "/etc/hostname"), lambda m: set_place(m, "offset", "-4096"),
    lambda m: set_place(m, "length", "9" * 30), lambda m: set_place(m, "length", "1e3"), lambda m: external(m).external_data.pop(),
    lambda m: external(m).external_data.add(key="location", value="x"), lambda m: external(m).dims.append(2**40),
    lambda m: setattr(m.graph.node[0], "domain", "com.microsoft"), lambda m: setattr(m.graph.node[0], "op_type", "Loop"),
    lambda m: setattr(m.opset_import[0], "version", 18), lambda m: m.graph.node[0].ClearField("output"),
    lambda m: m.graph.sparse_initializer.add(), lambda m: m.training_info.add(), lambda m: m.graph.output.pop(),
    lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", 11), lambda m: m.graph.node[0].attribute.add(name="g", type=5),
    lambda m: m.graph.initializer.append(m.graph.initializer[0]), lambda m: m.metadata_props.add(key="k", value="v" * 10**6),
]  # fmt: skip


@pytest.mark.parametrize("change", GRAPH_CHANGES, ids=range(len(GRAPH_CHANGES)))
def test_a_graph_of_another_form_is_refused_before_any_library_parses_it(bundle, change, monkeypatch):
    change_graph(bundle, change)
    monkeypatch.setattr("onnxruntime.InferenceSession", None)
    message = refusal(bundle)
    assert "model.onnx: it " in message and len(message) < 700


def test_bytes_that_are_no_graph_are_refused(bundle):
    for content in (b"", b"\xff" * 100, (bundle / "model.onnx").read_bytes()[:-7]):
        (bundle / "model.onnx").write_bytes(content)
        seal(bundle)
        assert "not a graph as an export writes it" in refusal(bundle)


def test_a_data_file_with_something_behind_the_weights_is_refused(bundle):
    with open(bundle / "model.onnx.data", "ab") as file:
        file.write(b"more")
    seal(bundle)
    assert "its weights end at" in refusal(bundle)


def test_weights_of_another_geometry_are_refused(bundle):
    change_manifest(bundle, lambda data: data["config"].update(intermediate_size=97))
    with pytest.raises(BundleError, match="has shape"):
        bundle_weights(Bundle.open(bundle))


def test_positions_beyond_the_tables_are_refused(bundle):
    change_manifest(
        bundle, lambda data: (data["config"].update(context_length=2**31 - 1), data.update(max_positions=2**31 - 1))
    )
    with pytest.raises(BundleError, match="RoPE tables"):
        bundle_weights(Bundle.open(bundle))


def test_a_step_that_onnxruntime_refuses_is_an_error_of_the_backend():
    with pytest.raises(BackendError, match=r"it does not run this graph: first line$"), refusals():
        raise RuntimeError("first line\nsecond line")


@pytest.mark.parametrize("location", ["../secret", "link", "/etc/hostname", "a\0b", ""])
def test_any_onnx_file_is_held_to_its_folder_wherever_it_hides_a_tensor(bundle, location):
    (bundle / "link").symlink_to("../secret")
    tensor = TensorProto(name="t", data_type=TensorProto.UINT8, dims=[1], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    inner = helper.make_graph([helper.make_node("Constant", [], ["y"], value=tensor)], "inner", [], [])
    change_graph(
        bundle,
        lambda model: model.graph.node.append(
            helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)
        ),
    )
    with pytest.raises(BundleError, match="the data of t is at"):
        load_source(bundle / "model.onnx")


def test_a_text_that_is_not_utf8_in_any_onnx_file_is_refused(bundle):
    """Protobuf hands such a text out as bytes."""
    path = bundle / "model.onnx"
    path.write_bytes(path.read_bytes().replace(b"model.onnx.data", b"model.onnx\xff\xffata", 1))
    with pytest.raises(BundleError, match="value is no text"):
        load_source(path)


@pytest.mark.parametrize("domain", ["", "own"])
def test_functions_that_lead_back_to_themselves_never_reach_the_parser(bundle, domain):
    """TensorRT's parser unfolded them until the process died."""
    path = bundle / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    imports = [*model.opset_import, *([helper.make_opsetid(domain, 1)] if domain else [])]
    for name, called in (("First", "Second"), ("Second", "First")):
        body = [helper.make_node(called, ["a"], ["b"], domain=domain)]
        model.functions.append(helper.make_function(domain, name, ["a"], ["b"], body, imports))
    path.write_bytes(model.SerializeToString())
    with pytest.raises(BundleError, match=r"its function '(First|Second)' calls itself"):
        load_source(path)
    model.functions[1].node[0].CopyFrom(helper.make_node("Relu", ["a"], ["b"]))
    path.write_bytes(model.SerializeToString())
    assert len(load_source(path).functions) == 2


@pytest.mark.parametrize("value", ["-1", "1e3", "", "9" * 5000, "١"])
def test_the_place_of_a_weight_in_any_onnx_file_is_a_whole_number(bundle, value):
    change_graph(bundle, lambda model: set_place(model, "offset", value))
    assert (
        engines.commands.main.main(["build", "--onnx", str(bundle / "model.onnx"), "-o", str(bundle.parent / "out")])
        == 2
    )


# --- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [{"architectures": 5}, {"architectures": {"a": 1}}, {"architectures": [["x"]]}, {"eos_token_id": "</s>"}, {"eos_token_id": [1.5]},
     {"num_hidden_layers": 10**9}, {"rope_scaling": [1]}, {"hidden_act": [[1]]}],
)  # fmt: skip
def test_a_config_of_other_types_is_refused(tmp_path, overrides):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(write_huggingface(tmp_path / "checkpoint", TINY, **overrides))
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("shard", [None, 3, ["a"], "..", "../x", {"a": 1}])
def test_an_index_that_names_no_file_is_refused(tmp_path, shard):
    folder = write_huggingface(tmp_path / "checkpoint", TINY, shards=2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = shard
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError):
        open_checkpoint(folder)


@pytest.fixture
def meta(originals, tmp_path, monkeypatch):
    monkeypatch.setitem(catalogue.CATALOGUE, META_NAME, META)
    return shutil.copytree(originals / "meta", tmp_path / "meta")


def meta_refusal(folder) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder, META_NAME)
    return str(caught.value)


@pytest.mark.parametrize(
    "strange",
    [lambda t: t.to_sparse(), lambda t: torch.empty(t.shape, device="meta"), lambda t: torch.zeros(1).expand(t.shape),
     lambda t: t.double()],
    ids=["sparse", "meta", "expanded", "double"],
)  # fmt: skip
def test_tensors_without_values_of_their_own_are_refused(meta, strange):
    path = meta / "consolidated.00.pth"
    shard = torch.load(path, weights_only=True)
    shard["norm.weight"] = strange(shard["norm.weight"])
    torch.save(shard, path)
    assert "norm.weight" in meta_refusal(meta) or "not a plain file of tensors" in meta_refusal(meta)


@pytest.mark.parametrize("shape", [(), (64, 2, 1)])
def test_a_tensor_of_another_number_of_axes_is_refused(meta, shape):
    path = meta / "consolidated.01.pth"
    shard = torch.load(path, weights_only=True)
    shard["output.weight"] = torch.zeros(shape)
    torch.save(shard, path)
    assert "output.weight" in meta_refusal(meta)


class Memory:
    """Pickles as a call that takes 64 GiB, which torch's own list of harmless calls allows."""

    def __reduce__(self):
        return bytearray, (2**36,)


def test_a_pickle_that_asks_for_memory_is_refused_before_it_is_read(meta):
    torch.save({"norm.weight": Memory()}, meta / "consolidated.00.pth")
    assert "it names" in meta_refusal(meta) and "bytearray" in meta_refusal(meta)


def test_compressed_records_are_refused(meta):
    path = meta / "consolidated.00.pth"
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    assert "its records are compressed" in meta_refusal(meta)


def test_a_pipe_is_not_waited_for(meta):
    (meta / "consolidated.00.pth").unlink()
    os.mkfifo(meta / "consolidated.00.pth")
    assert "not a plain file" in meta_refusal(meta)


def test_an_empty_shard_is_refused(meta):
    (meta / "consolidated.00.pth").write_bytes(b"")
    assert "consolidated.00.pth" in meta_refusal(meta)


@pytest.mark.parametrize(
    "params", [{"dim": "x"}, {"n_heads": 0}, {"ffn_dim_multiplier": 1e308}, {"multiple_of": -1}, {"n_heads": 10**400}]
)
def test_params_of_other_types_are_refused(meta, params):
    data = json.loads((meta / "params.json").read_text()) | params
    (meta / "params.json").write_text(json.dumps(data))
    assert "params.json" in meta_refusal(meta)


# --- words and paths ---------------------------------------------------------------------------------------------------


def test_control_characters_and_markup_in_names_do_not_reach_the_terminal(bundle, capsys):
    change_manifest(bundle, lambda data: data.update({"\x1b]0;owned\x07[/bold]:smile:": 1}))
    assert exporter.commands.main.main(["verify", str(bundle)]) == 2
    said = capsys.readouterr().err
    assert "\x1b" not in said and "\x07" not in said and "[/bold]:smile:" in said
    assert terminal.printable("a\x1b[31m\nb\x9b") == "a\\x1b[31m\nb\\x9b"


@pytest.mark.parametrize(
    "words",
    [("--max-batch", "2147483648"), ("--max-seq-len", "9" * 40), ("--workspace", "9" * 17), ("--cache-capacity", "9" * 40),
     ("--min-shapes", "x:" + "9" * 5000, "--opt-shapes", "x:1", "--max-shapes", "x:1")],
    ids=lambda words: words[0],
)  # fmt: skip
def test_sizes_that_no_engine_has_are_refused(bundle, words, capsys):
    assert engines.commands.main.main(["build", str(bundle), *words]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert words[0].strip("-").replace("-", "_").removeprefix("min_") in said and len(said) < 600


def test_an_empty_output_is_refused(tmp_path, monkeypatch):
    """Such as an unset variable, which would otherwise be the working folder."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="empty"), new_folder(""):
        pass


def test_a_path_that_is_no_text_is_refused(bundle, tmp_path):
    """Libraries in C++ take no such path, and fail each in a way of its own."""
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


# --- what is looked at before what ---------------------------------------------------------------------------------------


def test_data_are_hashed_only_where_their_graph_says_how_much_of_them_there_is(bundle, monkeypatch):
    """A file without content may be as long as anybody likes: its checksum would take days."""
    data = bundle / "model.onnx.data"
    monkeypatch.setattr(
        "exporter.bundle.bundle.sha256_of",
        lambda path: pytest.fail("it was hashed") if path.name == data.name else sha256_of(path),
    )
    os.truncate(data, 2**40)
    change_manifest(bundle, lambda manifest: manifest["files"][data.name].update(size_bytes=2**40))
    with pytest.raises(BundleError, match=r"its weights end at .*, expected 1,099,511,627,776"):
        Bundle.open(bundle, "full")
    assert any("its weights end at" in str(problem) for problem in verify_bundle(bundle).problems)


def test_a_manifest_that_names_files_elsewhere_owns_none_of_them(bundle):
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
