"""Observers: each runs a step of one backend and returns every named value in it.

Each operation reads either the values that the backend has computed, or values of the reference that it is given. The
names are those of the graph (`blocks.3.mlp.up_proj`), which the eager definition uses as well. Eager and the
interpreter call a function with each value. onnxruntime runs edited copies of the graph: one has every named value as
an output, the other is cut at every named value, so that each operation reads a value that is an input.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import helper
from torch import Tensor

from engines.interpreter.stepper import InterpreterStepper
from exporter.measuring.named_values import GIVEN, Values, cut_values, show_values
from exporter.spec.dtypes import numpy_dtype
from exporter.spec.tensors import Contract
from exporter.steppers.eager_stepper import EagerStepper, to_numpy, to_torch
from exporter.steppers.onnxruntime_stepper import open_session, refusals
from exporter.steppers.protocol import HostCache


class Observer(ABC):
    """Runs steps of one backend and returns their named values.

    Attributes:
        backend: "eager", "onnxruntime" or "interpreter".
        description: backend and version in words.
        contract: contract of what it runs; its dtypes are those of the cache.
        rounds_each_operation: whether every operation's result has the graph's own dtype. onnxruntime computes half
            graphs in float32 and rounds only where it must, so its results may differ in bits from the definition's.
        integer_weights: whether the graph's weights are stored in integers.
    """

    backend: str
    description: str
    contract: Contract
    rounds_each_operation: bool = True
    integer_weights: bool = False

    def new_cache(self, n_rows: int, capacity: int) -> HostCache:
        """Returns a new cache, all zero."""
        return HostCache(self.contract, n_rows, capacity)

    @abstractmethod
    def observe(self, feeds: Mapping[str, np.ndarray], cache: HostCache, given: Values | None = None) -> Values:
        """Runs one step over all rows of the cache, which it updates in place.

        Args:
            feeds: the step's inputs by name.
            cache: a cache of this observer.
            given: values by name. Every operation reads them in place of the computed values of those names.

        Returns:
            Every named value as it was computed.
        """

    def close(self) -> None:  # noqa: B027 - not abstract on purpose: most observers hold nothing
        """Frees everything that the observer owns."""


class StepperObserver(Observer):
    """Observes a stepper that calls a function with each value: eager or the interpreter."""

    def __init__(self, stepper: EagerStepper | InterpreterStepper, names: Iterable[str] | None = None) -> None:
        """Takes a stepper and the names of the values to return; None returns all."""
        self.backend, self.description, self.contract = stepper.backend, stepper.description, stepper.contract
        self._stepper, self._names = stepper, None if names is None else frozenset(names)

    def observe(self, feeds: Mapping[str, np.ndarray], cache: HostCache, given: Values | None = None) -> Values:
        seen: Values = {}

        def see(name: str, x: Tensor) -> Tensor:
            if self._names is not None and name not in self._names:
                return x
            seen[name] = to_numpy(x).copy()  # cache rows are views, and the next step changes them
            return to_torch(given[name]).to(x.dtype) if given and name in given else x

        self._stepper.run(feeds, cache, see=see)
        return seen

    def close(self) -> None:
        self._stepper.close()


class GraphObserver(Observer):
    """Observes an ONNX graph in onnxruntime on the CPU by running edited copies of it."""

    backend = "onnxruntime"
    rounds_each_operation = False

    def __init__(self, graph_path: Path, contract: Contract, names: Iterable[str]) -> None:
        self.contract = contract
        self.description = f"onnxruntime {onnxruntime.__version__} on CPUExecutionProvider, every named value an output"
        self._path = graph_path
        model = onnx.load(graph_path, load_external_data=False)
        self.integer_weights = any(node.op_type == "DequantizeLinear" for node in model.graph.node)
        self._names = show_values(model, names)
        self._tapped = self._session(model)
        self._cut: onnxruntime.InferenceSession | None = None

    def _session(self, model: onnx.ModelProto) -> onnxruntime.InferenceSession:
        return open_session(model.SerializeToString(), data_folder=self._path.parent)

    def observe(self, feeds: Mapping[str, np.ndarray], cache: HostCache, given: Values | None = None) -> Values:
        """Runs one step like `Observer.observe`; the first step with given values makes the cut graph."""
        session, inputs = self._tapped, {}
        if given is not None:
            if self._cut is None:
                self._cut = self._session(self._cut_model())
            session = self._cut
            types = {entry.name: _NUMPY_TYPES[entry.type] for entry in session.get_inputs()}
            inputs = {
                name: given[name.removesuffix(GIVEN)].astype(dtype)
                for name, dtype in types.items()
                if name.endswith(GIVEN)
            }
        for spec in self.contract.step_inputs:
            inputs[spec.name] = feeds[spec.name].astype(numpy_dtype(spec.dtype), copy=False)
        pasts, presents = zip(*self.contract.cache_pairs, strict=True)
        inputs |= dict(zip(pasts, cache.arrays, strict=True))
        with refusals():
            results = session.run([*presents, *self._names], inputs)
        for array, present in zip(cache.arrays, results[: len(presents)], strict=True):
            array[:] = present
        return dict(zip(self._names, results[len(presents) :], strict=True))

    def _cut_model(self) -> onnx.ModelProto:
        model = onnx.load(self._path, load_external_data=False)
        names = show_values(model, self._names)
        types = {output.name: _ONNX_TYPES[output.type] for output in self._tapped.get_outputs()}
        cut_values(model, {name: types[name] for name in names})
        return model

    def close(self) -> None:
        self._tapped = self._cut = None


_ONNX_TYPES = {
    f"tensor({name})": number
    for name, number in (("float16", 10), ("float", 1), ("double", 11), ("bool", 9), ("int64", 7), ("int32", 6))
}
_NUMPY_TYPES = {text: helper.tensor_dtype_to_np_dtype(number) for text, number in _ONNX_TYPES.items()}
