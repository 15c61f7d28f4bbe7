"""Compares installed versions with the required ones, and finds packages that do not work together.

Only metadata is read. Nothing that is examined is imported.
"""

from __future__ import annotations

import importlib.metadata
import platform
import tomllib
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from engines.library.gpu import Gpu
from runtime.doctor.findings import FACT, FAILED, GOOD, Finding

DISTRIBUTION = "blockline"
FOR_DEVELOPERS = "test"  # an extra that no command needs
ONNXRUNTIMES = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-directml",
    "onnxruntime-openvino",
    "onnxruntime-qnn",
    "onnxruntime-training",
)
# NVIDIA's support matrix of TensorRT-RTX has RTX GPUs only (7.5, 8.6, 8.9, 12.0, 12.1); these are its data-centre GPUs.
NOT_FOR_RTX = ("8.0", "9.0", "10.0", "10.3")
# Distributions whose name shows which CUDA they are built for. For torch the probe that imports it checks this.
CUDA_OF_NAME = {name: major for major in (11, 12, 13) for name in (f"tensorrt_cu{major}", f"tensorrt_rtx_cu{major}")}


def installed_version(name: str) -> str | None:
    """Returns the version of a distribution, or None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements() -> tuple[str, dict[str, tuple[Requirement, list[str]]]]:
    """Returns the required Python, and each requirement of this platform with the extras that need it.

    They come from pyproject.toml where blockline runs from its sources, else from its installed metadata. The extra ""
    means that every installation needs the requirement.
    """
    python, lines = _from_sources() or _from_metadata()
    found: dict[str, tuple[Requirement, list[str]]] = {}
    for extra, line in lines:
        requirement = Requirement(line)
        if extra != FOR_DEVELOPERS and (requirement.marker is None or requirement.marker.evaluate({"extra": extra})):
            found.setdefault(f"{requirement.name}{requirement.specifier}", (requirement, []))[1].append(extra)
    return python, found


def packages_folder() -> Path:
    """Returns the folder with the three packages: site-packages, or the source tree."""
    return Path(str(resources.files("runtime"))).parent


def _from_sources() -> tuple[str, list[tuple[str, str]]] | None:
    path = packages_folder() / "pyproject.toml"
    project = tomllib.loads(path.read_text(encoding="utf-8")).get("project", {}) if path.is_file() else {}
    if project.get("name") != DISTRIBUTION:
        return None
    extras = project["optional-dependencies"]
    return project["requires-python"], [("", line) for line in project["dependencies"]] + [
        (name, line) for name in extras for line in extras[name]
    ]


def _from_metadata() -> tuple[str, list[tuple[str, str]]]:
    metadata = importlib.metadata.metadata(DISTRIBUTION)
    lines = importlib.metadata.requires(DISTRIBUTION) or []
    extras = ["", *(metadata.get_all("Provides-Extra") or [])]
    return metadata["Requires-Python"], [
        (extra, line) for line in lines for extra in extras if (f'extra == "{extra}"' in line) == bool(extra)
    ]


def version_findings() -> Iterator[Finding]:
    """Checks the versions of Python and of every requirement."""
    python, wanted = requirements()
    good = SpecifierSet(python).contains(platform.python_version())
    detail = f"{platform.python_version()}, expected {python}"
    yield Finding("python", GOOD, detail) if good else Finding("python", FAILED, detail, f"use a Python {python}")
    met = {requirement.name for requirement, _ in wanted.values() if _is_met(requirement)}
    for requirement, extras in wanted.values():
        for_another_cuda = "" not in extras and requirement.name in met and not _is_met(requirement)
        if not for_another_cuda:  # two extras ask for two versions, and one of them is installed
            yield _version_finding(requirement, extras)


def _is_met(requirement: Requirement) -> bool:
    version = installed_version(requirement.name)
    return version is not None and requirement.specifier.contains(Version(version), prereleases=True)


def _version_finding(requirement: Requirement, extras: list[str]) -> Finding:
    name, optional = requirement.name, "" not in extras
    install = f"pip install '{DISTRIBUTION}{f'[{extras[0]}]' if optional else ''}'"
    version = installed_version(name)
    if version is None and name in ONNXRUNTIMES:
        for other in ONNXRUNTIMES:
            found = installed_version(other)
            if found and requirement.specifier.contains(found):
                return Finding(name, GOOD, f"not installed; {other} {found} is in its place")
    if version is None:
        if optional:
            sources = " or ".join(f"{DISTRIBUTION}[{extra}]" for extra in extras)
            return Finding(name, FACT, f"not installed; comes with {sources}")
        return Finding(name, FAILED, f"not installed, expected {requirement.specifier}", install)
    if not requirement.specifier.contains(Version(version), prereleases=True):
        return Finding(name, FAILED, f"{version}, expected {requirement.specifier}", install)
    return Finding(name, GOOD, version)


def conflict_findings(driver_cuda: tuple[int, int] | None, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """Yields a failure for each pair that is installed and does not work together.

    Args:
        driver_cuda: newest CUDA that the driver supports; None without a driver.
        gpus: the visible GPUs.
    """
    several = [name for name in ONNXRUNTIMES if installed_version(name)]
    if len(several) > 1:
        fix = f"pip uninstall -y {' '.join(several)}; pip install '{DISTRIBUTION}'"
        detail = "both installed; they write the same files, and each overwrites files of the other"
        yield Finding(" and ".join(several), FAILED, detail, fix)
    built_for: dict[str, tuple[int, ...]] = {
        name: (major,) for name, major in CUDA_OF_NAME.items() if installed_version(name)
    }
    bindings = installed_version("cuda-bindings")
    if bindings:
        built_for["cuda-bindings"] = Version(bindings).release[:2]
    for name, cuda in built_for.items():
        problem = driver_problem(cuda, driver_cuda)
        if problem and driver_cuda is not None:
            fix = f"update the driver, or install {name} for CUDA {driver_cuda[0]}"
            yield Finding(f"{name} and the driver", FAILED, problem, fix)
    unsupported = [gpu for gpu in gpus if gpu.compute_capability in NOT_FOR_RTX]
    if unsupported and installed_version("tensorrt_rtx") and not installed_version("tensorrt"):
        gpu = unsupported[0]
        detail = (
            "TensorRT-RTX is for RTX GPUs: its engines compile here and do not run on "
            f"{gpu.name}, compute capability {gpu.compute_capability}"
        )
        yield Finding("tensorrt-rtx and the GPU", FAILED, detail, f"pip install '{DISTRIBUTION}[tensorrt]'")


def driver_problem(built_for: tuple[int, ...], driver_cuda: tuple[int, int] | None) -> str | None:
    """Returns a message where a library is built for a CUDA that is too new for the driver, else None.

    CUDA promises that all versions with the same major number work together.

    Args:
        built_for: the CUDA version that the library is built for.
        driver_cuda: newest CUDA that the driver supports; None without a driver.
    """
    if driver_cuda is None or built_for[0] <= driver_cuda[0]:
        return None
    return f"built for CUDA {'.'.join(map(str, built_for))}, the driver knows {driver_cuda[0]}.{driver_cuda[1]} at most"
