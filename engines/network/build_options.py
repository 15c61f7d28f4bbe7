"""Build options that users of trtexec know: checked by name before a build, then set on a builder config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.library.backend import Backend
from engines.library.gpu import Gpu
from exporter.common.errors import BackendError, InputError
from exporter.spec.catalogue import LARGEST_COUNT, short

HARDWARE_COMPATIBILITY = ("none", "ampere_plus", "same_compute_capability")
PROFILING_VERBOSITY = ("layer_names_only", "none", "detailed")


@dataclass(frozen=True)
class BuildOptions:
    """What trtexec calls --memPoolSize, --builderOptimizationLevel, --timingCacheFile and so on.

    Attributes:
        workspace_mib: limit of the workspace pool in MiB; None leaves TensorRT's own.
        builder_optimization_level: 0 to 5; None leaves TensorRT's own.
        timing_cache: file to read and update; a damaged one is replaced.
        version_compatible: the engine runs on later versions too.
        hardware_compatibility: which other GPUs the engine runs on.
        strip_plan: leave the weights out; refit them before use.
        refit: weights can be replaced later.
        profiling_verbosity: what the engine tells of its layers.
        tf32: allow float32 matrix products in TF32; off by default, and stated in the engine's record either way.
    """

    workspace_mib: int | None = None
    builder_optimization_level: int | None = None
    timing_cache: Path | None = None
    version_compatible: bool = False
    hardware_compatibility: str = "none"
    strip_plan: bool = False
    refit: bool = False
    profiling_verbosity: str = "layer_names_only"
    tf32: bool = False

    def __post_init__(self) -> None:
        if self.workspace_mib is not None and not 1 <= self.workspace_mib <= LARGEST_COUNT:
            raise InputError(f"workspace: got {short(self.workspace_mib)} MiB, expected 1 to {LARGEST_COUNT:,}")
        level = self.builder_optimization_level
        if level is not None and not 0 <= level <= 5:
            raise InputError(f"builder-optimization-level: got {level}, expected 0 to 5")
        if self.hardware_compatibility not in HARDWARE_COMPATIBILITY:
            raise InputError(
                f"hardware-compatibility: got {self.hardware_compatibility!r}, expected one of {', '.join(HARDWARE_COMPATIBILITY)}"
            )
        if self.profiling_verbosity not in PROFILING_VERBOSITY:
            raise InputError(
                f"profiling-verbosity: got {self.profiling_verbosity!r}, expected one of {', '.join(PROFILING_VERBOSITY)}"
            )

    def to_dict(self) -> dict:
        """For the engine's record; the timing cache only says whether there was one."""
        return {
            "workspace_mib": self.workspace_mib,
            "builder_optimization_level": self.builder_optimization_level,
            "timing_cache": self.timing_cache is not None,
            "version_compatible": self.version_compatible,
            "hardware_compatibility": self.hardware_compatibility,
            "strip_plan": self.strip_plan,
            "refit": self.refit,
            "profiling_verbosity": self.profiling_verbosity,
            "tf32": self.tf32,
        }


def check_options(options: BuildOptions, backend: Backend, gpus: Sequence[Gpu]) -> None:
    """Refuses, by name and before the build, what a backend cannot honour here.

    Raises:
        BackendError: names the option, the backend and what to do instead.
    """
    if not backend.is_rtx:
        if not gpus:
            raise BackendError(
                f"{backend}: it builds on the GPU it builds for, and none is visible; use --backend tensorrt-rtx"
            )
        return
    if options.timing_cache is not None:
        raise BackendError(
            f"timing-cache: {backend} has none, its timing cache operations do nothing; leave the option out"
        )
    if options.version_compatible:
        raise BackendError(
            f"version-compatible: {backend} comes without the lean runtime that such engines carry; use --backend tensorrt"
        )
    if options.hardware_compatibility != "none":
        raise BackendError(
            f"hardware-compatibility: {backend} ignores it, its engines run on Ampere and newer RTX GPUs anyway; leave the option out"
        )
    for name in ("strip_plan", "refit"):
        if getattr(options, name) and not gpus:
            raise BackendError(
                f"{name.replace('_', '-')}: {backend} needs a GPU to build such an engine, and none is visible; leave the option out"
            )


def apply_options(options: BuildOptions, trt: Any, config: Any) -> None:
    """Sets the options on an IBuilderConfig; the timing cache is handled by the build, which also saves it."""
    flags = {
        "VERSION_COMPATIBLE": options.version_compatible,
        "STRIP_PLAN": options.strip_plan,
        "REFIT": options.refit,
        "TF32": options.tf32,
    }
    for name, wanted in flags.items():
        flag = getattr(trt.BuilderFlag, name)
        if wanted:
            config.set_flag(flag)
        else:
            config.clear_flag(flag)
    if options.workspace_mib is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_mib * 2**20)
    if options.builder_optimization_level is not None:
        config.builder_optimization_level = options.builder_optimization_level
    config.hardware_compatibility_level = getattr(
        trt.HardwareCompatibilityLevel, options.hardware_compatibility.upper()
    )
    config.profiling_verbosity = getattr(trt.ProfilingVerbosity, options.profiling_verbosity.upper())
