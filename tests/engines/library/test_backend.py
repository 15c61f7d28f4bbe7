"""Which TensorRT a build takes, the reason that it prints, and the error where there is none."""

from __future__ import annotations

import ctypes
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from engines.library.backend import INSTALL, choose_backend
from engines.library.gpu import Gpu, visible_gpus
from exporter.common.errors import BackendError

GPU = Gpu("NVIDIA Test 9000", "9.0")
BOTH = {"tensorrt": "10.16.1.11", "tensorrt_rtx": "1.7.1"}


@pytest.fixture
def machine(monkeypatch):
    """Makes this a machine with the given modules (name → version) and GPUs."""

    def make(installed: dict[str, str], gpus: tuple[Gpu, ...] = ()) -> None:
        for name in ("tensorrt", "tensorrt_rtx"):
            module = None  # as if it were not installed
            if name in installed:
                module = ModuleType(name)
                module.__spec__ = ModuleSpec(name, None)
                module.__version__ = installed[name]
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr("engines.library.backend.visible_gpus", lambda: list(gpus))

    return make


def refusal(name: str) -> str:
    with pytest.raises(BackendError) as caught:
        choose_backend(name)
    return str(caught.value)


def test_auto_takes_tensorrt_where_it_is_installed_and_a_gpu_is_visible(machine):
    machine(BOTH, (GPU,))
    backend = choose_backend()
    assert (backend.name, backend.version, backend.is_rtx) == ("tensorrt", "10.16.1.11", False)
    assert backend.trt is sys.modules["tensorrt"]
    assert GPU.name in backend.reason


@pytest.mark.parametrize(
    ("installed", "gpus", "reason"),
    [
        (BOTH, (), "no GPU is visible"),
        ({"tensorrt_rtx": "1.7.1"}, (GPU,), "tensorrt is not installed"),
        ({"tensorrt_rtx": "1.7.1"}, (), "tensorrt is not installed"),
    ],
)
def test_auto_takes_tensorrt_rtx_elsewhere_and_says_why(machine, installed, gpus, reason):
    machine(installed, gpus)
    backend = choose_backend()
    assert (backend.name, backend.version, backend.is_rtx) == ("tensorrt-rtx", "1.7.1", True)
    assert backend.trt is sys.modules["tensorrt_rtx"]
    assert reason in backend.reason


def test_neither_installed_is_refused_with_both_install_commands(machine):
    machine({}, (GPU,))
    message = refusal("auto")
    assert INSTALL["tensorrt"] in message
    assert INSTALL["tensorrt-rtx"] in message


@pytest.mark.parametrize("name", ["tensorrt", "tensorrt-rtx"])
def test_a_backend_that_is_asked_for_is_taken_whatever_auto_would_take(machine, name):
    machine(BOTH, (GPU,) if name == "tensorrt-rtx" else ())
    assert (choose_backend(name).name, choose_backend(name).reason) == (name, "asked for")


@pytest.mark.parametrize("name", ["tensorrt", "tensorrt-rtx"])
def test_a_backend_that_is_asked_for_and_absent_is_refused_with_its_install_command(machine, name):
    machine({})
    assert f"pip install 'blockline[{name}]'" in refusal(name)


@pytest.mark.parametrize("name", ["tensorrt_rtx", "TensorRT", "trt", ""])
def test_an_unknown_backend_is_refused_with_the_known_names(machine, name):
    machine(BOTH, (GPU,))
    message = refusal(name)
    assert repr(name) in message
    assert "auto, tensorrt, tensorrt-rtx" in message


@pytest.mark.parametrize("version", ["10.14.1.48", "10.9.0.34", "9.3.0", "8.6.1"])
@pytest.mark.parametrize("name", ["auto", "tensorrt"])
def test_an_older_tensorrt_is_refused_with_both_versions(machine, name, version):
    machine({"tensorrt": version}, (GPU,))
    message = refusal(name)
    assert version in message
    assert "10.15" in message


@pytest.mark.parametrize("version", ["10.15.0.1", "10.15", "11.0.0"])
def test_a_tensorrt_that_is_new_enough_is_taken(machine, version):
    machine({"tensorrt": version}, (GPU,))
    assert str(choose_backend("tensorrt")) == f"tensorrt {version}"


def test_the_age_of_tensorrt_rtx_is_counted_on_its_own(machine):
    machine({"tensorrt_rtx": "1.7.1"})
    assert str(choose_backend("tensorrt-rtx")) == "tensorrt-rtx 1.7.1"


@pytest.mark.parametrize("error", ["ImportError", "OSError"])
def test_a_module_that_does_not_load_is_reported_with_its_reason_and_the_command(machine, monkeypatch, tmp_path, error):
    machine({}, (GPU,))
    monkeypatch.delitem(sys.modules, "tensorrt")
    (tmp_path / "tensorrt.py").write_text(f"raise {error}('libnvinfer.so.10: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    message = refusal("tensorrt")
    assert "libnvinfer.so.10: cannot open" in message
    assert INSTALL["tensorrt"] in message


def test_the_installed_tensorrt_rtx_is_found():
    backend = choose_backend("tensorrt-rtx")
    assert backend.version == backend.trt.__version__
    assert backend.trt.Builder


# --- GPUs ---------------------------------------------------------------------------------------------------


class Driver:
    """What `visible_gpus` asks of libcuda, answered for two GPUs."""

    def __init__(self, error: int = 0) -> None:
        self.error = error

    def cuInit(self, _flags):
        return self.error

    def cuDeviceGetCount(self, count):
        count._obj.value = 2
        return 0

    def cuDeviceGet(self, device, index):
        device._obj.value = index
        return 0

    def cuDeviceGetName(self, name, _size, device):
        name.value = f"GPU {device.value}".encode()
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        value._obj.value = {75: (8, 12), 76: (9, 0)}[attribute][device.value]
        return 0


def test_every_gpu_is_described_by_name_and_compute_capability(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: Driver())
    assert visible_gpus() == [Gpu("GPU 0", "8.9"), Gpu("GPU 1", "12.0")]


def test_a_driver_that_finds_no_device_means_no_gpu(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: Driver(error=100))
    assert visible_gpus() == []


def test_no_driver_means_no_gpu(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert visible_gpus() == []


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")
def test_no_gpu_is_visible_on_this_machine():
    assert visible_gpus() == []
