"""Runs a bundle's graph in onnxruntime on the CPU, where it is compared with other backends.

A graph is run in its own dtype, or as its float32 twin: the same nodes over the same stored weights, computed in
float32 (exporter/graph/float32_twin.py). Validation runs both. onnxruntime's CPU provider has no kernels for bf16, so
comparisons run a bf16 graph as its twin, and every other graph as it is. This module decides which of the two applies,
opens the graph, and owns the words for it in reports.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
    return twin_path(bundle, scratch) if runs_as_twin(bundle.manifest.dtype) else bundle.graph_path


def twin_path(bundle: Bundle, scratch: Path) -> Path:
    """Returns the path of a graph's float32 twin, which is written into `scratch` at the first call.

    A float32 graph is its own twin.
    """
    return bundle.graph_path if bundle.manifest.dtype == "fp32" else float32_twin(bundle.folder, scratch)


def open_on_cpu(bundle: Bundle, scratch: Path) -> Stepper:
    """Opens what comparisons run on the CPU: the graph in its own dtype where onnxruntime has kernels, else its twin.

    Args:
        bundle: a bundle in any dtype.
        scratch: folder for float32 twins. It must exist until the stepper is closed.
    """
    return open_twin(bundle, scratch) if runs_as_twin(bundle.manifest.dtype) else open_own(bundle)


def open_twin(bundle: Bundle, scratch: Path) -> Stepper:
    """Opens the float32 twin of a bundle in onnxruntime on the CPU; one stepper runs all parts.

    Args:
        bundle: a bundle in any dtype, its cache in place or growing.
        scratch: folder for the twins. It must exist until the stepper is closed.
    """
    return _open(bundle, "fp32", lambda part: twin_path(part, scratch))


def open_own(bundle: Bundle) -> Stepper:
    """Opens a bundle in its own dtype in onnxruntime on the CPU; one stepper runs all parts.

    Raises:
        BackendError: onnxruntime has no kernels for the dtype.
    """
    return _open(bundle, bundle.manifest.dtype, lambda part: part.graph_path)


def _open(bundle: Bundle, computed_in: str, path_of: Callable[[Bundle], Path]) -> Stepper:
    def open_part(part: Bundle) -> Stepper:
        manifest, path = part.manifest, str(path_of(part))
        if manifest.unit.cache == "growing":
            # the stepper of a growing graph has the interface of one whose cache is in place
            return GrowingStepper(path, manifest.spec.in_place().in_dtype(computed_in).contract)
        return OnnxruntimeStepper(path, manifest.contract.in_dtype(manifest.dtype, computed_in), computed_in)

    return open_parts(bundle, open_part, bundle.manifest.contract.in_dtype(bundle.manifest.dtype, computed_in))


@dataclass(frozen=True)
class FloatPiece:
    """One piece of a bundle's graph as a float32 graph.

    Attributes:
        model: the graph, without its weights.
        data_folder: the folder of the file with its weights.
        contract: its inputs and outputs.
    """

    model: onnx.ModelProto
    data_folder: Path
    contract: Contract

    @contextlib.contextmanager
    def open(self) -> Iterator[OnnxruntimeStepper]:
        """Opens the piece in onnxruntime on the CPU; it is closed at the end."""
        graph = self.model.SerializeToString()
        with contextlib.closing(
            OnnxruntimeStepper(graph, self.contract, "fp32", data_folder=self.data_folder)
        ) as stepper:
            yield stepper


@contextlib.contextmanager
def twin_piece(piece: onnx.ModelProto, folder: Path, contract: Contract, dtype: str) -> Iterator[FloatPiece]:
    """Yields the float32 twin of one piece of a bundle's graph; its files exist until the end.

    Args:
        piece: a graph whose weights are in the data file in `folder`. Widening changes it.
        folder: the bundle's folder.
        contract: contract of the piece in the graph's own dtype.
        dtype: the graph's dtype.
    """
    contract = contract.in_dtype(dtype, "fp32")
    if dtype == "fp32":
        yield FloatPiece(piece, folder, contract)
        return
    with scratch_folder() as scratch:
        widen_model(piece, folder, scratch)
        yield FloatPiece(piece, scratch, contract)


# --- words for reports ------------------------------------------------------------------------------------------------


def twin_run(dtype: str) -> str:
    """Returns the name of the graph that answers whether the graph means what the definition means."""
    return "the graph itself" if dtype == "fp32" else TWIN


def with_twin_named(description: str, dtype: str) -> str:
    """Returns a stepper's description, followed by the twin where one was run."""
    return f"{description}, through the graph's {TWIN}" if runs_as_twin(dtype) else description
