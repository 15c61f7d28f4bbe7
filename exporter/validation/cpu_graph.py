"""Runs a bundle's graph in onnxruntime on the CPU, where it is compared with other backends.

onnxruntime's CPU provider has no kernels for bf16. A bf16 graph is run as its float32 twin instead: the same nodes over
the same bf16 weights, computed in float32 (exporter/graph/float32_twin.py). Every other graph is run as it is. This
module decides which of the two applies, opens the graph, and owns the words for it in reports.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import onnx

from exporter.bundle.bundle import Bundle
from exporter.graph.float32_twin import float32_twin, widen_model
from exporter.placing.temporaries import scratch_folder
from exporter.spec.tensors import Contract
from exporter.steppers.growing_stepper import GrowingStepper
from exporter.steppers.onnxruntime_stepper import DTYPES_WITHOUT_CPU_KERNELS, OnnxruntimeStepper
from exporter.steppers.parts_stepper import open_parts
from exporter.steppers.protocol import Stepper

TWIN = "float32 twin"


def runs_as_twin(dtype: str) -> bool:
    """Whether a graph of this dtype is run on the CPU as its float32 twin."""
    return dtype in DTYPES_WITHOUT_CPU_KERNELS


def cpu_dtype(dtype: str) -> str:
    """Returns the dtype that a graph of this dtype is computed in on the CPU."""
    return "fp32" if runs_as_twin(dtype) else dtype


def cpu_contract(contract: Contract, dtype: str) -> Contract:
    """Returns the contract of what is run on the CPU, from the contract of a graph of this dtype."""
    return contract.in_dtype(dtype, cpu_dtype(dtype))


def cpu_graph_path(bundle: Bundle, scratch: Path) -> Path:
    """Returns the path of the graph that is run on the CPU; a twin is written into `scratch` at the first call."""
    return float32_twin(bundle.folder, scratch) if runs_as_twin(bundle.manifest.dtype) else bundle.graph_path


def open_on_cpu(bundle: Bundle, scratch: Path, growing: bool = False) -> Stepper:
    """Opens a bundle in onnxruntime on the CPU; one stepper runs all of its parts.

    Args:
        bundle: a bundle in any dtype.
        scratch: folder for float32 twins. It must exist until the stepper is closed.
        growing: whether the bundle's cache grows.
    """

    def open_part(part: Bundle) -> Stepper:
        manifest, path = part.manifest, str(cpu_graph_path(part, scratch))
        if growing:
            return GrowingStepper(path, manifest.spec.in_place().in_dtype(cpu_dtype(manifest.dtype)).contract)
        contract = cpu_contract(manifest.contract, manifest.dtype)
        return OnnxruntimeStepper(path, contract, cpu_dtype(manifest.dtype))

    return open_parts(bundle, open_part, cpu_contract(bundle.manifest.contract, bundle.manifest.dtype))


@contextlib.contextmanager
def open_piece(piece: onnx.ModelProto, folder: Path, contract: Contract, dtype: str) -> Iterator[OnnxruntimeStepper]:
    """Opens one piece of a bundle's graph in onnxruntime on the CPU; it is closed at the end.

    Args:
        piece: a graph whose weights are in the data file in `folder`. Widening to float32 changes it.
        folder: the bundle's folder.
        contract: contract of the piece in the graph's own dtype.
        dtype: the graph's dtype.
    """
    contract, computed_in = cpu_contract(contract, dtype), cpu_dtype(dtype)
    with scratch_folder() as scratch:
        if runs_as_twin(dtype):
            stepper = OnnxruntimeStepper(str(widen_model(piece, folder, scratch)), contract, computed_in)
        else:
            stepper = OnnxruntimeStepper(piece.SerializeToString(), contract, computed_in, data_folder=folder)
        with contextlib.closing(stepper):
            yield stepper


# --- words for reports ------------------------------------------------------------------------------------------------


def graph_run(dtype: str) -> str:
    """Returns the name of the graph that is run, for reports: the graph itself or its twin."""
    return TWIN if runs_as_twin(dtype) else "the graph itself"


def blocks_run(dtype: str) -> str:
    """Returns the name of the graphs that a validation by layer runs, for reports."""
    return f"{f'{TWIN}s of its blocks' if runs_as_twin(dtype) else 'its blocks'}, one at a time"


def with_twin_named(description: str, dtype: str) -> str:
    """Returns a stepper's description, followed by the twin where one was run."""
    return f"{description}, through the graph's {TWIN}" if runs_as_twin(dtype) else description
