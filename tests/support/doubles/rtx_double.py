"""A double of TensorRT-RTX, which compiles kernels while it runs and records CUDA graphs itself."""

from __future__ import annotations

import types

from exporter.bundle.bundle import Bundle
from exporter.bundle.engine_records import EngineRecord
from tests.support.doubles.cuda_double import ContextDouble, ContractError, CudaDouble, EngineDouble, tensorrt_double


class CudaGraphStrategy:
    DISABLED, WHOLE_GRAPH_CAPTURE = "DISABLED", "WHOLE_GRAPH_CAPTURE"


class RuntimeCacheDouble:
    """IRuntimeCache: the shapes whose kernels are compiled. It loads only what the same version has written."""

    def __init__(self, version: str) -> None:
        self.version, self.shapes = version, set()

    def serialize(self) -> bytes:
        return repr((self.version, sorted(self.shapes))).encode()

    def deserialize(self, blob: bytes) -> bool:
        version, shapes = eval(blob.decode())
        if version != self.version:
            return False
        self.shapes |= set(shapes)
        return True


class RuntimeConfigDouble:
    """IRuntimeConfig."""

    def __init__(self, version: str) -> None:
        self.cuda_graph_strategy, self.cache, self._version = CudaGraphStrategy.DISABLED, None, version
        self.strategy = "STATIC"

    def set_execution_context_allocation_strategy(self, strategy: str) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> RuntimeCacheDouble:
        return RuntimeCacheDouble(self._version)

    def set_runtime_cache(self, cache: RuntimeCacheDouble) -> bool:
        self.cache = cache
        return True


class RtxContextDouble(ContextDouble):
    """A context that compiles kernels at its first step with new shapes. No capture by hand may include that."""

    def __init__(self, engine: RtxEngineDouble, config: RuntimeConfigDouble | None) -> None:
        self._config, self._recorded = config or RuntimeConfigDouble(""), None
        super().__init__(engine, self._config.strategy)

    def is_stream_capturable(self, stream: int) -> bool:
        return False  # kernels are specialized lazily, and the inputs are dynamic

    def may_run(self, shapes) -> bool:
        if self._engine.cuda.capturing:
            return False
        if self._config.cache is not None and (key := repr(sorted(shapes.items()))) not in self._config.cache.shapes:
            self._config.cache.shapes.add(key)
            self._engine.compiled += 1
        if self._config.cuda_graph_strategy == CudaGraphStrategy.WHOLE_GRAPH_CAPTURE:
            frozen = (shapes, dict(self._addresses))
            self._engine.recorded += frozen != self._recorded
            self._engine.replayed += frozen == self._recorded
            self._recorded = frozen
        return True


class RtxEngineDouble(EngineDouble):
    """ICudaEngine.

    Attributes:
        recorded, replayed: steps that contexts recorded as graphs, and graphs that they replayed.
        compiled: shapes that kernels were compiled for.
        caches: the runtime caches that contexts have.
    """

    latest: RtxEngineDouble

    def __init__(self, bundle: Bundle, record: EngineRecord, cuda: CudaDouble, stepper) -> None:
        super().__init__(bundle, record, cuda, stepper)
        self.recorded = self.replayed = self.compiled = 0
        self.caches: list[RuntimeCacheDouble] = []
        self._version = record.version
        RtxEngineDouble.latest = self

    def create_runtime_config(self) -> RuntimeConfigDouble:
        return RuntimeConfigDouble(self._version)

    def create_execution_context(self, config: RuntimeConfigDouble | str | None = None) -> RtxContextDouble:
        if isinstance(config, str):
            alone = RuntimeConfigDouble("")
            alone.strategy = config
            return RtxContextDouble(self, alone)
        if config is not None and config.cache is None:
            raise ContractError("a context without the shared runtime cache compiles every kernel again")
        if config is not None and not any(cache is config.cache for cache in self.caches):
            self.caches.append(config.cache)
        return RtxContextDouble(self, config)


def rtx_double(bundle: Bundle, record: EngineRecord, cuda: CudaDouble) -> types.SimpleNamespace:
    """A double of the `tensorrt_rtx` module."""
    double = tensorrt_double(bundle, record, cuda, engine_type=RtxEngineDouble)
    double.CudaGraphStrategy = CudaGraphStrategy
    return double
