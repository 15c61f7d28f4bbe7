"""Doubles of CUDA and TensorRT for the TensorRT stepper. They enforce the rules of both and compute with eager.

Queued work runs only at `synchronize`, so that a test finds a missing one. Memory is checked for bounds, alignment and
use after free. Each step first fills its outputs with a poison value, so that a test finds an old output.
"""

from __future__ import annotations

import shutil
import tempfile
import types
from pathlib import Path

import numpy as np

from engines.library.cuda import ALIGNMENT_BYTES, Cuda, CudaError
from engines.network.build_options import BuildOptions
from engines.network.profiles import default_profiles
from engines.running.tensorrt_stepper import TensorRTStepper
from exporter.bundle.bundle import Bundle
from exporter.bundle.engine_records import EngineRecord
from exporter.spec.dtypes import numpy_dtype
from exporter.spec.tensors import BATCH, CAPACITY, SEQUENCE, TOTAL
from exporter.steppers.eager_stepper import EagerStepper
from exporter.steppers.protocol import HostCache, Stepper
from runtime import DecodeSession

ENGINE = b"engine"  # the content of every engine file that the double knows
POISON = 0x7F  # no step computes a value of these bytes, in float16, float32 or int64


class ContractError(AssertionError):
    """CUDA or TensorRT was used in a way that its documentation does not allow."""


