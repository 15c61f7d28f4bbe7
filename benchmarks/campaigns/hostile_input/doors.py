"""Doors: the library calls and commands that open a hostile input."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from unittest import mock

import numpy as np

import engines.commands.main
import exporter.commands.main
import runtime.commands.main
from benchmarks.campaigns.hostile_input.originals import META_NAME
from exporter.bundle.bundle import Bundle
from exporter.checkpoint.formats import open_checkpoint
from exporter.placing.folders import new_folder
from exporter.spec.dtypes import numpy_dtype
from runtime import DecodeSession
from tests.support.doubles.cuda_double import ENGINE, CudaDouble, engine_record, tensorrt_double

MAINS = {
    "exporter": exporter.commands.main.main,
    "engines": engines.commands.main.main,
    "runtime": runtime.commands.main.main,
}
Door = tuple[str, Callable[[Path], int | None]]  # label, and function of the case's folder
INPUT, OUTPUT, OUTSIDE = "input", "out", "outside"  # folders of a case


def command(stage: str, *arguments: str, label: str | None = None) -> Door:
    """Returns the door of a command line; "{}" in an argument is replaced by the case's folder."""

    def run(root: Path) -> int:
        return MAINS[stage]([argument.replace("{}", str(root)) for argument in arguments])

    return label or f"{stage} {arguments[0]}", run


def _open(verify: str) -> Door:
    return f"Bundle.open {verify}", lambda root: Bundle.open(root / INPUT, verify) and None


def _step(session: DecodeSession) -> None:
    manifest = session.manifest
    if manifest.unit.kind == "model":
        session.prefill(np.array([[1, 2, 3]]))
        session.decode(np.array([4]))
    else:
        x = np.ones((1, 3, manifest.config.hidden_size), numpy_dtype(manifest.dtype))
        session.prefill(x)
        session.decode(x[:, :1])


def _session(backend: str) -> Door:
    def run(root: Path) -> None:
        with DecodeSession.open(root / INPUT, backend, max_batch=1) as session:
            _step(session)

    return f"DecodeSession {backend}", run


def _session_over_doubles(root: Path) -> None:
    """Opens a TensorRT session without a GPU, with the tests' doubles; they accept an engine that equals `ENGINE`."""
    folder = root / INPUT
    bundle, cuda = Bundle.open(folder), CudaDouble()
    record = engine_record(bundle, 32)
    trt = tensorrt_double(bundle, record, cuda)
    backend = mock.Mock(trt=trt, version="1.7.1.116")
    backend.name = "tensorrt-rtx"
    with contextlib.ExitStack() as stack:
        choice, stepper = "engines.running.choose_engine.", "engines.running.tensorrt_stepper."
        stack.enter_context(mock.patch(choice + "visible_gpus", lambda: [mock.Mock(compute_capability="9.0")]))
        stack.enter_context(mock.patch(choice + "choose_backend", lambda name: backend))
        stack.enter_context(mock.patch(stepper + "choose_backend", lambda name: backend))
        stack.enter_context(mock.patch("engines.library.cuda.RuntimeCuda", lambda: cuda))
        assert ENGINE == b"engine"
        with DecodeSession.open(folder, "tensorrt", max_batch=1) as session:
            _step(session)


def _replace(root: Path) -> None:
    """Replaces the hostile folder by a new one, as an export does."""
    with new_folder(root / INPUT) as folder:
        (folder / "manifest.json").write_text("{}")


def _checkpoint(model: str | None) -> Door:
    def run(root: Path) -> None:
        checkpoint = open_checkpoint(root / INPUT, model)
        for name in ("embedding.weight", "blocks.0.attention.q_proj.weight", "norm.weight"):
            checkpoint.weights.read(name)

    return "open_checkpoint", run


OPEN, OPEN_FULL, SESSION, REPLACE = _open("graph"), _open("full"), _session("onnxruntime"), ("new_folder", _replace)
VERIFY, VALIDATE = command("exporter", "verify", "{}/input"), command("exporter", "validate", "{}/input")
BY_LAYER = command("exporter", "validate", "{}/input", "--by-layer", "--format", "json")
DECODE = command("runtime", "decode", "{}/input", "--steps", "2", "--prompt-len", "3", "--cache-capacity", "32")
EAGER = command("runtime", "decode", "{}/input", "--steps", "1", "--backend", "eager", "--format", "json")
GENERATE = command("runtime", "generate", "{}/input", "--prompt", "hello", "--max-new-tokens", "2")
REPORT = command("runtime", "report", "{}/input", "--prompt", "hello", "--max-new-tokens", "2")
INSPECT = command("engines", "inspect", "{}/input", "--format", "json")
INSPECT_TABLE = command("engines", "inspect", "{}/input")
BUILD = command("engines", "build", "{}/input", "--max-batch", "1", "--max-seq-len", "4", "--cache-capacity", "32")
SIZES = ("--cache-capacity", "32", "--max-seq-len", "4")
BUILD_ONNX = command("engines", "build", "--onnx", "{}/input/model.onnx", "-o", "{}/out/engine", *SIZES)
COMPARE = command("engines", "compare", "{}/input", "--cache-capacity", "8")
OVER_DOUBLES = ("DecodeSession tensorrt (doubles)", _session_over_doubles)
EXPORT_INPUT = ("export", "--checkpoint", "{}/input", "-o", "{}/out/bundle", "--no-validate")
EXPORT = command("exporter", *EXPORT_INPUT, "--unit", "component:repeat_kv")
EXPORT_MODEL = command("exporter", *EXPORT_INPUT, "--unit", "model", "--max-positions", "16")
EXPORT_META = command("exporter", *EXPORT_INPUT, "--model", META_NAME, "--unit", "component:rms_norm")

# Door → weight in the draw; doors that take seconds have small weights.
BUNDLE_DOORS = {
    OPEN: 6,
    OPEN_FULL: 6,
    VERIFY: 4,
    SESSION: 6,
    DECODE: 2,
    GENERATE: 1,
    VALIDATE: 0.5,
    INSPECT: 0.5,
    REPLACE: 3,
}
GRAPH_DOORS = {
    VERIFY: 8,
    SESSION: 10,
    DECODE: 3,
    EAGER: 1,
    GENERATE: 1,
    VALIDATE: 1,
    BY_LAYER: 0.5,
    INSPECT: 3,
    INSPECT_TABLE: 1,
    BUILD: 0.1,
    BUILD_ONNX: 2,
    COMPARE: 0.2,
}
TEXT_DOORS = {OPEN_FULL: 1, GENERATE: 6, REPORT: 4, VERIFY: 1, VALIDATE: 0.3}
# `build --onnx` names a file, which may be a link.
FILE_DOORS = {door: weight for door, weight in GRAPH_DOORS.items() if door != BUILD_ONNX}
ENGINE_DOORS = {
    VERIFY: 4,
    INSPECT: 1,
    INSPECT_TABLE: 1,
    OVER_DOUBLES: 6,
    DECODE: 2,
    REPLACE: 2,
    COMPARE: 0.1,
    BUILD: 0.1,
}
HUGGINGFACE_DOORS = {_checkpoint(None): 20, EXPORT: 1, EXPORT_MODEL: 0.1}
META_DOORS = {_checkpoint(META_NAME): 20, EXPORT_META: 0.5}


def draw(doors: Mapping[Door, float], rng: Random, count: int) -> list[Door]:
    """Draws `count` different doors; a larger weight makes a door more likely."""
    ranked = sorted(doors, key=lambda door: rng.random() ** (1 / doors[door]), reverse=True)
    return ranked[:count]
