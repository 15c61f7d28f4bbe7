"""A double of `cuda.bindings.runtime`, the module of CUDA's runtime functions. It has two devices, and no memory.

It enforces what the documentation of the runtime says about streams, captures and the current device of a thread.
"""

from __future__ import annotations

import collections
import threading
import types

SUCCESS, INVALID_VALUE, INVALID_DEVICE, IMPLICIT, INSUFFICIENT_DRIVER = 0, 1, 101, 906, 35
NAMES = {
    INVALID_VALUE: b"cudaErrorInvalidValue",
    INVALID_DEVICE: b"cudaErrorInvalidDevice",
    IMPLICIT: b"cudaErrorStreamCaptureImplicit",
    INSUFFICIENT_DRIVER: b"cudaErrorInsufficientDriver",
}


class CudartDouble(types.ModuleType):
    """The runtime's functions return a tuple: the error, and then the results.

    Attributes:
        calls: how often each function was called.
        current: the current device of each thread, by its identity; a new thread has device 0.
        fails: name of a function → the error that it returns.
        graphs: handles of graphs, captured or executable, that are not destroyed.
    """

    cudaStreamNonBlocking = 1
    cudaMemcpyKind = types.SimpleNamespace(
        cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2, cudaMemcpyDeviceToDevice=3
    )
    cudaStreamCaptureMode = types.SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)

    def __init__(self, n_devices: int = 2, runtime_version: int = 13000, driver_version: int = 13000) -> None:
        super().__init__("runtime")
        self.calls: collections.Counter[str] = collections.Counter()
        self.current: dict[int, int] = collections.defaultdict(int)
        self.fails: dict[str, int] = {}
        self.graphs: set[int] = set()
        self._n_devices, self._versions = n_devices, (runtime_version, driver_version)
        self._streams: dict[int, tuple[int, int]] = {}  # handle → its device and its flags
        self._handles, self._capturing = iter(range(100, 10_000)), 0

    def _answer(self, name: str, error: int = SUCCESS, *results: object) -> tuple:
        self.calls[name] += 1
        if (
            name not in ("cudaRuntimeGetVersion", "cudaDriverGetVersion")
            and self._versions[0] // 1000 > self._versions[1] // 1000
        ):
            error = INSUFFICIENT_DRIVER
        error = self.fails.get(name, error)
        return (error, *results)

    @property
    def device(self) -> int:
        return self.current[threading.get_ident()]

    def cudaGetErrorName(self, error):
        return SUCCESS, NAMES[error]

    def cudaRuntimeGetVersion(self):
        return self._answer("cudaRuntimeGetVersion", SUCCESS, self._versions[0])

    def cudaDriverGetVersion(self):
        return self._answer("cudaDriverGetVersion", SUCCESS, self._versions[1])

    def cudaSetDevice(self, device):
        good = 0 <= device < self._n_devices
        if good:
            self.current[threading.get_ident()] = device
        return self._answer("cudaSetDevice", SUCCESS if good else INVALID_DEVICE)

    def cudaStreamCreate(self):
        return self.cudaStreamCreateWithFlags(0)

    def cudaStreamCreateWithFlags(self, flags):
        handle = next(self._handles)
        self._streams[handle] = (self.device, flags)
        return self._answer("cudaStreamCreateWithFlags", SUCCESS, handle)

    def cudaStreamBeginCapture(self, stream, mode):
        self._capturing = stream
        return self._answer("cudaStreamBeginCapture", self._of_this_device(stream))

    def cudaStreamEndCapture(self, stream):
        handle, self._capturing = next(self._handles), 0
        self.graphs.add(handle)
        return self._answer("cudaStreamEndCapture", SUCCESS, handle)

    def default_stream_work(self) -> int:
        """Another library's work on the default stream. It fails while a stream that waits for it is captured."""
        blocking = self._capturing and self._streams[self._capturing][1] != self.cudaStreamNonBlocking
        return IMPLICIT if blocking else SUCCESS

    def cudaGraphInstantiate(self, graph, flags):
        answer = self._answer("cudaGraphInstantiate", SUCCESS, next(self._handles))
        if answer[0] == SUCCESS:
            self.graphs.add(answer[1])
        return answer

    def cudaGraphDestroy(self, graph):
        self.graphs.remove(graph)
        return self._answer("cudaGraphDestroy")

    def cudaGraphExecDestroy(self, graph):
        self.graphs.remove(graph)
        return self._answer("cudaGraphExecDestroy")

    def cudaMalloc(self, n_bytes):
        return self._answer("cudaMalloc", SUCCESS, (self.device << 32) + (next(self._handles) << 8))

    def cudaFree(self, address):
        return self._answer("cudaFree")

    def cudaMemsetAsync(self, address, value, n_bytes, stream):
        error = self._of_this_device(stream)
        return self._answer("cudaMemsetAsync", error if address >> 32 == self.device else INVALID_VALUE)

    def cudaStreamSynchronize(self, stream):
        return self._answer("cudaStreamSynchronize", self._of_this_device(stream))

    def cudaStreamDestroy(self, stream):
        del self._streams[stream]
        return self._answer("cudaStreamDestroy")

    def _of_this_device(self, stream) -> int:
        return SUCCESS if self._streams[stream][0] == self.device else INVALID_VALUE