class CudaDouble(Cuda):
    """Device memory made of host arrays, and a stream made of a list of functions."""

    def __init__(self):
        self.stream, self.device = 7, 0
        self.current_device = 0  # another library may change it between two calls
        self._memory: dict[int, np.ndarray] = {}
        self._next = 1 << 20
        self._queue: list = []
        self._recording: list | None = None
        self.refuses_captures = False
        self.reserved_by_contexts = 0  # bytes that contexts have allocated for themselves
        self.live_graphs = 0
        self.launches = 0
        self.closed = False

    def use_device(self):
        self.current_device = self.device

    def _check_device(self):
        if self.current_device != self.device:
            raise ContractError(f"device {self.current_device} is current, and the memory is on {self.device}")

    def allocate(self, n_bytes):
        self._check_device()
        if n_bytes <= 0:
            raise ContractError(f"cudaMalloc of {n_bytes} bytes")
        address = self._next
        self._memory[address] = np.zeros(n_bytes, np.uint8)
        self._next += -(-n_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES + 4096  # the gap lets `view` find an overrun
        return address

    def free(self, address):
        self._check_device()
        if self._queue:
            raise ContractError("memory freed while work is queued that may use it")
        if self._memory.pop(address, None) is None:
            raise ContractError(f"cudaFree of {address:#x}, which is not allocated")

    def view(self, address: int, n_bytes: int) -> np.ndarray:
        """The bytes at an address. They must be in one allocation that is not freed."""
        for base, memory in self._memory.items():
            if base <= address and address + n_bytes <= base + len(memory):
                return memory[address - base : address - base + n_bytes]
        raise ContractError(f"access to {n_bytes} bytes at {address:#x}, which is not (or no longer) allocated")

    def _put(self, work):
        self._check_device()
        if self.closed:
            raise ContractError("the stream is destroyed")
        (self._queue if self._recording is None else self._recording).append(work)

    def upload(self, address, array):
        if not array.flags.c_contiguous:
            raise ContractError("upload of an array that is not contiguous")
        if self._recording is not None:
            raise ContractError("a pageable upload inside a capture")
        self._put(
            lambda: self.view(address, array.nbytes).__setitem__(slice(None), np.frombuffer(array.tobytes(), np.uint8))
        )

    def download(self, array, address):
        if not array.flags.c_contiguous:
            raise ContractError("download into an array that is not contiguous")
        array.view(np.uint8).reshape(-1)[:] = POISON  # until the stream is synchronized
        self._put(lambda: array.view(np.uint8).reshape(-1).__setitem__(slice(None), self.view(address, array.nbytes)))

    def zero(self, address, pitch, width, height):
        self._put(lambda: [self.view(address + k * pitch, width).fill(0) for k in range(height)])

    def copy(self, destination, source, pitch, width, height):
        self._put(
            lambda: [
                self.view(destination + k * pitch, width).__setitem__(slice(None), self.view(source + k * pitch, width))
                for k in range(height)
            ]
        )

    def synchronize(self):
        self._check_device()
        if self.closed:
            raise ContractError("the stream is destroyed")
        if self._recording is not None:
            raise CudaError("cudaStreamSynchronize: cudaErrorStreamCaptureUnsupported")
        queue, self._queue = self._queue, []
        for work in queue:
            work()

    def capture(self, work):
        self._check_device()
        if self._recording is not None:
            raise ContractError("a capture inside a capture")
        if self._queue:
            raise ContractError("a capture while the step before it is still queued")
        graph = types.SimpleNamespace(work=[], alive=True)
        try:
            self._recording = graph.work
            work()
            if self.refuses_captures:
                raise CudaError("cudaStreamEndCapture: cudaErrorStreamCaptureInvalidated")
        finally:
            self._recording = None
        self.live_graphs += 1
        return graph

    def launch(self, graph):
        if not graph.alive:
            raise ContractError("launch of a destroyed graph")
        self.launches += 1
        for work in graph.work:
            self._put(work)

    def destroy_graph(self, graph):
        if not graph.alive:
            raise ContractError("a graph destroyed twice")
        graph.alive = False
        self.live_graphs -= 1

    def free_bytes(self):
        return 1 << 34

    def close(self):
        self.closed = True

    @property
    def capturing(self) -> bool:
        return self._recording is not None

    @property
    def allocations(self) -> int:
        """The number of buffers that are not freed."""
        return len(self._memory)


def _dtype(name: str):
    names = {"fp16": "HALF", "fp32": "FLOAT", "bf16": "BF16", "int64": "INT64"}
    return types.SimpleNamespace(name=names[name])


class ContextDouble:
    """IExecutionContext. Each enqueue checks that all shapes and addresses are set."""

    def __init__(self, engine, strategy):
        self._engine, self._strategy, self._memory = engine, strategy, (0, 0)
        if strategy != ExecutionContextAllocationStrategy.USER_MANAGED:
            engine.cuda.reserved_by_contexts += engine.device_memory_size_v2
        self._profile = None
        self._shapes: dict[str, tuple] = {}
        self._addresses: dict[str, int] = {}

    def set_device_memory(self, memory, size):
        if self._strategy != ExecutionContextAllocationStrategy.USER_MANAGED:
            raise ContractError("device memory for a context that allocates its own")
        if memory % ALIGNMENT_BYTES or size < self._engine.device_memory_size_v2:
            raise ContractError(f"device memory of {size} bytes at {memory:#x}, which is too small or not aligned")
        self._memory = (memory, size)

    def set_optimization_profile_async(self, index, stream):
        self._profile = index
        return 0 <= index < self._engine.num_optimization_profiles

    def set_input_shape(self, name, shape):
        low, _, high = self._engine.get_tensor_profile_shape(name, self._profile)
        if not all(a <= s <= b for a, s, b in zip(low, shape, high, strict=True)):
            return False
        self._shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name, address):
        if address % ALIGNMENT_BYTES:
            raise ContractError(f"{name} at {address:#x}, which is not aligned to {ALIGNMENT_BYTES} bytes")
        self._addresses[name] = address
        return name in self._engine.specs

    def infer_shapes(self):
        return [name for name in self._engine.input_names if name not in self._shapes]

    def get_tensor_shape(self, name):
        if name in self._shapes:
            return self._shapes[name]
        batch, length = self._shapes["position_ids"]
        sizes = {
            BATCH: batch,
            SEQUENCE: length,
            TOTAL: self._shapes["attention_mask"][1],
            CAPACITY: self._engine.capacity,
        }
        return tuple(sizes[axis] if isinstance(axis, str) else axis for axis in self._engine.specs[name].axes)

    def may_run(self, shapes) -> bool:
        """Whether this TensorRT runs the step now."""
        return True

    def execute_async_v3(self, stream):
        engine = self._engine
        if stream != engine.cuda.stream:
            raise ContractError(f"enqueued on stream {stream}, the copies are on {engine.cuda.stream}")
        missing = [name for name in engine.specs if name not in self._addresses]
        if missing or self.infer_shapes():
            raise ContractError(f"addresses missing for {missing}, shapes for {self.infer_shapes()}")
        for past, present in engine.pairs:
            if self._addresses[past] != self._addresses[present]:
                raise ContractError(f"{present} is not at the address of {past}")
        shapes = {name: tuple(self.get_tensor_shape(name)) for name in engine.specs}
        if not self.may_run(shapes):
            return False
        by_user = self._strategy == ExecutionContextAllocationStrategy.USER_MANAGED
        if by_user and engine.device_memory_size_v2 and not self._memory[1]:
            raise ContractError("enqueued without device memory, which the user manages")

        addresses, memory = dict(self._addresses), self._memory

        def work():
            if memory[1]:
                engine.cuda.view(*memory)[:] = POISON  # the engine writes what it likes into it
            engine.compute(shapes, addresses)

        engine.cuda._put(work)
        return True


