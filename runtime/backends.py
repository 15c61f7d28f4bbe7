"""Opens the stepper that a session runs on. A backend that cannot run is an error, never replaced silently."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from exporter.bundle.bundle import ENGINES_FILE, Bundle
from exporter.bundle.manifest import Manifest
from exporter.common.errors import BackendError, InputError
from exporter.common.memory import available_host_bytes
from exporter.common.plain_numbers import is_whole, plain
from exporter.spec.limits import check_cache_capacity
from exporter.steppers.protocol import Stepper
from runtime.policy.memory_estimate import estimate_memory

log = logging.getLogger(__name__)

MOST_THREADS = 1024
BACKENDS = ("auto", "eager", "onnxruntime", "tensorrt")


def open_stepper(
    bundle: Bundle,
    backend: str,
    providers: str | Sequence[str] | None,
    max_batch: int,
    cache_capacity: int | None,
    verify: str = "graph",
    allow_host_code: bool = False,
    threads: int | None = None,
) -> tuple[Stepper, int]:
    """Opens a stepper, after checking that the session fits in memory. The arguments are those of `DecodeSession.open`.

    Returns:
        The stepper, and the cache capacity to use.

    Raises:
        InputError: an unknown backend, providers or threads for a backend without any, or sizes that do not fit.
        BackendError: the backend or provider is not installed or cannot run this bundle.
    """
    if backend not in BACKENDS:
        raise InputError(f"backend: got {backend!r}, expected one of {', '.join(BACKENDS)}")
    names = [providers] if isinstance(providers, str) else [] if providers is None else providers
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise InputError(f"providers: got {providers!r}, expected the name of an onnxruntime execution provider")
    if names and backend in ("eager", "tensorrt"):
        raise InputError(
            f"providers: got {list(names)} for the {backend} backend, expected none; only onnxruntime has providers"
        )
    if len(names) > 1:
        raise InputError(f"providers: got {list(names)}, expected one; a second one would be a silent fallback")
    threads = plain(threads)
    if threads is not None:
        _check_threads(threads, backend)
    if backend == "tensorrt":
        return _open_tensorrt(bundle, max_batch, cache_capacity, verify, allow_host_code)
    asked = [f"provider {name}" for name in names] + ([f"{threads} threads"] if threads is not None else [])
    if backend == "auto" and not asked and all((part.folder / ENGINES_FILE).is_file() for part in bundle.parts):
        try:
            return _open_tensorrt(bundle, max_batch, cache_capacity, verify, allow_host_code)
        except BackendError as error:
            log.info("auto takes onnxruntime: %s", error)
    elif backend == "auto":
        reason = f"{' and '.join(asked)} asked for, and only it has them" if asked else "the bundle has no engines"
        log.info("auto takes onnxruntime: %s", reason)
    manifest, name = bundle.manifest, "eager" if backend == "eager" else "onnxruntime"
    capacity = check_cache_capacity(cache_capacity, manifest.config, manifest.dtype, manifest.max_positions)
    _check_memory(manifest, name, max_batch, capacity, available_host_bytes())
    if name == "eager":
        from exporter.steppers.eager_stepper import EagerStepper

        return EagerStepper.from_bundle(bundle), capacity
    from exporter.steppers.onnxruntime_stepper import OnnxruntimeStepper
    from exporter.steppers.parts_stepper import open_parts

    provider = names[0] if names else None
    return open_parts(bundle, lambda part: OnnxruntimeStepper.from_bundle(part, provider, threads=threads)), capacity


def _check_threads(threads: int, backend: str) -> None:
    if not is_whole(threads) or not 1 <= threads <= MOST_THREADS:
        raise InputError(f"threads: got {threads!r}, expected a whole number from 1 to {MOST_THREADS}")
    if backend in ("eager", "tensorrt"):
        raise InputError(
            f"threads: got {threads} for the {backend} backend, expected none; they are onnxruntime's; "
            "torch has torch.set_num_threads"
        )


def _check_memory(manifest: Manifest, backend: str, max_batch: int, capacity: int, free_bytes: int) -> None:
    estimate = estimate_memory(manifest, backend, max_batch, capacity)
    parts = (estimate.weights_bytes, estimate.cache_bytes, estimate.activations_bytes, free_bytes)
    mib = [n_bytes / 2**20 for n_bytes in parts]
    log.info("%s needs weights of %.1f MiB, a cache of %.1f, activations of about %.1f; %.1f are free", backend, *mib)
    estimate.check(free_bytes)


def _open_tensorrt(
    bundle: Bundle, max_batch: int, cache_capacity: int | None, verify: str, allow_host_code: bool
) -> tuple[Stepper, int]:
    from engines.library.cuda import RuntimeCuda
    from engines.running.tensorrt_parts import find_engines, open_engines

    records = find_engines(bundle, cache_capacity, verify, allow_host_code)
    capacity, cuda = records[0].decode_capacity(), RuntimeCuda()
    try:
        _check_memory(bundle.manifest, "tensorrt", max_batch, capacity, cuda.free_bytes())
        stepper = open_engines(bundle, records, cuda)
        if max_batch > stepper.max_batch:
            stepper.close()
            raise InputError(
                f"max_batch: got {max_batch}, expected at most {stepper.max_batch}, "
                f"which engine {records[0].file} was built for"
            )
    except BaseException:
        cuda.close()
        raise
    return stepper, capacity
