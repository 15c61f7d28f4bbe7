"""Build options, named as in trtexec: checked before a build, then set on a builder config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.library.backend import Backend
from engines.library.gpu import Gpu
from exporter.common.errors import BackendError, InputError
from exporter.common.plain_numbers import is_whole, make_plain
from exporter.spec.catalogue import LARGEST_COUNT, short

HARDWARE_COMPATIBILITY = ("none", "ampere_plus", "same_compute_capability")
PROFILING_VERBOSITY = ("layer_names_only", "none", "detailed")
SWITCHES = ("version_compatible", "strip_plan", "refit", "tf32")
HIGHEST_LEVEL = 5  # of the builder optimization


@dataclass(frozen=True)
class BuildOptions:
    """The options of a build, such as trtexec's --memPoolSize, --builderOptimizationLevel and --timingCacheFile.

    Attributes:
        workspace_mib: limit of the workspace pool in MiB; None keeps TensorRT's default.
        builder_optimization_level: 0 to 5; None keeps TensorRT's default.
        timing_cache: file with kernel timings to read and update; a damaged file is replaced.
        version_compatible: whether the engine runs on later versions too. It then holds code for the CPU, which a
            session runs only with allow_host_code.
        hardware_compatibility: which other GPUs the engine runs on, one of `HARDWARE_COMPATIBILITY`.
        strip_plan: whether to leave the weights out; a refit puts them in before use.
        refit: whether the weights can be replaced later.
        profiling_verbosity: what the engine says about its layers, one of `PROFILING_VERBOSITY`.
        tf32: whether float32 matrix products may use TF32. The engine's record has the value in both cases.

    Raises:
        InputError: a value is out of range; the message has the option and the allowed values.
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
        make_plain(self, "workspace_mib", "builder_optimization_level", *SWITCHES)
        for name, low, high in (("workspace_mib", 1, LARGEST_COUNT), ("builder_optimization_level", 0, HIGHEST_LEVEL)):
            value = getattr(self, name)
            if value is not None and not (is_whole(value) and low <= value <= high):
                raise InputError(f"{name}: got {short(value)}, expected {low} to {high:,}")
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name}: got {short(getattr(self, name))}, expected True or False")
        if self.timing_cache is not None:
            object.__setattr__(self, "timing_cache", Path(self.timing_cache))
        for name, allowed in (
            ("hardware_compatibility", HARDWARE_COMPATIBILITY),
            ("profiling_verbosity", PROFILING_VERBOSITY),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise InputError(f"{name}: got {value!r}, expected one of {', '.join(allowed)}")

    def to_dict(self) -> dict:
        """The options for the engine's record. For the timing cache it only has whether there was one."""
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
    """Checks that a backend supports the options here, before the build.

    Raises:
        BackendError: it does not; the message has the option, the backend and what to do instead.
    """
    if not backend.is_rtx:
        if not gpus:
            problem = "it builds for the GPU of this machine, and none is visible"
            raise BackendError(f"{backend}: {problem}; use backend=tensorrt-rtx")
        if options.version_compatible and (options.refit or options.strip_plan):
            name = "refit=True" if options.refit else "strip_plan"
            problem = f"version_compatible with {name}: {backend} does not refit version-compatible engines"
            raise BackendError(f"{problem}; leave one of them out")
        return
    leave_out, problem = "leave the option out", ""
    if options.timing_cache is not None:
        problem = f"timing_cache: {backend} has no timing cache, its functions for one do nothing; {leave_out}"
    elif options.version_compatible:
        problem = (
            f"version_compatible: {backend} lacks the lean runtime that such an engine needs; use backend=tensorrt"
        )
    elif options.hardware_compatibility != "none":
        always = "its engines always run on Ampere and newer RTX GPUs"
        problem = f"hardware_compatibility: {backend} ignores it, {always}; {leave_out}"
    elif not gpus and (options.strip_plan or options.refit):
        name = "strip_plan" if options.strip_plan else "refit=True"
        problem = f"{name}: {backend} needs a GPU to build such an engine, and none is visible; {leave_out}"
    if problem:
        raise BackendError(problem)


def apply_options(options: BuildOptions, trt: Any, config: Any) -> None:
    """Sets the options on an IBuilderConfig, except the timing cache, which `engines.building.timing_cache` sets."""
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
