"""Writes the lock anew from pyproject.toml; `make lock` runs it in an environment that has uv.

    build/lock/bin/python -m locks.renew [--upgrade]

Versions stay as they are where pyproject.toml still allows them; --upgrade takes the newest. Nothing is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from locks.lockfile import BUILD, CUDA, INSTALLED, PACKAGES, ROOT, TORCH, UV, Pin, read_pins

PLATFORMS = {
    "x86_64": "x86_64-manylinux_2_28",
    "aarch64": "aarch64-manylinux_2_35",
}  # machine → uv's name for Linux on it
EXTRAS = ("smollm2", "tensorrt-rtx", "bench", "test")  # what setup installs beside the project's own dependencies
SOURCE_ONLY = (
    "tensorrt-rtx",
    "tensorrt-rtx-cu13",
)  # published as source archives alone: metadata, built by the pinned setuptools
CUDA_LIBRARIES = re.compile(r"nvidia-.*|cuda-toolkit|triton")

HEADS = {
    BUILD: ("Builds source archives and this project.",),
    PACKAGES: (
        "All that setup installs but what the other files hold. Wheels only, but for what is published as source alone.",
    ),
    TORCH: (
        "The CPU build that the tests ran with and every build in the usual index. torch's own index has more CUDA builds, which aren't",
        "listed: locks/install.py says what to do about one.",
    ),
    CUDA: ("What the CUDA build of torch in the usual index asks for beside locks/packages.txt.",),
    UV: ("What `make lock` runs.",),
}
OPTIONS = {PACKAGES: (f"--no-binary {','.join(SOURCE_ONLY)}",)}


def main() -> None:
    """Resolves what pyproject.toml asks for, from the versions of the lock that is there, and writes the five files again."""
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
    """Everything that the sources and requirements need on the platforms of the lock; a marker says where one alone needs it.

    Raises:
        SystemExit: the platforms need different versions of a package.
    """
    pins: dict[str, Pin] = {}
    needed: dict[str, list[str]] = {}
    for machine, platform in PLATFORMS.items():
        for name, pin in _compile(sources, requirements, old | pins, upgrade and not pins, platform).items():
            if pins.setdefault(name, pin) != pin:
                raise SystemExit(
                    f"lock: {name} got {pins[name].version} and {pin.version} for {machine}, expected one; narrow pyproject.toml"
                )
            needed.setdefault(name, []).append(machine)
    everywhere = len(PLATFORMS)
    markers = {
        name: "" if len(machines) == everywhere else f"platform_machine == '{machines[0]}'"
        for name, machines in needed.items()
    }
    return {name: replace(pin, marker=markers[name]) for name, pin in pins.items()}


def _compile(
    sources: list[str], requirements: list[str], old: dict[str, Pin], upgrade: bool, platform: str
) -> dict[str, Pin]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "lock.txt"
        output.write_text("".join(map(_entry, old.values())), encoding="utf-8")  # uv keeps these versions where it can
        command = [
            sys.executable,
            "-m",
            "uv",
            "pip",
            "compile",
            "--quiet",
            "--python-platform",
            platform,
            "--python-version",
            "3.11",
        ]
        command += ["--generate-hashes", "--no-header", "--no-annotate", *(["--upgrade"] if upgrade else [])]
        subprocess.run(
            [*command, "--output-file", str(output), *sources, "-"],
            input="\n".join(requirements), text=True, check=True, cwd=ROOT, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        return read_pins(output)


def _with_own_build(torch: Pin, old: Pin | None) -> Pin:
    """torch with the hash of the build that pip finds here too, and with those that were known before."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "--quiet",
            "download",
            "--no-deps",
            "--only-binary=:all:",
            "--dest",
            folder,
        ]
        subprocess.run([*command, f"torch=={torch.version}"], check=True)
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
