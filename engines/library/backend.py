"""Finds the TensorRT to build with: `tensorrt` on machines with a GPU, `tensorrt-rtx` anywhere."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from dataclasses import dataclass
from types import ModuleType

from engines.library.gpu import visible_gpus
from exporter.common.errors import BackendError

log = logging.getLogger(__name__)

MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
CHOICES = ("auto", *MODULES)
INSTALL = {name: f"pip install 'blockline[{name}]'" for name in MODULES}
OLDEST_TENSORRT = (10, 15)  # the first version with the KV-cache-update and attention layers that our graphs need


@dataclass(frozen=True)
class Backend:
    """A TensorRT that is installed here.

    Attributes:
        name: "tensorrt" or "tensorrt-rtx".
        trt: its Python module; both modules have the same API.
        version: version of that module.
        reason: why this backend was chosen, in words for the user.
    """

    name: str
    trt: ModuleType
    version: str
    reason: str

    @property
    def is_rtx(self) -> bool:
        return self.name == "tensorrt-rtx"

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def choose_backend(name: str = "auto") -> Backend:
    """Returns the backend of that name.

    "auto" takes tensorrt where it is installed and a GPU is visible, and tensorrt-rtx elsewhere.

    Raises:
        BackendError: the name is unknown, or the backend is not installed. The message then has the install command.
    """
    if name == "auto":
        gpus = visible_gpus()
        if _installed("tensorrt") and gpus:
            return _load("tensorrt", f"auto: installed, and {gpus[0].name} is visible")
        if _installed("tensorrt-rtx"):
            why = "no GPU is visible" if _installed("tensorrt") else "tensorrt is not installed"
            return _load("tensorrt-rtx", f"auto: {why}; engines compile without a GPU")
        names, commands = " and ".join(MODULES), " or, on a machine with a GPU, ".join(reversed(INSTALL.values()))
        raise BackendError(f"backend auto: {names} are not installed; run {commands}")
    if name not in MODULES:
        raise BackendError(f"backend: got {name!r}, expected one of {', '.join(CHOICES)}")
    if not _installed(name):
        raise BackendError(f"backend {name}: it is not installed; run {INSTALL[name]}")
    return _load(name, "asked for")


def _installed(name: str) -> bool:
    return importlib.util.find_spec(MODULES[name]) is not None


def _load(name: str, reason: str) -> Backend:
    try:
        trt = importlib.import_module(MODULES[name])
    except (ImportError, OSError) as error:
        problem = f"it is installed and does not load ({error})"
        raise BackendError(f"backend {name}: {problem}; reinstall it: {INSTALL[name]}") from None
    version = trt.__version__
    if name == "tensorrt" and tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TENSORRT:
        oldest = ".".join(map(str, OLDEST_TENSORRT))
        raise BackendError(f"backend tensorrt: got version {version}, expected {oldest} or newer")
    log.info("%s %s (%s)", name, version, reason)
    return Backend(name, trt, version, reason)
