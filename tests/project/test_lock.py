"""The lock: what pyproject.toml asks for, each file by its SHA-256, and this environment nothing else."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from locks import install
from locks.check import (
    added_by_other_extras,
    environment_problems,
    installed_packages,
    locked_packages,
    problems,
    range_problems,
    requirements,
)
from locks.install import asks_for_cuda, check_torch
from locks.lockfile import CUDA, INSTALLED, PACKAGES, ROOT, TORCH, UV, Pin, read_pins
from locks.renew import SOURCE_ONLY

HASH = "0" * 64


def pin(name: str, version: str, marker: str = "") -> Pin:
    return Pin(name, version, marker, frozenset({HASH}))


# --- as it is ----------------------------------------------------------------------------------------------------------


def test_the_lock_covers_pyproject_and_this_environment_equals_it():
    assert problems() == []


def test_no_package_is_in_two_files():
    names = [name for path in INSTALLED for name in read_pins(path)]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("path", [*INSTALLED, UV], ids=lambda path: path.name)
def test_pip_itself_refuses_a_file_that_the_lock_does_not_list(path):
    options = [line for line in path.read_text().splitlines() if line.startswith("--")]
    allowed = ["--require-hashes", "--only-binary :all:"]
    assert options == allowed + ([f"--no-binary {','.join(SOURCE_ONLY)}"] if path == PACKAGES else [])


def test_every_extra_that_a_message_or_a_page_names_exists():
    text = "".join(
        path.read_text() for folder in ("exporter", "engines", "runtime") for path in (ROOT / folder).rglob("*.py")
    )
    text += "".join(path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    named = set(re.findall(r"blockline\[([a-z0-9,-]+)\]", text))
    assert "polygraphy" in named
    assert named <= set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


# --- what would be wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line", ["numpy>=2 --hash=sha256:" + HASH, "numpy==2.4.6", "numpy", "numpy==2.4.6 --hash=md5:" + "0" * 32]
)
def test_a_line_without_one_version_and_a_hash_is_refused(tmp_path, line):
    path = tmp_path / "packages.txt"
    path.write_text(f"# a comment\n--require-hashes\n{line}\n")
    with pytest.raises(ValueError, match=re.escape(line[:40])):
        read_pins(path)


def test_a_name_that_comes_twice_is_refused(tmp_path):
    path = tmp_path / "packages.txt"
    path.write_text(
        "".join(f"{name}==1 \\\n    --hash=sha256:{HASH}\n" for name in ("typing_extensions", "typing-extensions"))
    )
    with pytest.raises(ValueError, match="comes twice"):
        read_pins(path)


def test_a_requirement_outside_of_the_lock_is_named():
    wanted = [Requirement("onnx>=1.23"), Requirement("NumPy>=2"), Requirement("rich>=13")]
    found = range_problems(wanted, {"onnx": pin("onnx", "1.20"), "rich": pin("rich", "15.0.0")})
    assert found == ["onnx>=1.23: the lock has 1.20", "NumPy>=2: the lock does not have it"]


def test_the_requirements_are_those_of_every_extra_that_setup_installs():
    names = {requirement.name for requirement in requirements()}
    assert {"setuptools", "torch", "transformers", "tensorrt-rtx", "pytest", "mypy"} <= names


def test_another_environment_is_named_package_by_package():
    pins = {name: pin(name, "1.0") for name in ("torch", "same", "other", "gone")} | {
        "elsewhere": pin("elsewhere", "1.0", "sys_platform == 'win32'")
    }
    installed = {"torch": "1.0+cpu", "same": "1.0", "other": "1.0.1", "extra": "3", "pip": "23.2", "blockline": "0.1.0"}
    assert environment_problems(installed, pins) == [
        "extra: got 3, expected nothing",
        "gone: got nothing, expected 1.0",
        "other: got 1.0.1, expected 1.0",
    ]


def test_what_another_extra_brings_may_be_here_too():
    added = added_by_other_extras(installed_packages())
    assert {
        "polygraphy",
        "cuda-python",
        "cuda-bindings",
    } <= added  # of the extras polygraphy and tensorrt, and what they ask for
    assert "onnx" not in added
    assert environment_problems({"tensorrt": "11.0", "other": "1"}, {}, {"tensorrt"}) == [
        "other: got 1, expected nothing"
    ]


def test_the_environment_is_really_read():
    assert installed_packages()["numpy"] == locked_packages()["numpy"].version


# --- torch -------------------------------------------------------------------------------------------------------------


def test_an_unlisted_build_of_torch_is_refused_by_its_hash(tmp_path):
    wheel = tmp_path / "torch-2.13.0+mine-cp311-cp311-linux_x86_64.whl"
    wheel.write_bytes(b"not torch")
    with pytest.raises(SystemExit, match=r"2\.13\.0\+mine.* with SHA-256 .*BLOCKLINE_TORCH=any"):
        check_torch(wheel)


@pytest.mark.parametrize(
    ("asks_for", "files"),
    [("filelock", [TORCH]), ("triton==3.7.1; platform_system == 'Linux'", [TORCH, CUDA])],
    ids=["cpu", "cuda"],
)
def test_setup_installs_the_libraries_of_the_build_of_torch_that_pip_finds(monkeypatch, asks_for, files):
    installed = []

    def pip(command, *arguments):
        if command == "download":
            (Path(arguments[arguments.index("--dest") + 1]) / "torch-2.13.0.whl").write_bytes(b"")
        else:
            installed.append(arguments[arguments.index("-r") + 1])

    monkeypatch.setattr(install, "_pip", pip)
    monkeypatch.setattr(install, "check_torch", lambda wheel: None)
    monkeypatch.setattr(install.importlib.metadata, "requires", lambda name: ["typing-extensions>=4.10.0", asks_for])
    install.install_torch("2.13.0")
    assert installed == files


def test_the_cuda_build_of_torch_brings_its_libraries_and_the_cpu_build_none():
    assert not asks_for_cuda(["filelock", "typing-extensions>=4.10.0", 'optree>=0.13.0; extra == "optree"'])
    assert asks_for_cuda(["filelock", 'nvidia-nccl-cu13==2.29.7; platform_system == "Linux"'])
    assert asks_for_cuda(['triton==3.7.1; platform_system == "Linux"'])


def test_torch_and_its_libraries_are_not_installed_with_the_rest():
    assert set(read_pins(TORCH)) == {"torch"}
    assert not set(read_pins(PACKAGES)) & {*read_pins(TORCH), *read_pins(CUDA)}
    assert TORCH.read_text().count("--hash=") > 2  # every build that the usual index has, and the tests' own
