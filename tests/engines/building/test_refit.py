"""Refitting over a double of TensorRT's refitter: which weights an engine takes, and how often."""

from __future__ import annotations

import dataclasses
import json
import shutil
import types

import pytest

from engines.building.publishing import publish
from engines.building.refit import refit_bundle
from engines.library.backend import Backend
from engines.library.gpu import Gpu
from exporter.bundle.bundle import Bundle, sha256_of
from exporter.bundle.engine_records import read_records
from exporter.common.errors import BundleError, CheckFailed
from exporter.placing.temporaries import temporary_file
from tests.support.doubles.cuda_double import ILogger, engine_record


class RefitDouble:
    """The parts of the `tensorrt` module that a refit uses. An engine's content is its properties in JSON."""

    ILogger = ILogger

    def __init__(self, has_include_refit: bool = True) -> None:
        flags = {"EXCLUDE_WEIGHTS": "weights", "EXCLUDE_LEAN_RUNTIME": "lean"}
        self.SerializationFlag = types.SimpleNamespace(
            **flags | ({"INCLUDE_REFIT": "refit"} if has_include_refit else {})
        )

    class Runtime:
        def __init__(self, logger):
            pass

        def deserialize_cuda_engine(self, data):
            return EngineToRefit(json.loads(bytes(data)))

    class Refitter:
        def __init__(self, engine, logger):
            self.engine, self._logger = engine, logger
            if not engine.properties["refittable"]:
                logger.log(ILogger.ERROR, "the engine is not refittable")

        def refit_cuda_engine(self):
            self.engine.properties["weights"] = True
            return self.engine.properties["refittable"]

    class OnnxParserRefitter:
        def __init__(self, refitter, logger):
            self._refitter = refitter

        def refit_from_file(self, path):
            return self._refitter.engine.properties["refittable"]


class EngineToRefit:
    def __init__(self, properties: dict) -> None:
        self.properties = properties

    def create_serialization_config(self):
        flags = {"weights"}  # what is excluded by default for a stripped engine
        return types.SimpleNamespace(flags=flags, set_flag=flags.add, clear_flag=flags.discard)

    def serialize_with_config(self, config):
        properties = {"weights": "weights" not in config.flags, "refittable": "refit" in config.flags}
        return json.dumps(properties).encode()


@pytest.fixture
def built(tiny_bundle, tmp_path, monkeypatch):
    """Makes a bundle with an engine that was built with the given options."""
    gpus = [Gpu("a double", "9.0")]
    monkeypatch.setattr("engines.building.refit.visible_gpus", lambda: gpus)

    def make(**options):
        folder = shutil.copytree(tiny_bundle("block", "fp32").folder, tmp_path / "bundle")
        bundle = Bundle.open(folder)
        with temporary_file(folder, "model.engine") as temporary:
            temporary.write_text(json.dumps({"weights": False, "refittable": True}))
            record = engine_record(bundle, 32)
            options = record.options | options
            size, checksum = temporary.stat().st_size, sha256_of(temporary)
            record = dataclasses.replace(record, options=options, size_bytes=size, sha256=checksum)
            publish(folder, temporary, record, bundle)
        return bundle, record

    return make


def refitted(bundle, record, double=None):
    return refit_bundle(bundle, Backend("tensorrt", double or RefitDouble(), record.version, "a double"), record)


def with_other_weights(record):
    """The record of an engine that was built from the same graph with other weights."""
    return dataclasses.replace(
        record, lineage={name: "0" * 64 if "data" in name else sha for name, sha in record.lineage.items()}
    )


def test_a_stripped_engine_takes_the_weights_that_it_was_built_with(built):
    bundle, record = built(strip_plan=True)
    done = refitted(bundle, record)
    assert not done.options["strip_plan"] and read_records(bundle.folder) == [done]
    assert json.loads((bundle.folder / "model.engine").read_text())["weights"]


def test_a_stripped_engine_refuses_other_weights_unless_it_was_built_with_refit(built):
    bundle, record = built(strip_plan=True)
    content = (bundle.folder / "model.engine").read_bytes()
    with pytest.raises(BundleError, match="strip_plan=True alone, which takes back only the weights it was built with"):
        refitted(bundle, with_other_weights(record))
    assert (bundle.folder / "model.engine").read_bytes() == content
    both = dataclasses.replace(record, options=record.options | {"refit": True})
    assert refitted(bundle, with_other_weights(both)).lineage == bundle.lineage


def test_an_engine_is_refitted_as_often_as_one_likes(built):
    bundle, record = built(refit=True)
    for _ in range(3):
        record = refitted(bundle, record)


def test_without_the_flag_a_second_refit_fails_with_tensorrts_reason(built):
    bundle, record = built(refit=True)
    record = refitted(bundle, record, RefitDouble(has_include_refit=False))
    with pytest.raises(CheckFailed, match="could not refit it: the engine is not refittable"):
        refitted(bundle, record, RefitDouble(has_include_refit=False))
