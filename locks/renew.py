"""Writes the lock anew from pyproject.toml; `make lock` runs it in an environment that has uv.

    build/lock/bin/python -m locks.renew [--upgrade]

Versions stay as they are where pyproject.toml still allows them. --upgrade takes the newest. Nothing is installed.
Each package has one version for all Pythons and machines. A marker says where only some of them need it.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Set
from dataclasses import replace
from pathlib import Path

from locks.lockfile import BUILD, CUDA, INSTALLED, PACKAGES, ROOT, TORCH, UV, Pin, read_pins

PYTHONS = ("3.11", "3.12", "3.13", "3.14")  # the oldest comes first: its newest versions fit most of the others
PLATFORMS = {"x86_64": "x86_64-manylinux_2_28", "aarch64": "aarch64-manylinux_2_35"}  # machine → uv's name for it
TARGETS = [(python, machine) for python in PYTHONS for machine in PLATFORMS]
EXTRAS = ("smollm2", "tensorrt-rtx", "bench", "test")  # what setup installs beside the project's own dependencies
# Published as source archives only. They hold metadata, and the pinned setuptools builds them.
SOURCE_ONLY = ("tensorrt-rtx", "tensorrt-rtx-cu13")
CUDA_LIBRARIES = re.compile(r"nvidia-.*|cuda-toolkit|triton")

HEADS = {
    BUILD: ("Builds source archives and this project.",),
    PACKAGES: (
        "Everything that setup installs and that is not in the other files. Wheels only, except for packages that are",
        "published as source archives only.",
    ),
    TORCH: (
        "The CPU build that the tests ran with, and every build in the usual index. torch's own index has more CUDA",
        "builds. They are not listed; locks/install.py says how to install one.",
    ),
    CUDA: ("The libraries that the CUDA build of torch in the usual index needs beside locks/packages.txt.",),
    UV: ("What `make lock` runs.",),
}
OPTIONS = {PACKAGES: (f"--no-binary {','.join(SOURCE_ONLY)}",)}


def main() -> None:
    """Resolves what pyproject.toml asks for, from the versions of the present lock, and writes the five files."""
    parser = argparse.ArgumentParser(prog="python -m locks.renew", description=__doc__.splitlines()[0])
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that pyproject.toml allows")
    upgrade = parser.parse_args().upgrade
    old = {name: pin for path in INSTALLED for name, pin in read_pins(path).items()}
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    project = ["pyproject.toml", *(argument for extra in EXTRAS for argument in ("--extra", extra))]
    pins = _resolve(project, build, old, upgrade)
    cuda = {name for name in pins if CUDA_LIBRARIES.fullmatch(name)}
    _write(BUILD, [pins["setuptools"]])
    _write(PACKAGES, [pin for name, pin in pins.items() if name not in {"setuptools", "torch", *cuda}])
    _write(TORCH, [_with_own_build(pins["torch"], old.get("torch"))])
    _write(CUDA, [pins[name] for name in cuda])
    _write(UV, _resolve([], ["uv"], read_pins(UV), upgrade).values())


def _resolve(sources: list[str], requirements: list[str], old: dict[str, Pin], upgrade: bool) -> dict[str, Pin]:
    """Everything that the sources and requirements need on each target. A marker says where only some targets need it.

    Raises:
        SystemExit: the targets need different versions of a package.
    """
    pins: dict[str, Pin] = {}
    needed: dict[str, set[tuple[str, str]]] = {}
    for python, machine in TARGETS:
        found = _compile(sources, requirements, old | pins, upgrade and not pins, python, PLATFORMS[machine])
        for name, pin in found.items():
            first = pins.setdefault(name, pin)
            if first != pin:
                got = f"{first.version} and, for Python {python} on {machine}, {pin.version}"
                raise SystemExit(f"lock: {name} got {got}, expected one version and its files; narrow pyproject.toml")
            needed.setdefault(name, set()).add((python, machine))
    return {name: replace(pin, marker=marker(needed[name])) for name, pin in pins.items()}


def marker(needed: Set[tuple[str, str]]) -> str:
    """The marker that is true for these pairs of Python and machine and for no other target, "" for all targets."""
    pythons = [python for python in PYTHONS if any((python, machine) in needed for machine in PLATFORMS)]
    machines = [machine for machine in PLATFORMS if any((python, machine) in needed for python in PYTHONS)]
    both = len(needed) < len(pythons) * len(machines)  # some of these Pythons need it on some of these machines only
    terms = []
    for python, machine in sorted(needed, key=TARGETS.index):
        by_python = f"python_version == '{python}'" if both or len(pythons) < len(PYTHONS) else ""
        by_machine = f"platform_machine == '{machine}'" if both or len(machines) < len(PLATFORMS) else ""
        terms.append(" and ".join(filter(None, (by_python, by_machine))))
    return " or ".join(dict.fromkeys(terms))


def _compile(
    sources: list[str], requirements: list[str], old: dict[str, Pin], upgrade: bool, python: str, platform: str
) -> dict[str, Pin]:
    """What uv resolves for one Python on one platform. Only versions with a wheel for it count."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--generate-hashes", "--no-header"]
    command += ["--no-annotate", "--python-platform", platform, "--python-version", python, "--only-binary", ":all:"]
    command += [argument for name in SOURCE_ONLY for argument in ("--no-binary", name)]
    command += ["--upgrade"] if upgrade else []
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "lock.txt"
        output.write_text("".join(map(_entry, old.values())), encoding="utf-8")  # uv keeps these versions where it can
        command += ["--output-file", str(output), *sources, "-"]
        given = "\n".join(requirements)
        subprocess.run(command, input=given, text=True, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        return read_pins(output)


def _with_own_build(torch: Pin, old: Pin | None) -> Pin:
    """torch with the hashes that were known before, and with the hash of the build that pip finds here."""
    command = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps", "--only-binary=:all:"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*command, "--dest", folder, f"torch=={torch.version}"], check=True)
        (wheel,) = Path(folder).iterdir()
        with open(wheel, "rb") as file:
            own = hashlib.file_digest(file, "sha256").hexdigest()
    known = old.hashes if old is not None and old.version == torch.version else frozenset()
    return Pin(torch.name, torch.version, torch.marker, torch.hashes | known | {own})


def _entry(pin: Pin) -> str:
    head = f"{pin.name}=={pin.version}" + (f" ; {pin.marker}" if pin.marker else "")
    return " \\\n    ".join([head, *(f"--hash=sha256:{digest}" for digest in sorted(pin.hashes))]) + "\n"


def _write(path: Path, pins: Iterable[Pin]) -> None:
    lines = [
        *(f"# {line}" for line in (*HEADS[path], "Written by `make lock`; not edited by hand.")),
        "--require-hashes",
        "--only-binary :all:",
    ]
    entries = [_entry(pin) for pin in sorted(pins, key=lambda pin: pin.name)]
    path.write_text("\n".join([*lines, *OPTIONS.get(path, ())]) + "\n" + "".join(entries), encoding="utf-8")


if __name__ == "__main__":
    main()
