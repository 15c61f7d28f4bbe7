"""The eager stepper: the eager definition itself, in PyTorch on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import ml_dtypes
import numpy as np
import torch
from torch import Tensor, nn

from exporter.bundle.bundle import Bundle
from exporter.graph.weight_reader import bundle_weights
from exporter.model.components import OBSERVED
from exporter.model.observe import See, unseen
from exporter.model.weights import WeightSource, load_eager
from exporter.spec.dtypes import numpy_dtype
from exporter.spec.graph_spec import GraphSpec
from exporter.spec.tensors import TensorSpec
from exporter.steppers.protocol import HostCache, Stepper


def to_torch(array: np.ndarray) -> Tensor:
    """Returns a tensor over the array's memory; bfloat16 of ml_dtypes becomes torch.bfloat16."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: Tensor) -> np.ndarray:
    """The inverse of `to_torch`."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.contiguous().numpy()


def feed_tensor(feeds: Mapping[str, np.ndarray], spec: TensorSpec) -> Tensor:
    """Returns an input of the step in the dtype of its spec, over the memory of the feed where it has that dtype."""
    return to_torch(np.ascontiguousarray(feeds[spec.name].astype(numpy_dtype(spec.dtype), copy=False)))


class EagerStepper(Stepper[HostCache]):
    """Runs a unit's eager module in one dtype; the cache is host memory that torch writes into directly.

    Feeds of another floating-point dtype are converted. A float32 stepper over weights rounded to half is the
    reference for half-precision graphs: eager half arithmetic differs more from it than they do
    (exporter/validation/tolerances.py).
    """

    backend = "eager"

    def __init__(self, spec: GraphSpec, module: nn.Module) -> None:
        self.contract = spec.contract
        self.description = f"eager PyTorch {torch.__version__} in {spec.dtype} on the CPU"
        self.module = module

    @classmethod
    def from_weights(cls, spec: GraphSpec, weights: WeightSource) -> Self:
        """Fills the eager module from any source of weights, such as the checkpoint a bundle is made from."""
        return cls(spec, load_eager(spec, weights))

    @classmethod
    def from_bundle(cls, bundle: Bundle) -> Self:
        """Fills the eager module from the weights that the bundle's graph uses, mapped from its data file."""
        return cls.from_weights(bundle.manifest.spec, bundle_weights(bundle))

    def new_cache(self, n_rows: int, capacity: int) -> HostCache:
        return HostCache(self.contract, n_rows, capacity)

    def run(
        self, feeds: Mapping[str, np.ndarray], cache: HostCache | None = None, first_row: int = 0, see: See = unseen
    ) -> dict[str, np.ndarray]:
        """As `Stepper.run`. `see` is called with every named value inside, and returns the value to use."""
        inputs = [feed_tensor(feeds, spec) for spec in self.contract.step_inputs]
        rows = slice(first_row, first_row + len(inputs[0]))
        past = [to_torch(array[rows]) for array in cache.arrays] if cache is not None else []
        with torch.inference_mode():
            observed = {"see": see} if isinstance(self.module, OBSERVED) else {}
            results = self.module(*inputs, *past, **observed)
        results = results if isinstance(results, tuple) else (results,)
        return {spec.name: to_numpy(result) for spec, result in zip(self.contract.step_outputs, results, strict=True)}
