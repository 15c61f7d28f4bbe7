"""The CUDA calls that decoding needs, behind one small interface: memory, copies, a stream, graphs.

`RuntimeCuda` makes the calls through cuda-python. Tests use a strict double instead. With it, the code of the TensorRT
stepper runs on machines without a GPU.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from engines.library.backend import INSTALL
from exporter.common.errors import BackendError

ALIGNMENT_BYTES = 256
CUDA_12_INSTALL = "pip install 'blockline[tensorrt-cu12]'"


class CudaError(RuntimeError):
    """A CUDA call failed; the message has the call and the driver's reason."""


class Cuda(ABC):
    """One device and one stream. Addresses are integers. Copies and fills are queued on the stream, in order.

    The current device belongs to a thread, and any library may change it. Every call but `use_device` needs this device
    as the current one.

    Attributes:
        stream: handle of the stream, for TensorRT.
        device: index of the device.
    """

    stream: int
    device: int

    @abstractmethod
    def use_device(self) -> None:
        """Makes the device the current one of this thread. What a caller may call begins with this, once."""

    @abstractmethod
    def allocate(self, n_bytes: int) -> int:
        """Allocates zeroed device memory, aligned to 256 bytes; returns its address."""

    @abstractmethod
    def free(self, address: int) -> None:
        """Frees memory."""

    @abstractmethod
    def upload(self, address: int, array: np.ndarray) -> None:
        """Queues a copy of a contiguous host array to the device; the array must live until `synchronize`."""

    @abstractmethod
    def download(self, array: np.ndarray, address: int) -> None:
        """Queues a copy from the device into a contiguous host array."""

    @abstractmethod
    def zero(self, address: int, pitch: int, width: int, height: int) -> None:
        """Queues zeros into `height` runs of `width` bytes, `pitch` bytes apart."""

    @abstractmethod
    def copy(self, destination: int, source: int, pitch: int, width: int, height: int) -> None:
        """Queues a copy on the device of `height` runs of `width` bytes, `pitch` bytes apart on both sides."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until the stream is done; raises `CudaError` where something on it failed."""

    @abstractmethod
    def capture(self, work: Callable[[], None]) -> Any:
        """Records what `work` queues, without running it; returns the recorded graph for `launch`.

        The recording ends in every case, also when an interrupt arrives. Therefore this is a function and not a context
        manager: an interrupt between the entry of a context manager and its block would leave the recording open.
        """

    @abstractmethod
    def launch(self, graph: Any) -> None:
        """Queues a recorded graph."""

    @abstractmethod
    def destroy_graph(self, graph: Any) -> None:
        """Frees a recorded graph."""

    @abstractmethod
    def free_bytes(self) -> int:
        """The number of free bytes of device memory."""

    @abstractmethod
    def close(self) -> None:
        """Destroys the stream. A second call does nothing, because the engines of one unit share a stream."""


class _Graph:
    """A recorded graph. Its executable handle is set when the capture has ended."""

    executable: Any = None


class RuntimeCuda(Cuda):
    """The CUDA runtime, called through cuda-python.

    Raises:
        BackendError: cuda-python is not installed, or there is no usable device.
    """

    def __init__(self, device: int = 0) -> None:
        """Makes a stream. It does not wait for the default stream, whose work would make a capture fail.

        Args:
            device: index of the device.
        """
        try:
            from cuda.bindings import runtime
        except ImportError:
            raise BackendError(f"backend tensorrt: cuda-python is not installed; run {INSTALL['tensorrt']}") from None
        self._runtime, self.device = runtime, device
        try:
            self.use_device()
            self.stream = int(self._call("cudaStreamCreateWithFlags", runtime.cudaStreamNonBlocking))
        except CudaError as error:
            raise BackendError(f"backend tensorrt: no usable GPU ({self._old_driver() or error})") from None

    def _old_driver(self) -> str | None:
        """Returns a message where the driver is too old for the installed CUDA, else None."""
        needed, known = (self._call(f"cuda{name}GetVersion") for name in ("Runtime", "Driver"))
        if known == 0 or known // 1000 >= needed // 1000:  # 0: there is no driver
            return None
        needs, knows = (f"{version // 1000}.{version % 1000 // 10}" for version in (needed, known))
        problem = f"the driver knows CUDA {knows} at most, and the installed libraries need CUDA {needs}"
        return f"{problem}; update the driver, or run {CUDA_12_INSTALL}"

    def use_device(self) -> None:
        self._call("cudaSetDevice", self.device)

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *results = getattr(self._runtime, name)(*arguments)
        if int(error) != 0:
            raise CudaError(f"{name}: {self._runtime.cudaGetErrorName(error)[1].decode()}")
        return results[0] if len(results) == 1 else results

    def allocate(self, n_bytes: int) -> int:
        address = int(self._call("cudaMalloc", n_bytes))
        try:
            self._call("cudaMemsetAsync", address, 0, n_bytes, self.stream)
        except BaseException:
            self.free(address)
            raise
        return address

    def free(self, address: int) -> None:
        self._call("cudaFree", address)

    def upload(self, address: int, array: np.ndarray) -> None:
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call("cudaMemcpyAsync", address, array.ctypes.data, array.nbytes, kind, self.stream)

    def download(self, array: np.ndarray, address: int) -> None:
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._call("cudaMemcpyAsync", array.ctypes.data, address, array.nbytes, kind, self.stream)

    def zero(self, address: int, pitch: int, width: int, height: int) -> None:
        self._call("cudaMemset2DAsync", address, pitch, 0, width, height, self.stream)

    def copy(self, destination: int, source: int, pitch: int, width: int, height: int) -> None:
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        self._call("cudaMemcpy2DAsync", destination, pitch, source, pitch, width, height, kind, self.stream)

    def synchronize(self) -> None:
        self._call("cudaStreamSynchronize", self.stream)

    def capture(self, work: Callable[[], None]) -> _Graph:
        """Records what `work` queues on the stream, without running it. After an error the stream is as before."""
        graph, mode = _Graph(), self._runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        try:
            self._call("cudaStreamBeginCapture", self.stream, mode)
            work()
        except BaseException:
            with contextlib.suppress(CudaError):  # the capture may not have begun, or may be invalid
                self._call("cudaGraphDestroy", self._call("cudaStreamEndCapture", self.stream))
            raise
        captured = self._call("cudaStreamEndCapture", self.stream)
        try:
            graph.executable = self._call("cudaGraphInstantiate", captured, 0)
        finally:
            self._call("cudaGraphDestroy", captured)
        return graph

    def launch(self, graph: _Graph) -> None:
        self._call("cudaGraphLaunch", graph.executable, self.stream)

    def destroy_graph(self, graph: _Graph) -> None:
        self._call("cudaGraphExecDestroy", graph.executable)

    def free_bytes(self) -> int:
        return int(self._call("cudaMemGetInfo")[0])

    def close(self) -> None:
        stream, self.stream = self.stream, 0
        if stream:
            self._call("cudaStreamDestroy", stream)