class EngineDouble:
    """ICudaEngine of one bundle, with the profiles of the engine record."""

    device_memory_size_v2 = 1 << 12

    def __init__(self, bundle: Bundle, record: EngineRecord, cuda: CudaDouble, stepper: Stepper):
        contract = bundle.manifest.contract
        self.cuda, self.capacity, self._record, self._stepper = cuda, record.cache_capacity, record, stepper
        self.specs = {spec.name: spec for spec in (*contract.inputs, *contract.outputs)}
        self.input_names = [spec.name for spec in contract.inputs]
        self.pairs = contract.cache_pairs
        self.contract = contract
        self.num_io_tensors = len(self.specs)
        self.num_optimization_profiles = len(record.profiles)

    def get_tensor_name(self, index):
        return list(self.specs)[index]

    def get_tensor_mode(self, name):
        return TensorIOMode.INPUT if name in self.input_names else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name):
        return _dtype(self.specs[name].dtype)

    def get_tensor_profile_shape(self, name, index):
        r = self._record.profiles[index]["ranges"][name]
        return [tuple(r["min"]), tuple(r["opt"]), tuple(r["max"])]

    def get_aliased_input_tensor(self, name):
        return {present: past for past, present in self.pairs}.get(name, "")

    def create_execution_context(self, strategy="STATIC"):
        return ContextDouble(self, strategy)

    def _array(self, name, shapes, addresses) -> np.ndarray:
        dtype = numpy_dtype(self.specs[name].dtype)
        n_bytes = int(np.prod(shapes[name])) * dtype.itemsize
        return self.cuda.view(addresses[name], n_bytes).view(dtype).reshape(shapes[name])

    def compute(self, shapes, addresses):
        """Runs the step in device memory."""
        for spec in self.contract.step_outputs:
            self._array(spec.name, shapes, addresses).view(np.uint8)[...] = POISON
        feeds = {spec.name: self._array(spec.name, shapes, addresses).copy() for spec in self.contract.step_inputs}
        cache = HostCache.__new__(HostCache)
        cache.arrays = [self._array(past, shapes, addresses) for past, _ in self.pairs]
        cache.n_rows, cache.capacity = shapes["position_ids"][0], self.capacity
        for name, array in self._stepper.run(feeds, cache).items():
            self._array(name, shapes, addresses)[...] = array


class ExecutionContextAllocationStrategy:
    STATIC, ON_PROFILE_CHANGE, USER_MANAGED = "STATIC", "ON_PROFILE_CHANGE", "USER_MANAGED"


class TensorIOMode:
    INPUT, OUTPUT = "INPUT", "OUTPUT"


class ILogger:
    ERROR, WARNING = 1, 2


def tensorrt_double(
    bundle: Bundle,
    record: EngineRecord,
    cuda: CudaDouble,
    stepper: Stepper | None = None,
    engine_type: type[EngineDouble] = EngineDouble,
) -> types.SimpleNamespace:
    """A double of the `tensorrt` module. Its runtime loads only the engine of this bundle.

    `stepper` computes the steps of the engine; the default is the eager stepper. `engine_type` is the kind of engine.
    """
    stepper = stepper or EagerStepper.from_bundle(bundle)

    class Runtime:
        engine_host_code_allowed = False

        def __init__(self, logger):
            self._logger = logger

        def deserialize_cuda_engine(self, data):
            if data != ENGINE:
                self._logger.log(ILogger.ERROR, "not this engine")
                return None
            if record.options["version_compatible"] and not self.engine_host_code_allowed:
                self._logger.log(ILogger.ERROR, "the plan has host code, and engine_host_code_allowed is off")
                return None
            return engine_type(bundle, record, cuda, stepper)

    return types.SimpleNamespace(
        __version__=record.version,
        ILogger=ILogger,
        Runtime=Runtime,
        TensorIOMode=TensorIOMode,
        ExecutionContextAllocationStrategy=ExecutionContextAllocationStrategy,
    )


def engine_record(
    bundle: Bundle, capacity: int, max_batch: int = 4, max_seq_len: int = 16, backend: str = "tensorrt"
) -> EngineRecord:
    """The record that a build writes for an engine of this bundle."""
    axes = {
        spec.name: tuple(capacity if axis == "cache_capacity" else axis for axis in spec.axes)
        for spec in bundle.manifest.contract.inputs
    }
    profiles = [profile.to_dict() for profile in default_profiles(axes, max_batch, max_seq_len, capacity)]
    return EngineRecord(
        file="model.engine",
        size_bytes=len(ENGINE),
        sha256="0" * 64,
        graph_file="model.onnx",
        backend=backend,
        version="10.15.0",
        compute_capability=None,
        portability="anywhere",
        profiles=profiles,
        cache_capacity=capacity,
        dtypes={},
        lineage=bundle.lineage,
        options=BuildOptions().to_dict(),
        build_seconds=0.0,
        peak_memory_bytes=0,
    )


def double_session(bundle: Bundle, max_batch: int = 4, cache_capacity: int = 64) -> DecodeSession:
    """A session on the TensorRT backend with the doubles. The bundle's folder does not change."""
    folder, cuda = Path(tempfile.mkdtemp(prefix="engine-double-")), CudaDouble()
    try:
        (folder / "model.engine").write_bytes(ENGINE)
        record = engine_record(bundle, cache_capacity, max_batch, cache_capacity)
        stepper = TensorRTStepper(Bundle(folder, bundle.manifest), record, tensorrt_double(bundle, record, cuda), cuda)
    finally:
        shutil.rmtree(folder)
    return DecodeSession(bundle, stepper, max_batch, cache_capacity)
