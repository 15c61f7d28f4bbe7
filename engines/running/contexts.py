"""Makes the execution contexts of an engine, in the way that its TensorRT replays steps."""

from __future__ import annotations

from typing import Any

from engines.library.cuda import Cuda
from engines.running.device_cache import free_all
from engines.running.runtime_cache import RuntimeCacheFile
from exporter.common.errors import BackendError


class Contexts:
    """Makes the execution contexts of one engine.

    TensorRT-RTX compiles kernels while it runs, and records CUDA graphs itself once they are compiled. A capture by
    hand fails there. So its contexts get a runtime configuration: a strategy for graphs, and one cache of compiled
    kernels that all of them share. TensorRT has neither.

    All contexts compute in one device buffer, because one stream runs them one after another. Otherwise each of them
    reserves the memory of the largest prefill.

    Attributes:
        captures_itself: whether a context of `new(repeated=True)` records and replays its step itself.
    """

    def __init__(
        self, subject: str, trt: Any, engine: Any, cuda: Cuda, logger: Any, cache_file: RuntimeCacheFile | None
    ) -> None:
        """Prepares the making of contexts.

        Args:
            subject: the backend and the engine, for messages.
            trt: the module of TensorRT or TensorRT-RTX.
            engine: the engine.
            cuda: the CUDA calls, with the stream of the engine.
            logger: the logger of the runtime that loaded the engine.
            cache_file: the file of the runtime cache; None for TensorRT, which has none.
        """
        self._subject, self._trt, self._engine, self._cuda, self._logger = subject, trt, engine, cuda, logger
        self._cache_file, self._cache = cache_file, None
        self.captures_itself = cache_file is not None
        if cache_file is not None:
            self._cache = engine.create_runtime_config().create_runtime_cache()
            cache_file.load(self._cache)
        self._size = int(engine.device_memory_size_v2)
        self._buffer = [cuda.allocate(self._size)] if self._size else []

    def new(self, profile: int, repeated: bool = False) -> Any:
        """Returns a new context for a profile.

        Args:
            profile: index of the optimization profile.
            repeated: whether the context runs one step again and again, with the same shapes and addresses.

        Raises:
            BackendError: TensorRT does not make one; the message has its reason.
        """
        context = self._create(repeated)
        if context is None:
            raise BackendError(f"{self._subject}: it cannot create an execution context: {self._logger.reason()}")
        if self._buffer:
            context.set_device_memory(self._buffer[0], self._size)
        if not context.set_optimization_profile_async(profile, self._cuda.stream):
            raise BackendError(f"{self._subject}: it refuses profile {profile}: {self._logger.reason()}")
        self._cuda.synchronize()
        return context

    def _create(self, repeated: bool) -> Any:
        by_us = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if not self.captures_itself:
            return self._engine.create_execution_context(by_us)
        config, strategy = self._engine.create_runtime_config(), self._trt.CudaGraphStrategy
        config.set_execution_context_allocation_strategy(by_us)
        config.cuda_graph_strategy = strategy.WHOLE_GRAPH_CAPTURE if repeated else strategy.DISABLED
        if not config.set_runtime_cache(self._cache):
            raise BackendError(f"{self._subject}: it refuses the runtime cache: {self._logger.reason()}")
        return self._engine.create_execution_context(config)

    def close(self) -> None:
        """Saves the compiled kernels, so that the next session need not compile them, and frees the buffer."""
        free_all(self._cuda, self._buffer)
        if self._cache_file is not None:
            self._cache_file.save(self._cache)
