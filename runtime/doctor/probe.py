"""Tries each backend on a tiny block. The doctor runs this in a child process, which may crash.

`python -m runtime.doctor.probe FOLDER NAME …` prints one line for each name when its probe ends: MARK and a finding in
JSON.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from engines.library.backend import INSTALL, MODULES, choose_backend
from engines.library.gpu import driver_cuda, visible_gpus
from exporter.bundle.bundle import Bundle
from exporter.bundle.manifest import MANIFEST_FILE
from exporter.spec.catalogue import ModelConfig
from exporter.spec.unit import Unit
from runtime.doctor.findings import FACT, FAILED, GOOD, Finding
from runtime.doctor.installed import NOT_FOR_RTX, driver_problem
from runtime.session import DecodeSession

MARK = "probe: "
CONFIG = ModelConfig(
    hidden_size=64,
    n_layers=1,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    vocab_size=64,
    context_length=64,
)
CAPACITY, PROMPT, STEPS = 32, 5, 3


class Absent(Exception):
    """Raised by a probe whose subject is not here. That is a fact, not a failure."""


def decode(session: DecodeSession) -> np.ndarray:
    """Returns hidden states float64 [2, T, E] of a prefill and some decode steps. Closes the session."""
    rng = np.random.default_rng(0)
    with session:
        widths = [PROMPT, *[1] * STEPS]
        steps = [rng.standard_normal((2, width, CONFIG.hidden_size)).astype(np.float16) for width in widths]
        outputs = [session.prefill(x) for x in steps]
    return np.concatenate([output.astype(np.float64) for output in outputs], axis=1)


def check_output(bundle: Bundle, backend: str, session: DecodeSession) -> str:
    """Decodes and compares the result with the eager definition in float32 over the same weights.

    Raises:
        ArithmeticError: the two differ by more than the tolerances allow.
    """
    from engines.comparison.control import CONTROL_FACTOR
    from exporter.steppers.eager_stepper import EagerStepper
    from exporter.validation.reference_weights import reference_weights
    from exporter.validation.tolerances import tolerance

    manifest = bundle.manifest
    reference = EagerStepper.from_weights(manifest.spec.in_dtype("fp32"), reference_weights(bundle))
    expected, got = decode(DecodeSession(bundle, reference, 2, CAPACITY)), decode(session)
    error = float(np.abs(got - expected).max() / np.sqrt(np.mean(expected**2)))
    allowed = CONTROL_FACTOR * tolerance(("eager", backend), manifest.unit, manifest.dtype).allowed
    if not error <= allowed:
        raise ArithmeticError(
            f"its outputs differ from the eager definition by {error:.1e} of rms, {allowed:.0e} allowed"
        )
    return (
        f"{session.description}; {PROMPT} + {STEPS} tokens of 2 sequences, within {error:.0e} of rms of eager float32"
    )


# --- the probes ------------------------------------------------------------------------------------------------------


def import_package(name: str, folder: Path) -> str:
    """Imports a package that every export needs. For torch, also checks that its CUDA fits the driver."""
    module = importlib.import_module(name)
    if name != "torch":
        return module.__version__
    built_for = module.version.cuda
    problem = driver_problem(tuple(map(int, built_for.split("."))), driver_cuda()) if built_for else None
    if problem:
        raise RuntimeError(problem)
    return f"{module.__version__}, built for {f'CUDA {built_for}' if built_for else 'the CPU'}"


def export(folder: Path) -> str:
    """Exports a tiny block to `folder`, for the other probes."""
    from exporter.export import ExportRequest, export_bundle
    from exporter.model.weights import RandomWeights

    request = ExportRequest(CONFIG, Unit("block"), RandomWeights(CONFIG, 0), "fp16", CONFIG.context_length)
    export_bundle(request, folder, validated=False)
    return "a tiny fp16 block; its graph was checked against the contract"


def eager(folder: Path) -> str:
    """Decodes with eager PyTorch."""
    return check_output(
        Bundle.open(folder), "eager", DecodeSession.open(folder, "eager", max_batch=2, cache_capacity=CAPACITY)
    )


def onnxruntime_provider(provider: str, folder: Path) -> str:
    """Decodes with an execution provider of onnxruntime.

    Raises:
        Absent: this onnxruntime lacks the provider, or no GPU is visible.
    """
    import onnxruntime

    if provider not in onnxruntime.get_available_providers():
        raise Absent("not in this build of onnxruntime")
    if provider != "CPUExecutionProvider" and not visible_gpus():
        raise Absent("in this build of onnxruntime; no GPU is visible")
    session = DecodeSession.open(folder, "onnxruntime", provider, max_batch=2, cache_capacity=CAPACITY)
    return check_output(Bundle.open(folder), "onnxruntime", session)


def other_providers(folder: Path) -> str:
    """Names the providers of this onnxruntime that blockline does not use."""
    import onnxruntime

    from exporter.steppers.onnxruntime_stepper import DEVICES

    others = sorted(set(onnxruntime.get_available_providers()) - set(DEVICES))
    raise Absent(f"in this build, and not used by blockline: {', '.join(others)}" if others else "none")


def interpreter(folder: Path) -> str:
    """Decodes with the interpreter of TensorRT's network.

    Raises:
        Absent: no TensorRT is installed.
    """
    from engines.interpreter.stepper import InterpreterStepper

    if not any(importlib.util.find_spec(module) for module in MODULES.values()):
        raise Absent("it needs the parser of a TensorRT; none is installed")
    bundle = Bundle.open(folder)
    return check_output(
        bundle, "interpreter", DecodeSession(bundle, InterpreterStepper.from_bundle(bundle), 2, CAPACITY)
    )


def tensorrt_build(name: str, folder: Path) -> str:
    """Builds the block's engine.

    Raises:
        Absent: the backend is not installed, or it needs a GPU and none is visible.
    """
    from engines.building.build import BuildRequest, build_bundle

    _check_here(name)
    if name == "tensorrt" and not visible_gpus():
        raise Absent("it needs the GPU that it builds for, and none is visible")
    record = build_bundle(Bundle.open(folder), choose_backend(name), BuildRequest(2, PROMPT, CAPACITY))
    built = f"{record.size_bytes:,} bytes in {record.build_seconds:.1f} s"
    return f"{record.backend} {record.version}: {built}; {record.portability}"


def tensorrt_run(name: str, folder: Path) -> str:
    """Runs the block's engine on the GPU.

    Raises:
        Absent: the backend is not installed, or no GPU that it supports is visible.
    """
    from engines.library.cuda import RuntimeCuda
    from engines.running.tensorrt_stepper import open_tensorrt
    from exporter.bundle.engine_records import read_records

    _check_here(name)
    gpus = visible_gpus()
    if not gpus:
        raise Absent("no GPU is visible")
    if name == "tensorrt-rtx" and gpus[0].compute_capability in NOT_FOR_RTX:
        raise Absent(
            f"it is for RTX GPUs, this is {gpus[0].name} with compute capability {gpus[0].compute_capability}; "
            "use tensorrt"
        )
    bundle = Bundle.open(folder)
    (record,) = [record for record in read_records(folder) if record.backend == name]
    return check_output(
        bundle, "tensorrt", DecodeSession(bundle, open_tensorrt(bundle, record, RuntimeCuda()), 2, CAPACITY)
    )


def _check_here(name: str) -> None:
    if importlib.util.find_spec(MODULES[name]) is None:
        raise Absent(f"not installed; {INSTALL[name]}")


REINSTALL = "reinstall it: pip install --force-reinstall 'blockline'"
PROBES: dict[str, tuple[Callable[[Path], str], str]] = {
    **{
        f"import {name}": (partial(import_package, name), REINSTALL)
        for name in ("torch", "onnx", "onnxscript", "onnxruntime")
    },
    "export": (export, "see the lines above; `python -m exporter export … --debug` prints the traceback"),
    "decode: eager": (eager, REINSTALL),
    "decode: onnxruntime CPU": (partial(onnxruntime_provider, "CPUExecutionProvider"), REINSTALL),
    "decode: onnxruntime CUDA": (
        partial(onnxruntime_provider, "CUDAExecutionProvider"),
        "install the CUDA and cuDNN libraries that this onnxruntime-gpu is built for, or decode on "
        "CPUExecutionProvider",
    ),
    "onnxruntime: other providers": (other_providers, REINSTALL),
    "decode: interpreter": (interpreter, f"reinstall TensorRT: {INSTALL['tensorrt-rtx']}"),
    **{f"build: {name}": (partial(tensorrt_build, name), f"reinstall it: {INSTALL[name]}") for name in MODULES},
    **{
        f"decode: {name}": (
            partial(tensorrt_run, name),
            f"reinstall it: {INSTALL[name]}; `make gpu-check` prints more about this GPU",
        )
        for name in MODULES
    },
}
NEEDS_BUNDLE = tuple(name for name in PROBES if name.startswith(("decode", "build")))


def probe(name: str, folder: Path) -> Finding:
    """Runs one probe. Returns its result, or what it raised, as a finding."""
    run, fix = PROBES[name]
    if name in NEEDS_BUNDLE and not (folder / MANIFEST_FILE).is_file():
        return Finding(name, FACT, "not tried: the export failed")
    try:
        return Finding(name, GOOD, run(folder))
    except Absent as reason:
        return Finding(name, FACT, str(reason))
    except Exception as error:  # the other probes must run also where this one fails
        return Finding(name, FAILED, f"{type(error).__name__}: {_first_line(error)}", fix)


def _first_line(error: Any) -> str:
    return (str(error).strip().splitlines() or ["no reason given"])[0][:300]


def main(arguments: list[str]) -> None:
    """Runs the named probes and prints their findings."""
    folder, *names = arguments
    for name in names:
        print(MARK + json.dumps(asdict(probe(name, Path(folder)))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
