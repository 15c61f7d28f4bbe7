"""Which stepper a session runs on: the one asked for or an error, never a quiet substitute."""

from __future__ import annotations

from collections.abc import Sequence

from exporter.bundle import ENGINES_FILE, Bundle
from exporter.contract import check_cache_capacity
from exporter.errors import BackendError, InputError
from exporter.memory import available_host_bytes
from exporter.steppers.protocol import Stepper
from runtime.memory import plan_memory

BACKENDS = ("auto", "eager", "onnxruntime", "tensorrt")


def open_stepper(
    bundle: Bundle, backend: str, providers: str | Sequence[str] | None, max_batch: int, cache_capacity: int | None
) -> tuple[Stepper, int]:
    """The stepper for a session and the cache capacity to use; what does not fit in memory is refused before it is opened.

    Raises:
        InputError: an unknown backend, providers where they mean nothing, or sizes that do not fit.
        BackendError: the backend or provider is not here or cannot run this bundle.
    """
    if backend not in BACKENDS:
        raise InputError(f"backend: got {backend!r}, expected one of {', '.join(BACKENDS)}")
    names = [providers] if isinstance(providers, str) else providers or []
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise InputError(f"providers: got {providers!r}, expected the name of an onnxruntime execution provider")
    if names and backend in ("eager", "tensorrt"):
        raise InputError(f"providers: got {list(names)} for the {backend} backend, expected none; they belong to onnxruntime")
    if len(names) > 1:
        raise InputError(f"providers: got {list(names)}, expected one; a second one would be a silent fallback")
    if backend == "tensorrt":
        return _open_tensorrt(bundle, max_batch, cache_capacity)
    if backend == "auto" and not names and all((part.folder / ENGINES_FILE).is_file() for part in bundle.parts):
        try:
            return _open_tensorrt(bundle, max_batch, cache_capacity)
        except BackendError:
            pass  # auto takes onnxruntime where TensorRT cannot run; the session's description says so
    manifest = bundle.manifest
    capacity = check_cache_capacity(cache_capacity, manifest.config, manifest.dtype, manifest.max_positions)
    plan_memory(manifest, "eager" if backend == "eager" else "onnxruntime", max_batch, capacity).check(available_host_bytes())
    if backend == "eager":
        from exporter.steppers.eager import EagerStepper

        return EagerStepper.from_bundle(bundle), capacity
    from exporter.steppers.onnxruntime_stepper import OnnxruntimeStepper
    from exporter.steppers.parts_stepper import open_parts

    return open_parts(bundle, lambda part: OnnxruntimeStepper.from_bundle(part, *names)), capacity


def _open_tensorrt(bundle: Bundle, max_batch: int, cache_capacity: int | None) -> tuple[Stepper, int]:
    from engines.cuda import RuntimeCuda
    from engines.tensorrt_parts import find_engines, open_engines

    records = find_engines(bundle, cache_capacity)
    capacity, cuda = records[0].cache_capacity, RuntimeCuda()
    try:
        plan_memory(bundle.manifest, "tensorrt", max_batch, capacity).check(cuda.free_bytes())
        stepper = open_engines(bundle, records, cuda)
        if max_batch > stepper.max_batch:
            stepper.close()
            raise InputError(f"max_batch: got {max_batch}, expected at most {stepper.max_batch}, which engine {records[0].file} was built for")
    except BaseException:
        cuda.close()
        raise
    return stepper, capacity
