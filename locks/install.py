"""Installs what the lock says, and this project, into the environment that runs it; pip checks each file's SHA-256.

    .venv/bin/python -m locks.install

torch has a CPU build and CUDA builds of one version, and which of them pip finds first depends on where pip looks. So torch is
fetched by itself, and its CUDA libraries follow only where its build asks for them. A build that the lock doesn't list is
refused; with BLOCKLINE_TORCH=any it is installed by its version alone, and so is what it asks for.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from locks.lockfile import BUILD, CUDA, PACKAGES, ROOT, TORCH, normal, read_pins


def main() -> None:
    _pip("install", "--no-deps", "-r", BUILD)
    _pip("install", "--no-deps", "--no-build-isolation", "-r", PACKAGES)
    version = read_pins(TORCH)["torch"].version
    if os.environ.get("BLOCKLINE_TORCH") == "any":
        print(
            f"note: torch {version} and what it asks for are installed without a check of their files", file=sys.stderr
        )
        _pip("install", f"torch=={version}")
    else:
        install_torch(version)
    _pip("install", "--no-deps", "--no-build-isolation", "-e", ROOT)
    _pip("check")


def _pip(*arguments: str | Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, arguments)], check=True
    )


def install_torch(version: str) -> None:
    """Installs the build that pip finds, if the lock lists it, and the libraries that this build asks for."""
    with tempfile.TemporaryDirectory() as folder:
        _pip("download", "--no-deps", "--only-binary=:all:", "--dest", folder, f"torch=={version}")
        (wheel,) = Path(folder).iterdir()
        check_torch(wheel)
        _pip("install", "--no-deps", "--no-index", "--find-links", folder, "-r", TORCH)
    importlib.invalidate_caches()
    if asks_for_cuda(importlib.metadata.requires("torch") or []):
        _pip("install", "--no-deps", "-r", CUDA)


def check_torch(wheel: Path) -> None:
    """Refuses a build of torch that the lock doesn't list.

    Raises:
        SystemExit: names the file and its SHA-256.
    """
    with open(wheel, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest not in read_pins(TORCH)["torch"].hashes:
        raise SystemExit(
            f"torch: got {wheel.name} with SHA-256 {digest}, expected a file that {TORCH.relative_to(ROOT)} lists; it was not installed; "
            "let pip find the usual build, or trust this one with `BLOCKLINE_TORCH=any make setup`"
        )


def asks_for_cuda(requirements: list[str]) -> bool:
    """Whether a build of torch with these requirements runs on the libraries of the CUDA lock."""
    libraries = read_pins(CUDA)
    return any(normal(re.split(r"[^A-Za-z0-9._-]", requirement)[0]) in libraries for requirement in requirements)


if __name__ == "__main__":
    main()
