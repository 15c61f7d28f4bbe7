"""The interpreter as a stepper: TensorRT parses a graph, and the network runs on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor

from engines.interpreter.program import Program, read_program
from engines.library.backend import Backend, choose_backend
from engines.network.network_checks import check_weight_format
from engines.network.parsed import ParsedNetwork, parse_network
from engines.network.source import load_source
from exporter.bundle.bundle import Bundle
from exporter.common.errors import CheckFailed
from exporter.graph.fixed_capacity import fix_capacity
from exporter.model.observe import See, unseen
from exporter.spec.tensors import Contract
from exporter.steppers.eager_stepper import feed_tensor, to_numpy, to_torch
from exporter.steppers.protocol import HostCache, Stepper


class InterpreterStepper(Stepper[HostCache]):
    """Parses the graph with TensorRT and runs the network. The cache is in host memory and is updated in place.

    A network has a fixed cache capacity, so a cache of another capacity makes the stepper parse the graph again. The
    network is not checked before, so that a run shows what the parser made of the graph.

    Attributes:
        contract: inputs and outputs of the bundle.
        description: name and version of the parser, for messages.

    Raises:
        CheckFailed: the parser refuses the graph, or the network has other inputs or outputs than the contract.
        Unsupported: the network has a layer that the interpreter does not know.
    """

    backend = "interpreter"

    def __init__(self, graph_path: Path, contract: Contract, backend: Backend) -> None:
        self.contract = contract
        self.description = f"the network that {backend} parses, run by PyTorch {torch.__version__} on the CPU"
        self._graph_path, self._backend = graph_path, backend
        self._parsed: ParsedNetwork | None = None  # its memory holds the constants of the program
        self._program: Program | None = None
        self._capacity: int | None = None
        if not contract.cache_pairs:
            self._parse(None)

    @classmethod
    def from_bundle(cls, bundle: Bundle, backend: str = "auto") -> InterpreterStepper:
        check_weight_format(bundle.manifest)
        return cls(bundle.graph_path, bundle.manifest.contract, choose_backend(backend))

    def new_cache(self, n_rows: int, capacity: int) -> HostCache:
        return HostCache(self.contract, n_rows, capacity)

    def run(
        self, feeds: Mapping[str, np.ndarray], cache: HostCache | None = None, first_row: int = 0, see: See = unseen
    ) -> dict[str, np.ndarray]:
        """Runs a step, as `Stepper.run` does.

        Args:
            feeds: inputs of the step by name.
            cache: the cache.
            first_row: first row of the cache that the step uses.
            see: called with the name and value of every tensor of the network; its result is used instead of the value.

        Returns:
            Outputs of the step by name.

        Raises:
            CheckFailed: the network does not update the cache in place.
        """
        if cache is not None and cache.capacity != self._capacity:
            self._parse(cache.capacity)
        inputs = {spec.name: feed_tensor(feeds, spec) for spec in self.contract.step_inputs}
        if cache is not None:
            rows = slice(first_row, first_row + len(feeds["write_indices"]))
            tensors = zip(self.contract.cache_specs, cache.arrays, strict=True)
            inputs |= {spec.name: to_torch(array[rows]) for spec, array in tensors}
        assert self._program is not None, "the graph was parsed at the start, or for this cache"
        results = self._program.run(inputs, see)
        self._check_in_place(results)
        return {spec.name: to_numpy(results[spec.name]) for spec in self.contract.step_outputs}

    def close(self) -> None:
        self._program = self._parsed = self._capacity = None

    def _parse(self, capacity: int | None) -> None:
        self.close()
        model = load_source(self._graph_path)
        if capacity is not None:
            fix_capacity(model, capacity)
        parsed = parse_network(self._backend, model, self._graph_path)
        got = {tensor.name: tensor.dtype for tensor in (*parsed.inputs, *parsed.outputs)}
        expected = {spec.name: spec.dtype for spec in (*self.contract.inputs, *self.contract.outputs)}
        if got != expected:
            wrong = sorted(name for name in {*got, *expected} if got.get(name) != expected.get(name))
            problem = f"its inputs and outputs {wrong} are not those of the bundle, expected {sorted(expected)}"
            raise CheckFailed(f"network: {problem}; export again")
        self._parsed, self._capacity = parsed, capacity
        self._program = read_program(parsed, _Initializers(model, self._graph_path))

    def _check_in_place(self, tensors: Mapping[str, Tensor]) -> None:
        for past, present in self.contract.cache_pairs:
            if tensors[past].data_ptr() != tensors[present].data_ptr():
                problem = f"{present} is not {past} updated in place"
                raise CheckFailed(f"network: {problem}; TensorRT needs both at one address")


class _Initializers:
    """The initializers of an ONNX file, read one at a time."""

    def __init__(self, model: onnx.ModelProto, path: Path) -> None:
        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        self._folder = str(path.parent)

    def __call__(self, name: str) -> np.ndarray:
        array = numpy_helper.to_array(self._tensors[name], base_dir=self._folder)
        return array.astype(np.int8) if array.dtype == ml_dtypes.int4 else array.copy()  # torch needs writable memory
