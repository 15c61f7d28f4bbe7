"""The specification of the bundle: schemas, code and document agree on real and altered bundles of every kind."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from engines.network.build_options import HARDWARE_COMPATIBILITY, PROFILING_VERBOSITY, BuildOptions
from engines.network.profiles import Profile, Range
from exporter.bundle import engine_records
from exporter.bundle import manifest as manifest_module
from exporter.bundle.bundle import ENGINES_FILE, Bundle
from exporter.bundle.engine_records import EngineRecord, read_records, records_json
from exporter.bundle.manifest import DATA_FILE, GRAPH_FILE, MANIFEST_FILE, OTHER_FILES, Manifest, graph_files
from exporter.common.errors import BundleError
from exporter.spec.dtypes import DTYPES, ONNX_TYPES
from exporter.spec.tensors import BATCH, CAPACITY, OPSET, PAST, SEQUENCE, TOTAL
from exporter.spec.unit import CACHES, COMPONENTS, LOGITS, UNIT_KINDS, Unit
from exporter.spec.weight_formats import WEIGHT_FORMATS
from exporter.validation.bundle_validation import validate_bundle
from tests.conftest import ROOT

DOCUMENT = (ROOT / "docs" / "bundle_format.md").read_text()
MANIFEST, ENGINES = (
    json.loads((ROOT / "docs" / "schema" / f"{name}.schema.json").read_text()) for name in ("manifest", "engines")
)
UNITS = {
    "component": {"unit": "component:rms_norm"},
    "block": {"unit": "block"},
    "stack": {"unit": "stack", "dtype": "fp16", "layers": "2"},
    "model": {"unit": "model"},
    "parts": {"unit": "stack", "dtype": "fp16", "layers": "2", "n_parts": 2},
    "growing": {"unit": "model", "cache": "growing"},
}
UNIT = Unit("block")
RECORD = EngineRecord(
    file="a.engine",
    size_bytes=1,
    sha256="0" * 64,
    graph_file="model.c64.onnx",
    backend="tensorrt",
    version="10.15.0",
    compute_capability="9.0",
    portability="this GPU",
    profiles=[Profile("decode", {"x": Range((1, 1), (2, 1), (4, 1))}).to_dict()],
    cache_capacity=64,
    dtypes={"x": "fp16"},
    lineage={GRAPH_FILE: "1" * 64, DATA_FILE: "2" * 64},
    options=BuildOptions().to_dict(),
    build_seconds=1.5,
    peak_memory_bytes=7,
)


def errors(schema: dict, data: object) -> list[str]:
    return [error.message for error in Draft202012Validator(schema).iter_errors(data)]


# --- schema and code agree on keys and names --------------------------------------------------------------------------


def keys(schema: dict) -> tuple[set[str], set[str]]:
    """Returns all keys of an object, and the keys that it must have. The schema refuses other keys."""
    assert schema["additionalProperties"] is False
    return set(schema["properties"]), set(schema["required"])


@pytest.mark.parametrize("schema", [MANIFEST, ENGINES], ids=["manifest", "engines"])
def test_a_schema_is_one_of_draft_2020_12(schema):
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    Draft202012Validator.check_schema(schema)


def test_schema_and_code_have_the_same_keys_of_a_manifest():
    every, definitions = set(manifest_module.MANIFEST_KEYS), MANIFEST["$defs"]
    assert keys(MANIFEST) == (every, every - set(manifest_module.ADDED_KEYS))
    unit = set(manifest_module.UNIT_KEYS)
    assert keys(definitions["unit"]) == (unit, unit - set(manifest_module.ADDED_UNIT_KEYS))
    code = {
        "config": manifest_module.CONFIG_KEYS,
        "rope_scaling": manifest_module.ROPE_SCALING_KEYS,
        "tensor": manifest_module.TENSOR_KEYS,
    }
    code["weight_format"] = manifest_module.WEIGHT_FORMAT_KEYS
    for name, names in code.items():
        assert keys(definitions[name]) == (set(names), set(names)), name
    weights = {schema["properties"]["source"]["const"]: keys(schema)[1] for schema in definitions["weights"]["oneOf"]}
    assert weights == {source: set(names) for source, names in manifest_module.WEIGHTS_KEYS.items()}
    assert keys(definitions["files"]["additionalProperties"])[1] == set(manifest_module.FILE_KEYS)
    assert MANIFEST["properties"]["parts"]["default"] == manifest_module.ADDED_KEYS["parts"]
    assert definitions["unit"]["properties"]["cache"]["default"] == manifest_module.ADDED_UNIT_KEYS["cache"]


def test_schema_and_code_have_the_same_names_in_a_manifest():
    definitions = MANIFEST["$defs"]
    unit, tensor = definitions["unit"]["properties"], definitions["tensor"]["properties"]
    assert MANIFEST["properties"]["format_version"]["const"] == manifest_module.FORMAT_VERSION
    assert MANIFEST["properties"]["opset"]["const"] == OPSET
    names = {"kind": UNIT_KINDS, "component": (*COMPONENTS, None), "logits": LOGITS, "cache": CACHES}
    assert {key: tuple(unit[key]["enum"]) for key in names} == names
    assert definitions["dtype"]["enum"] == list(DTYPES)
    assert set(tensor["dtype"]["enum"]) == set(ONNX_TYPES) - set(WEIGHT_FORMATS)
    assert definitions["weight_format"]["properties"]["dtype"]["enum"] == list(WEIGHT_FORMATS)
    assert set(tensor["axes"]["items"]["anyOf"][1]["enum"]) == {BATCH, SEQUENCE, TOTAL, PAST, CAPACITY}
    allowed = re.compile(definitions["files"]["propertyNames"]["pattern"])
    assert all(allowed.search(name) for name in (*graph_files(0), *graph_files(12), *OTHER_FILES))
    foreign = ("config.json", "part01/model.onnx", "../model.onnx", "model.onnx\n.data")
    assert not any(allowed.search(name) for name in foreign)


def test_schema_and_code_have_the_same_keys_of_engine_records():
    definitions = ENGINES["$defs"]
    assert keys(ENGINES)[1] == set(engine_records.ENGINES_KEYS)
    assert ENGINES["properties"]["format_version"]["const"] == engine_records.FORMAT_VERSION
    assert keys(definitions["engine"]) == (set(engine_records.RECORD_KEYS), set(engine_records.RECORD_KEYS))
    assert keys(definitions["profile"])[1] == set(engine_records.PROFILE_KEYS)
    ranges = definitions["profile"]["properties"]["ranges"]["additionalProperties"]
    assert keys(ranges)[1] == set(engine_records.RANGE_KEYS)
    assert keys(definitions["options"])[1] == set(engine_records.OPTION_KEYS) == set(BuildOptions().to_dict())
    options = definitions["options"]["properties"]
    assert options["hardware_compatibility"]["enum"] == list(HARDWARE_COMPATIBILITY)
    assert options["profiling_verbosity"]["enum"] == list(PROFILING_VERBOSITY)


def test_the_document_explains_every_key_of_every_file():
    sections = dict(zip(*[iter(re.split(r"^## (.*)\n", DOCUMENT, flags=re.MULTILINE)[1:])] * 2, strict=True))
    assert {name for name in _all_keys(MANIFEST) if f"`{name}`" not in sections["manifest.json"]} == set()
    assert {name for name in _all_keys(ENGINES) if f"`{name}`" not in sections["engines.json"]} == set()


def _all_keys(schema: object) -> set[str]:
    if isinstance(schema, list):
        return set().union(*map(_all_keys, schema))
    if not isinstance(schema, dict):
        return set()
    return set(schema.get("properties", {})) | set().union(*map(_all_keys, schema.values()))


def test_the_document_explains_every_key_of_a_report(tiny_bundle):
    report = tiny_bundle("block").read_report()
    report["validation"], _ = validate_bundle(tiny_bundle("model"))
    meaning, cost = report["validation"]["meaning"], report["validation"]["cost"]
    nested = {key for part in ("export", "validation") for key in report[part]} | set(meaning) | set(cost)
    nested |= set(meaning["comparisons"][0]) | set(meaning["tolerance"])
    nested |= set(cost["agreement"]) | set(cost["limits"]) | set(cost["largest_value"])
    section = DOCUMENT.partition("## report.json")[2].partition("\n## ")[0]
    assert {key for key in {*report, *nested} if f"`{key}`" not in section} == set()


# --- real files, and altered ones -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", UNITS)
def test_a_real_manifest_keeps_the_schema_and_reads_back_as_it_is(tiny_bundle, kind):
    text = (tiny_bundle(**UNITS[kind]).folder / MANIFEST_FILE).read_text()
    assert errors(MANIFEST, json.loads(text)) == []
    assert Manifest.from_json(text, kind).to_json() == text


MANIFEST_CHANGES: dict[str, Callable[[dict], object]] = {
    "unknown key": lambda m: m.update(flavour="sweet"),
    "unknown unit key": lambda m: m["unit"].update(colour="red"),
    "unknown config key": lambda m: m["config"].update(n_experts=8),
    "unknown tensor key": lambda m: m["inputs"][0].update(layout="NHWC"),
    "unknown file key": lambda m: m["files"][GRAPH_FILE].update(md5="0"),
    "unknown weights key": lambda m: m["weights"].update(url="x"),
    "seed missing": lambda m: m["weights"].pop("seed"),
    "seed negative": lambda m: m["weights"].update(seed=-1),
    "seed of a checkpoint": lambda m: m["weights"].update(source="checkpoint"),
    "no weights": lambda m: m.update(weights="random"),
    "newer format": lambda m: m.update(format_version=2),
    "format is true": lambda m: m.update(format_version=True),
    "producer": lambda m: m.update(producer=7),
    "dtype": lambda m: m.update(dtype="fp8"),
    "attention dtype": lambda m: m.update(attention_dtype="fp8"),
    "opset": lambda m: m.update(opset=23),
    "positions are true": lambda m: m.update(max_positions=True),
    "no positions": lambda m: m.update(max_positions=0),
    "end token is true": lambda m: m.update(end_token_ids=[True]),
    "end token negative": lambda m: m.update(end_token_ids=[-1]),
    "odd head": lambda m: m["config"].update(head_dim=15),
    "text for a count": lambda m: m["config"].update(n_layers="3"),
    "scaling without a factor": lambda m: m["config"].update(rope_scaling={"low_freq_factor": 1.0}),
    "config key missing": lambda m: m["config"].pop("norm_eps"),
    "unit key missing": lambda m: m["unit"].pop("first_layer"),
    "component of a block": lambda m: m["unit"].update(component="attention"),
    "growing block": lambda m: m["unit"].update(cache="growing"),
    "unknown axis": lambda m: m["inputs"][0]["axes"].__setitem__(0, "b"),
    "pair of three": lambda m: m["cache_pairs"][0].append("x"),
    "pair of other names": lambda m: m["cache_pairs"].__setitem__(0, ["a", "b"]),
    "parts without files": lambda m: m.update(parts=[[0, 1]]),
    "part of one number": lambda m: m.update(parts=[[0]]),
    "no graph": lambda m: m["files"].pop(GRAPH_FILE),
    "foreign file": lambda m: m["files"].update({"notes.txt": m["files"][GRAPH_FILE]}),
    "file elsewhere": lambda m: m["files"].update({"../model.onnx": m["files"][GRAPH_FILE]}),
    "size as text": lambda m: m["files"][GRAPH_FILE].update(size_bytes="7"),
    "size negative": lambda m: m["files"][GRAPH_FILE].update(size_bytes=-1),
    "short checksum": lambda m: m["files"][GRAPH_FILE].update(sha256="abc"),
    "capital checksum": lambda m: m["files"][GRAPH_FILE].update(sha256="A" * 64),
    **{
        f"{key} missing": lambda m, key=key: m.pop(key)
        for key in manifest_module.MANIFEST_KEYS
        if key not in manifest_module.ADDED_KEYS
    },
}


@pytest.mark.parametrize("change", MANIFEST_CHANGES)
def test_an_altered_manifest_is_refused_by_schema_and_code_alike(tiny_bundle, change):
    data = json.loads((tiny_bundle("block").folder / MANIFEST_FILE).read_text())
    MANIFEST_CHANGES[change](data)
    assert errors(MANIFEST, data) != []
    with pytest.raises(BundleError):
        Manifest.from_json(json.dumps(data), "manifest.json")


def test_real_records_keep_the_schema_and_read_back_as_they_are(tmp_path):
    """test_verify.py checks the records of a real build; the same code reads its bundles."""
    text = records_json([RECORD])
    assert errors(ENGINES, json.loads(text)) == []
    (tmp_path / ENGINES_FILE).write_text(text)
    assert records_json(read_records(tmp_path)) == text


RECORD_CHANGES: dict[str, Callable[[dict], object]] = {
    "unknown key": lambda e: e.update(colour=1),
    "file elsewhere": lambda e: e.update(file="../a.engine"),
    "graph elsewhere": lambda e: e.update(graph_file="/model.onnx"),
    "size as text": lambda e: e.update(size_bytes="1"),
    "short checksum": lambda e: e.update(sha256="1"),
    "short lineage": lambda e: e["lineage"].update({GRAPH_FILE: "1"}),
    "capability as number": lambda e: e.update(compute_capability=9.0),
    "capacity as text": lambda e: e.update(cache_capacity="64"),
    "dtype as number": lambda e: e["dtypes"].update(x=10),
    "unknown option": lambda e: e["options"].update(int8=True),
    "option missing": lambda e: e["options"].pop("tf32"),
    "profile without a name": lambda e: e["profiles"][0].pop("name"),
    "unknown profile key": lambda e: e["profiles"][0].update(kind=1),
    "range without max": lambda e: e["profiles"][0]["ranges"]["x"].pop("max"),
    "size of a range as text": lambda e: e["profiles"][0]["ranges"]["x"].update(min=["1"]),
    **{f"{key} missing": lambda e, key=key: e.pop(key) for key in engine_records.RECORD_KEYS},
}


@pytest.mark.parametrize("change", RECORD_CHANGES)
def test_an_altered_record_is_refused_by_schema_and_code_alike(tmp_path, change):
    data = copy.deepcopy(json.loads(records_json([RECORD])))
    RECORD_CHANGES[change](data["engines"][0])
    assert errors(ENGINES, data) != []
    (tmp_path / ENGINES_FILE).write_text(json.dumps(data))
    with pytest.raises(BundleError):
        read_records(tmp_path)


# --- versions ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def block(tiny_bundle, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_bundle("block").folder, tmp_path / "block"))


def test_a_newer_format_is_refused_with_both_versions_and_what_to_do(block):
    for name, remedy in ((MANIFEST_FILE, "export the bundle again"), (ENGINES_FILE, "remove it and build again")):
        data = (
            json.loads((block / name).read_text()) if (block / name).exists() else {"format_version": 1, "engines": []}
        )
        (block / name).write_text(json.dumps(data | {"format_version": 2, "producer": "blockline 7.0.0"}))
        with pytest.raises(BundleError) as caught:
            (Bundle.open if name == MANIFEST_FILE else read_records)(block)
        said = str(caught.value)
        assert "got format_version 2, expected 1, the newest that blockline 0.1.0 reads" in said
        assert f"written by blockline 7.0.0: install that, or {remedy} with this one" in said


def test_a_manifest_from_before_parts_and_growing_caches_keeps_the_schema_and_means_the_same(block):
    """Format 1 gained those keys later. Bundles without them keep their meaning."""
    data = json.loads((block / MANIFEST_FILE).read_text())
    before = Bundle.open(block).manifest
    del data["parts"], data["unit"]["cache"]
    assert errors(MANIFEST, data) == []
    (block / MANIFEST_FILE).write_text(json.dumps(data))
    manifest = Bundle.open(block, "full").manifest
    assert manifest == before and manifest.parts == () and manifest.unit.cache == "in_place"
