"""Compiles a prepared network: makes TensorRT's builder config, and streams the engine into a file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from engines.building.preparation import PreparedNetwork
from engines.building.progress import BuildProgress
from engines.building.timing_cache import load_timing_cache, save_timing_cache
from engines.network.build_options import BuildOptions, apply_options
from engines.network.parsed import ParsedNetwork
from engines.network.profiles import Profile
from exporter.common.errors import CheckFailed


def compile_network(
    prepared: PreparedNetwork, options: BuildOptions, path: Path, say: Callable[[str], None]
) -> tuple[str, int]:
    """Compiles a network into an engine file, and updates the timing cache.

    Returns:
        SHA-256 and size in bytes of the file.

    Raises:
        CheckFailed: TensorRT failed; the message has its reason.
        OSError: the engine cannot be written.
        InputError: the timing cache cannot be written.
        KeyboardInterrupt: a signal stopped the build.
    """
    parsed = prepared.parsed
    config = parsed.builder.create_builder_config()
    apply_options(options, parsed.backend.trt, config)
    if options.timing_cache is not None:
        load_timing_cache(options.timing_cache, config, say)
    for profile in prepared.profiles:
        _add_profile(parsed, config, profile)
    checksum, size_bytes = _write_engine(parsed, config, path)
    if options.timing_cache is not None:
        save_timing_cache(options.timing_cache, config)
    return checksum, size_bytes


def _add_profile(parsed: ParsedNetwork, config: Any, profile: Profile) -> None:
    subject, optimization = f"profile {profile.name}", parsed.builder.create_optimization_profile()
    for name, r in profile.ranges.items():
        try:
            optimization.set_shape(name, r.min, r.opt, r.max)
        except RuntimeError as error:
            raise CheckFailed(f"{subject}: {parsed.backend} refuses the shapes of {name}: {error}") from None
    if config.add_optimization_profile(optimization) < 0:
        raise CheckFailed(f"{subject}: {parsed.backend} refuses it: {parsed.logger.reason()}")


def _write_engine(parsed: ParsedNetwork, config: Any, path: Path) -> tuple[str, int]:
    """Builds the engine and streams it into a file; returns its SHA-256 and its size in bytes."""
    trt = parsed.backend.trt
    with open(path, "wb") as file, BuildProgress(trt) as progress:
        config.progress_monitor = progress.monitor
        writer = _file_writer(trt, file)  # must live until the build has ended
        good = parsed.builder.build_serialized_network_to_stream(parsed.network, config, writer)
    progress.raise_if_interrupted()
    if writer.error is not None:
        raise writer.error
    if not good or writer.size_bytes == 0:
        raise CheckFailed(f"build: {parsed.backend} failed: {parsed.logger.reason()}")
    return writer.digest.hexdigest(), writer.size_bytes


def _file_writer(trt: Any, file: BinaryIO) -> Any:
    """Returns an `IStreamWriter` that writes into a file, and counts and hashes the bytes."""

    class FileWriter(trt.IStreamWriter):
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.digest, self.size_bytes = hashlib.sha256(), 0
            self.error: OSError | None = None

        def write(self, data: Any) -> int:
            view = memoryview(data).cast("B")
            try:
                file.write(view)
            except OSError as error:  # TensorRT would crash on an exception; a short count stops it
                self.error = error
                return 0
            self.digest.update(view)
            self.size_bytes += len(view)
            return len(view)

    return FileWriter()
