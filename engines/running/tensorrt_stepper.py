"""The TensorRT stepper: runs an engine with a cache that is updated in place, and replays decode steps as CUDA graphs.

Past and present of a cache tensor have the same address.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from engines.library.cuda import ALIGNMENT_BYTES, Cuda
from engines.library.dlpack import DeviceRows, DeviceTensor, import_tensor
from engines.library.tensorrt_logger import create_logger
from engines.library.usable_engines import backend_of
from engines.network.profiles import largest_size
from engines.running.contexts import Contexts
from engines.running.cuda_graphs import CudaGraphs, GraphKey, bucket_length
from engines.running.device_cache import DeviceCache, free_all
from engines.running.engine_tensors import cache_pairs, check_tensors
from engines.running.profile_ranges import ProfileRanges
from engines.running.runtime_cache import RuntimeCacheFile
from exporter.bundle.bundle import Bundle
from exporter.bundle.engine_records import EngineRecord
from exporter.common.errors import BackendError, BundleError, InputError
from exporter.spec.dtypes import numpy_dtype
from exporter.spec.tensors import BATCH, CAPACITY, SEQUENCE, TOTAL, TensorSpec
from exporter.steppers.protocol import OnDevice, Stepper

log = logging.getLogger(__name__)

MAX_PREPARED = 1024  # steps whose shapes and addresses are kept; some 10 KB each
Outputs = dict[str, tuple[np.dtype, tuple[int, ...]]]  # output → its dtype and shape


@dataclass(frozen=True)
class PassedOn:
    """Hidden states [B, T, E] in the buffer that the next part reads."""

    address: int
    shape: tuple[int, ...]


@dataclass
class _Prepared:
    """What does not change while one step is repeated. `outputs` is known after its first run."""

    profile: int
    shapes: dict[str, tuple[int, ...]]
    addresses: list[int]
    outputs: Outputs | None = None


class TensorRTStepper(Stepper[DeviceCache], OnDevice):
    """Runs an engine that was built from the bundle.

    Each profile and each captured graph has an execution context of its own. Each input and output has one device
    buffer that is large enough for every profile, so its address never changes.

    Attributes:
        contract: inputs and outputs of the bundle.
        max_batch, max_seq_len: largest number of sequences and of new tokens in a step that some profile takes.
        cache_capacity: cache rows per sequence that the engine was built for.
        cuda_graphs: whether decode steps are captured and replayed.
        description: name and version of the backend, the engine, and whether CUDA graphs are on, for messages.
    """

    backend = "tensorrt"
    max_seq_len: int

    def __init__(self, bundle: Bundle, record: EngineRecord, trt: Any, cuda: Cuda, cuda_graphs: bool = True) -> None:
        self.contract = bundle.manifest.contract
        self.cache_capacity = record.decode_capacity()
        self._name = f"{record.backend} {record.version}, {record.file}"
        self._turn_graphs(cuda_graphs)
        self._trt, self._cuda = trt, cuda
        self._makes_contexts: Contexts | None = None
        self._buffers: dict[str, int] = {}
        self._followed: set[str] = set()  # inputs that use a buffer of another part
        self._graphs = CudaGraphs(cuda)
        self._prepared: dict[GraphKey, _Prepared] = {}
        self._mask = np.empty(0, np.int64)
        self._logger = create_logger(trt)
        try:
            self._load(bundle, record)
        except BaseException:
            self.free()
            raise

    def _load(self, bundle: Bundle, record: EngineRecord) -> None:
        """Loads the engine, and makes its buffers and contexts."""
        trt, cuda = self._trt, self._cuda
        cuda.use_device()
        self._runtime = trt.Runtime(self._logger)
        if record.options["version_compatible"]:  # `find_engine` gives such an engine only where it is allowed
            self._runtime.engine_host_code_allowed = True
        self._engine = self._runtime.deserialize_cuda_engine((bundle.folder / record.file).read_bytes())
        if self._engine is None:
            raise BundleError(f"engine {record.file}: it does not load: {self._logger.reason()}")
        self._pairs = cache_pairs(self._engine, self.contract)
        check_tensors(trt, self._engine, self.contract, record.file)
        self._ranges = ProfileRanges(self._engine, self.contract.inputs)
        self.max_batch, self.max_seq_len = (
            largest_size(axis, self.contract.inputs, self._ranges.maxima) for axis in (BATCH, SEQUENCE)
        )
        for spec in (*self.contract.step_inputs, *self.contract.step_outputs):
            self._buffers[spec.name] = cuda.allocate(self._largest_bytes(spec))
        cache_file = RuntimeCacheFile(bundle.folder, record) if record.backend == "tensorrt-rtx" else None
        self._makes_contexts = Contexts(self._name, trt, self._engine, cuda, self._logger, cache_file)
        self._contexts = [self._makes_contexts.new(index) for index in range(len(self._ranges))]

    @property
    def graph_count(self) -> int:
        """The number of captured decode graphs."""
        return len(self._graphs)

    def _turn_graphs(self, on: bool) -> None:
        self.cuda_graphs = on
        self.description = f"{self._name}, CUDA graphs {'on' if on else 'off'}"

    # --- setup ----------------------------------------------------------------------------------------------

    def _largest_bytes(self, spec: TensorSpec) -> int:
        """The size of a tensor in the largest step, rounded up to the alignment."""
        sizes = {BATCH: self.max_batch, SEQUENCE: self.max_seq_len, TOTAL: self.cache_capacity}
        n_bytes = math.prod(spec.shape(sizes)) * numpy_dtype(spec.dtype).itemsize
        return -(-n_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def new_cache(self, n_rows: int, capacity: int) -> DeviceCache:
        if capacity != self.cache_capacity:
            expected = f"{self.cache_capacity}, which the engine was built for"
            raise InputError(f"cache_capacity: got {capacity}, expected {expected}")
        return DeviceCache(self._cuda, self.contract.cache_specs, n_rows, capacity)

    # --- steps ----------------------------------------------------------------------------------------------

    def run(
        self, feeds: Mapping[str, np.ndarray], cache: DeviceCache | None = None, first_row: int = 0
    ) -> dict[str, np.ndarray]:
        assert cache is not None, "an engine runs only units with a cache"
        outputs = {}
        for name, (dtype, shape) in self._step(feeds, cache, first_row).items():
            outputs[name] = np.empty(shape, dtype)
            self._cuda.download(outputs[name], self._buffers[name])
        self._cuda.synchronize()
        return outputs

    def run_on_device(
        self, feeds: Mapping[str, np.ndarray | DeviceRows], cache: DeviceCache, first_row: int = 0
    ) -> dict[str, DeviceTensor]:
        outputs = {}
        for name, (dtype, shape) in self._step(feeds, cache, first_row).items():
            n_bytes = math.prod(shape) * dtype.itemsize
            address = self._cuda.allocate(n_bytes)
            outputs[name] = DeviceTensor.owning(address, shape, dtype, partial(_release, self._cuda, address))
            self._cuda.copy(address, self._buffers[name], n_bytes, n_bytes, 1)
        self._cuda.synchronize()
        return outputs

    def join(self, tensors: Sequence[DeviceTensor]) -> DeviceTensor:
        self._cuda.use_device()
        n_bytes, first = sum(tensor.nbytes for tensor in tensors), tensors[0]
        address = self._cuda.allocate(n_bytes)
        shape = (sum(len(tensor) for tensor in tensors), *first.shape[1:])
        joined = DeviceTensor.owning(address, shape, first.dtype, partial(_release, self._cuda, address))
        for tensor in tensors:
            self._cuda.copy(address, tensor.address, tensor.nbytes, tensor.nbytes, 1)
            address += tensor.nbytes
        self._cuda.synchronize()
        return joined

    def pass_on(self, feeds: Mapping[str, Any], cache: DeviceCache, first_row: int = 0) -> PassedOn:
        _, shape = self._step(feeds, cache, first_row)["hidden_states_out"]
        return PassedOn(self._buffers["hidden_states_out"], shape)

    def follow(self, previous: TensorRTStepper) -> None:
        """Makes this part read hidden states from the output buffer of the previous part. Both must use one stream."""
        self._cuda.free(self._buffers["hidden_states"])
        self._buffers["hidden_states"] = previous._buffers["hidden_states_out"]
        self._followed.add("hidden_states")

    def import_tensor(self, x: Any) -> DeviceTensor:
        self._cuda.use_device()
        return import_tensor(x, self._cuda.stream, self._cuda.device)

    def to_host(self, tensor: DeviceTensor) -> np.ndarray:
        self._cuda.use_device()
        array = np.empty(tensor.shape, tensor.dtype)
        self._cuda.download(array, tensor.address)
        self._cuda.synchronize()
        return array

    def _step(self, feeds: Mapping[str, Any], cache: DeviceCache, first_row: int) -> Outputs:
        """Queues a step. Returns dtype and shape of each output, which is in its buffer when the stream is done."""
        self._cuda.use_device()
        inputs: dict[str, Any] = {spec.name: _contiguous(feeds[spec.name], spec) for spec in self.contract.step_inputs}
        mask = inputs["attention_mask"]
        one_token = inputs["position_ids"].shape[1] == 1
        longest = self._ranges.longest_decode(mask.shape) if self.cuda_graphs and one_token else None
        if longest is None:
            prepared = self._prepare(inputs, cache, first_row)
            self._fill_buffers(inputs)
            context = self._contexts[prepared.profile]
            self._enqueue(context, prepared)
            return self._outputs(context)
        length = bucket_length(mask.shape[1], longest)
        inputs["attention_mask"] = self._padded(mask, length)
        key = (cache.serial, first_row, len(mask), length)
        found = self._prepared.get(key)
        if found is None:
            if len(self._prepared) >= MAX_PREPARED:
                self._prepared.clear()
            found = self._prepared[key] = self._prepare(inputs, cache, first_row)
        self._fill_buffers(inputs)
        context = self._replay(key, found)
        if found.outputs is None:
            found.outputs = self._outputs(context)
        return found.outputs

    def _prepare(self, inputs: Mapping[str, Any], cache: DeviceCache, first_row: int) -> _Prepared:
        """Returns profile, shapes and addresses of a step.

        Raises:
            InputError: no profile takes the shapes.
        """
        shapes = {name: array.shape for name, array in inputs.items()}
        for spec in self.contract.cache_specs:
            shapes[spec.name] = spec.shape({BATCH: len(inputs["position_ids"]), CAPACITY: cache.capacity})
        return _Prepared(self._ranges.first(shapes), shapes, cache.row_addresses(first_row))

    def _padded(self, mask: np.ndarray, length: int) -> np.ndarray:
        """Returns a mask [B, L] with zeros up to [B, `length`], in a buffer that the next step uses again."""
        n = len(mask) * length
        if len(self._mask) < n:
            self._mask = np.empty(n, mask.dtype)
        padded = self._mask[:n].reshape(len(mask), length)
        padded[:, : mask.shape[1]], padded[:, mask.shape[1] :] = mask, 0
        return padded

    def _outputs(self, context: Any) -> Outputs:
        return {
            spec.name: (numpy_dtype(spec.dtype), tuple(context.get_tensor_shape(spec.name)))
            for spec in self.contract.step_outputs
        }

    def _fill_buffers(self, inputs: Mapping[str, Any]) -> None:
        self._in_flight = inputs  # uploads read host memory until the stream is synchronized
        for name, x in inputs.items():
            self._fill_buffer(name, x)

    def _fill_buffer(self, name: str, x: Any) -> None:
        """Queues what brings an input into its buffer."""
        if isinstance(x, PassedOn):
            assert x.address == self._buffers[name], "hidden states come from the part that this one follows"
        elif isinstance(x, DeviceRows):
            self._gather(self._buffers[name], x)
        else:
            self._cuda.upload(self._buffers[name], x)

    def _gather(self, buffer: int, x: DeviceRows) -> None:
        """Queues copies of rows on the device into one batch that is padded with zeros."""
        stride = math.prod(x.shape[1:]) * x.rows[0].dtype.itemsize
        self._cuda.zero(buffer, stride, stride, len(x.rows))
        for index, row in enumerate(x.rows):
            self._cuda.copy(buffer + index * stride, row.address, row.nbytes, row.nbytes, 1)

    def _enqueue(self, context: Any, prepared: _Prepared) -> None:
        """Sets every shape and address, and queues the step."""
        self._bind(context, prepared.shapes, prepared.addresses)
        self._execute(context)

    def _bind(self, context: Any, shapes: Mapping[str, tuple[int, ...]], addresses: Sequence[int]) -> None:
        for name, shape in shapes.items():
            self._check(context.set_input_shape(name, shape), f"set_input_shape({name}, {list(shape)})")
        places = dict(self._buffers)
        for spec, address in zip(self.contract.cache_specs, addresses, strict=True):
            places[spec.name] = places[self._pairs[spec.name]] = address
        for name, address in places.items():
            self._check(context.set_tensor_address(name, address), f"set_tensor_address({name})")
        missing = context.infer_shapes()
        self._check(not missing, f"infer_shapes: {missing} are not given")

    def _execute(self, context: Any) -> None:
        self._check(context.execute_async_v3(self._cuda.stream), "execute_async_v3")

    def _check(self, good: bool, call: str) -> None:
        if not good:
            raise RuntimeError(f"{self.description}: {call} failed: {self._logger.reason()}")

    def _replay(self, key: GraphKey, prepared: _Prepared) -> Any:
        """Queues a decode step, as a graph where it is captured; returns its context.

        The first step of a key runs in the profile's own context: a batch that comes once is not worth a capture. The
        second one gets a context of its own and is captured. A capture that fails does not fail the step, which has run
        before it. From then on steps run without graphs.
        """
        context = self._graphs.replay(key)
        if context is not None:
            return context
        own = self._context_to_repeat(prepared.profile) if self._graphs.is_worth(key) else None
        context = own or self._contexts[prepared.profile]
        self._enqueue(context, prepared)  # TensorRT's lazy setup must run outside of the capture
        if own is None:
            return context
        assert self._makes_contexts is not None, "it has made the context"
        work = partial(self._execute, own)
        if self._makes_contexts.captures_itself:
            self._graphs.keep(key, own, work)
            return own
        self._cuda.synchronize()
        try:
            self._graphs.capture(key, own, work)
        except RuntimeError as error:
            self._graphs_go_off(f"a capture failed: {error}")
        return own

    def _context_to_repeat(self, profile: int) -> Any | None:
        """Returns a context for one step again and again. Returns None where TensorRT makes none."""
        assert self._makes_contexts is not None, "the engine is loaded"
        try:
            return self._makes_contexts.new(profile, repeated=True)
        except BackendError as error:
            self._graphs_go_off(str(error))
            return None

    def _graphs_go_off(self, reason: str) -> None:
        self._turn_graphs(False)
        log.warning("%s: CUDA graphs go off, because %s; steps are slower", self._name, reason)

    def free(self) -> None:
        """Frees everything except the stream, which other parts may use. Continues where one thing raises."""
        self._cuda.use_device()
        with contextlib.ExitStack() as freeing:
            own = [address for name, address in self._buffers.items() if name not in self._followed]
            self._buffers, self._contexts, self._engine, self._runtime = {}, [], None, None
            freeing.callback(free_all, self._cuda, own)
            if self._makes_contexts is not None:
                freeing.callback(self._makes_contexts.close)
            self._makes_contexts = None
            freeing.callback(self._graphs.free)  # the last one is called first, and waits for the stream

    def close(self) -> None:
        with contextlib.ExitStack() as closing:
            closing.callback(self._cuda.close)
            self.free()


def _release(cuda: Cuda, address: int) -> None:
    """Frees a tensor that left the engine. Its last reference may go in any thread."""
    cuda.use_device()
    cuda.free(address)


def _contiguous(x: np.ndarray | DeviceRows | PassedOn, spec: TensorSpec) -> np.ndarray | DeviceRows | PassedOn:
    return x if isinstance(x, DeviceRows | PassedOn) else np.ascontiguousarray(x, numpy_dtype(spec.dtype))


def open_tensorrt(bundle: Bundle, record: EngineRecord, cuda: Cuda, cuda_graphs: bool = True) -> TensorRTStepper:
    """Returns a stepper for the engine of a bundle that `find_engine` has chosen.

    Raises:
        BackendError: TensorRT is not usable here.
        BundleError: the engine does not load, or has other tensors than the bundle.
    """
    return TensorRTStepper(bundle, record, backend_of(record).trt, cuda, cuda_graphs)
