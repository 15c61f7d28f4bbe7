"""The onnxruntime stepper: runs a graph in an InferenceSession and updates its cache in place by IOBinding."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from exporter.bundle.bundle import Bundle
from exporter.common.errors import BackendError, BundleError
from exporter.common.processors import limited_threads
from exporter.common.timing import timed
from exporter.spec.dtypes import DTYPES, ONNX_TYPES, numpy_dtype
from exporter.spec.tensors import BATCH, CAPACITY, Contract
from exporter.steppers.protocol import Cache, HostCache, Stepper

log = logging.getLogger(__name__)

_FLOAT32_PRODUCTS, _INTEGER_PRODUCTS = "1", "4"  # onnxruntime's accuracy levels of products with weights in integers
DEVICES = {"CPUExecutionProvider": "cpu", "CUDAExecutionProvider": "cuda"}
DTYPES_WITHOUT_CPU_KERNELS = ("bf16",)
CUDA_LIBRARIES = "pip install 'onnxruntime-gpu[cuda,cudnn]'"


class CudaCache(Cache):
    """A cache in the memory of CUDA device 0, which onnxruntime allocates.

    Attributes:
        values: key and value of each layer, [rows, K, C, D] in the bundle's dtype.
    """

    def __init__(self, contract: Contract, n_rows: int, capacity: int) -> None:
        self.n_rows, self.capacity = n_rows, capacity
        self.values = [
            onnxruntime.OrtValue.ortvalue_from_numpy(
                np.zeros(spec.shape({BATCH: n_rows, CAPACITY: capacity}), numpy_dtype(spec.dtype)), "cuda", 0
            )
            for spec in contract.cache_specs
        ]

    def zero(self, row: int, start: int, stop: int) -> None:
        for value in self.values:
            host = value.numpy()
            host[row, :, start:stop] = 0
            value.update_inplace(host)

    def copy(self, source: int, destination: int, length: int) -> None:
        self.write(destination, self.read(source, length))

    def read(self, row: int, length: int) -> list[np.ndarray]:
        return [value.numpy()[row, :, :length].copy() for value in self.values]

    def write(self, row: int, tensors: list[np.ndarray]) -> None:
        for value, tensor in zip(self.values, tensors, strict=True):
            host = value.numpy()
            host[row, :, : tensor.shape[1]] = tensor
            value.update_inplace(host)


class OnnxruntimeStepper(Stepper[HostCache | CudaCache]):
    """Runs a graph on one execution provider.

    Past and present of a layer are bound to one address. onnxruntime then writes the new rows only and copies nothing.

    Raises:
        BackendError: the provider is not in this onnxruntime, does not start, or cannot run this dtype.
        BundleError: onnxruntime refuses the graph.
    """

    backend = "onnxruntime"

    def __init__(
        self,
        graph: str | bytes,
        contract: Contract,
        dtype: str,
        provider: str | None = None,
        data_folder: Path | None = None,
        integer_products: bool = False,
        threads: int | None = None,
    ) -> None:
        """Opens a session over a graph.

        Args:
            graph: path of a graph file, or bytes of a model whose external data is in `data_folder`.
            contract: contract of the graph.
            dtype: dtype of the graph.
            provider: onnxruntime's execution provider; None takes the CPU's.
            data_folder: folder with the data of a model given as bytes.
            integer_products: whether onnxruntime may round activations to 8 bits, a block at a time, before products
                with weights in integers. This is several times as fast on the CPU, but not what the graph says.
            threads: threads of the CPU's operators; None is what `open_session` says.
        """
        provider = "CPUExecutionProvider" if provider is None else provider
        _check_provider(provider, dtype)
        self._session = open_session(graph, provider, data_folder, integer_products, threads)
        started = self._session.get_providers()[0]
        if started != provider:
            raise BackendError(
                f"onnxruntime: got provider {provider}, which does not start; {started} would run instead; "
                f"install its libraries ({CUDA_LIBRARIES}) and a driver for them, or use CPUExecutionProvider"
            )
        self.contract = contract
        self.description = f"onnxruntime {onnxruntime.__version__} on {provider}" + (
            ", integer products" if integer_products else ""
        )
        if threads is not None:
            self.description += f", {threads} thread{'s' if threads > 1 else ''}"
        self._device = DEVICES[provider]
        self._types = {spec.name: ONNX_TYPES[spec.dtype] for spec in (*contract.inputs, *contract.outputs)}

    @classmethod
    def from_bundle(
        cls,
        bundle: Bundle,
        provider: str | None = None,
        integer_products: bool = True,
        threads: int | None = None,
    ) -> OnnxruntimeStepper:
        """Opens a bundle for decoding, with integer products where its weights are in integers."""
        integer_products &= bundle.manifest.weight_format is not None
        return cls(
            str(bundle.graph_path),
            bundle.manifest.contract,
            bundle.manifest.dtype,
            provider,
            integer_products=integer_products,
            threads=threads,
        )

    def new_cache(self, n_rows: int, capacity: int) -> HostCache | CudaCache:
        kind = HostCache if self._device == "cpu" else CudaCache
        return kind(self.contract, n_rows, capacity)

    def run(
        self, feeds: Mapping[str, np.ndarray], cache: HostCache | CudaCache | None = None, first_row: int = 0
    ) -> dict[str, np.ndarray]:
        return {name: value.numpy() for name, value in self._run(feeds, cache, first_row).items()}

    def pass_on(
        self, feeds: Mapping[str, Any], cache: HostCache | CudaCache, first_row: int = 0
    ) -> onnxruntime.OrtValue:
        return self._run(feeds, cache, first_row)["hidden_states_out"]

    def _run(
        self, feeds: Mapping[str, Any], cache: HostCache | CudaCache | None, first_row: int
    ) -> dict[str, onnxruntime.OrtValue]:
        """Runs a step; feeds may be outputs of another step, and outputs stay in onnxruntime's memory."""
        binding = self._session.io_binding()
        held = []  # keeps arrays alive that are bound by their address
        for spec in self.contract.step_inputs:
            x = feeds[spec.name]
            if isinstance(x, onnxruntime.OrtValue):
                binding.bind_ortvalue_input(spec.name, x)
                continue
            held.append(np.ascontiguousarray(x, numpy_dtype(spec.dtype)))
            binding.bind_input(spec.name, "cpu", 0, self._types[spec.name], held[-1].shape, held[-1].ctypes.data)
        for spec in self.contract.step_outputs:
            binding.bind_output(spec.name, "cpu")
        if cache is not None:
            self._bind_cache(binding, cache, first_row, len(feeds["write_indices"]))
        with refusals():
            self._session.run_with_iobinding(binding)
        # outputs come in the order in which they were bound, not in the graph's
        results = binding.get_outputs()[: len(self.contract.step_outputs)]
        return {spec.name: result for spec, result in zip(self.contract.step_outputs, results, strict=True)}

    def _bind_cache(
        self, binding: onnxruntime.IOBinding, cache: HostCache | CudaCache, first_row: int, n_rows: int
    ) -> None:
        for (past, present), spec, (address, stride) in zip(
            self.contract.cache_pairs, self.contract.cache_specs, _buffers(cache), strict=True
        ):
            shape = spec.shape({BATCH: n_rows, CAPACITY: cache.capacity})
            start = address + first_row * stride
            binding.bind_input(past, self._device, 0, self._types[past], shape, start)
            binding.bind_output(present, self._device, 0, self._types[present], shape, start)

    def close(self) -> None:
        del self._session


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turns an exception of onnxruntime during a step into an error of ours.

    Raises:
        BackendError: onnxruntime refuses the step; the message has the first line of its reason.
    """
    try:
        yield
    except Exception as error:  # onnxruntime raises its own types per status code, all of them plain Exceptions
        raise BackendError(
            f"onnxruntime: it does not run this graph: {str(error).partition(chr(10))[0][:300]}"
        ) from error


def open_session(
    graph: str | bytes,
    provider: str = "CPUExecutionProvider",
    data_folder: Path | None = None,
    integer_products: bool = False,
    threads: int | None = None,
) -> onnxruntime.InferenceSession:
    """Opens a quiet session on one provider, over a graph file or a model's bytes with external data in `data_folder`.

    `threads` is for the CPU's operators. None takes onnxruntime's own choice, one for each core of the machine, or the
    processors that this process may use where its affinity or its container's quota allows fewer.

    Raises:
        BundleError: onnxruntime refuses the graph.
    """
    if provider == "CUDAExecutionProvider":
        _load_cuda_libraries()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.enable_mem_pattern = False  # it keeps a memory plan for every distinct set of input shapes, for ever
    if threads is None:
        threads = limited_threads()
    if threads is not None:
        options.intra_op_num_threads = threads
    options.add_session_config_entry(
        "session.qdq_matmulnbits_accuracy_level", _INTEGER_PRODUCTS if integer_products else _FLOAT32_PRODUCTS
    )
    if data_folder is not None:
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(data_folder.absolute())
        )
    what = graph if isinstance(graph, str) else f"a graph over the data in {data_folder}"
    try:
        with timed(log, "session of %s on %s", what, provider):
            return onnxruntime.InferenceSession(graph, options, providers=[provider])
    except Exception as error:  # onnxruntime raises its own types per status code, all of them plain Exceptions
        raise BundleError(f"{what}: onnxruntime refuses it: {str(error).partition(chr(10))[0][:500]}") from error


@functools.cache
def _load_cuda_libraries() -> None:
    """Loads the CUDA libraries that pip has installed. Otherwise onnxruntime finds only those of the system.

    What is missing is logged. The provider then does not start, which is an error of its own.
    """
    said = io.StringIO()
    with contextlib.redirect_stdout(said):  # it prints what it does not find
        onnxruntime.preload_dlls()
    for line in said.getvalue().splitlines():
        log.info("CUDA libraries: %s", line)


def _buffers(cache: HostCache | CudaCache) -> list[tuple[int, int]]:
    """Returns the address and the bytes per row of every cache tensor."""
    if isinstance(cache, HostCache):
        return [(array.ctypes.data, array.strides[0]) for array in cache.arrays]
    return [(value.data_ptr(), value.tensor_size_in_bytes() // cache.n_rows) for value in cache.values]


def _check_provider(provider: str, dtype: str) -> None:
    available = [name for name in onnxruntime.get_available_providers() if name in DEVICES]
    if provider not in DEVICES:
        raise BackendError(f"onnxruntime: got provider {provider!r}, expected one of {', '.join(DEVICES)}")
    if provider not in available:
        raise BackendError(
            f"onnxruntime: got provider {provider!r}, expected one of {', '.join(available)}, which are in this build; "
            "install onnxruntime-gpu for CUDA"
        )
    if dtype == "bf16" and provider == "CUDAExecutionProvider":
        raise BackendError(
            "onnxruntime: got a bf16 graph for CUDAExecutionProvider, expected fp16 or fp32; onnxruntime's values of "
            "bf16 do not pass through numpy; decode this bundle with TensorRT, or export it in fp16 or fp32"
        )
    if dtype in DTYPES_WITHOUT_CPU_KERNELS and provider == "CPUExecutionProvider":
        others = " or ".join(name for name in DTYPES if name not in DTYPES_WITHOUT_CPU_KERNELS)
        raise BackendError(
            f"onnxruntime: CPUExecutionProvider has no {dtype} kernels (MatMul, Mul, Attention …); "
            f"decode this bundle with the eager backend or TensorRT, or export it in {others}"
        )
