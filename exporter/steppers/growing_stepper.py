"""The stepper of a graph whose cache grows, in onnxruntime. Validation uses it in place of optimum or genai."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnxruntime

from exporter.spec.dtypes import numpy_dtype
from exporter.spec.tensors import Contract
from exporter.steppers.onnxruntime_stepper import open_session, refusals
from exporter.steppers.protocol import HostCache, Stepper


class GrowingStepper(Stepper[HostCache]):
    """Runs a graph whose cache grows, with the interface of steppers that update a cache in place.

    It copies the past out of the cache before a step and the present back into it afterwards. Every sequence of a step
    must
    have the same past length, because such a graph has only one: the length of its past tensors.

    Attributes:
        contract: contract of the same unit with its cache in place.
    """

    backend = "onnxruntime"

    def __init__(self, graph_path: str, contract: Contract) -> None:
        self._session = open_session(graph_path)
        self.contract = contract
        self.description = f"onnxruntime {onnxruntime.__version__} on CPUExecutionProvider, past and present apart"

    def new_cache(self, n_rows: int, capacity: int) -> HostCache:
        return HostCache(self.contract, n_rows, capacity)

    def run(
        self, feeds: Mapping[str, np.ndarray], cache: HostCache | None = None, first_row: int = 0
    ) -> dict[str, np.ndarray]:
        """Runs one step like `Stepper.run`."""
        assert cache is not None, "only models grow a cache"
        (past_len,) = set(feeds["write_indices"].tolist())
        total_len = feeds["attention_mask"].shape[1]
        rows = slice(first_row, first_row + len(feeds["write_indices"]))
        inputs = {
            spec.name: feeds[spec.name].astype(numpy_dtype(spec.dtype))
            for spec in self.contract.step_inputs
            if spec.name != "write_indices"
        }
        pasts, presents = zip(*self.contract.cache_pairs, strict=True)
        inputs |= {
            name: np.ascontiguousarray(array[rows, :, :past_len])
            for name, array in zip(pasts, cache.arrays, strict=True)
        }
        names = [spec.name for spec in self.contract.step_outputs]
        with refusals():
            results = self._session.run([*names, *presents], inputs)
        for array, present in zip(cache.arrays, results[len(names) :], strict=True):
            array[rows, :, :total_len] = present
        return dict(zip(names, results[: len(names)], strict=True))

    def close(self) -> None:
        del self._session
