"""Installs the packages of the lock, and this project, into the environment that runs it; pip checks the SHA-256s.

    .venv/bin/python -m locks.install

Each step prints one line. The output of pip goes to build/setup.log.

torch has a CPU build and CUDA builds of one version. Where pip looks decides which of them it finds first. So torch is
fetched by itself, and its CUDA libraries are installed only where its build asks for them. A build that the lock does
not list is refused. With BLOCKLINE_TORCH=any, torch is installed by its version alone, and so is what it asks for.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from locks.lockfile import BUILD, CUDA, PACKAGES, ROOT, TORCH, normal, pins_for_this_machine, read_pins

LOG = ROOT / "build" / "setup.log"
STEPS = 5
LINES_OF_A_FAILURE = 20


def main() -> None:
    LOG.parent.mkdir(exist_ok=True)
    LOG.write_text("", encoding="utf-8")
    print(f"setup: Python {platform.python_version()}; pip's output is in {LOG.relative_to(ROOT)}", flush=True)
    with step(1, f"build tools ({len(pins_for_this_machine(BUILD))})"):
        _pip("install", "--no-deps", "-r", BUILD)
    with step(2, f"packages ({len(pins_for_this_machine(PACKAGES))})"):
        _pip("install", "--no-deps", "--no-build-isolation", "-r", PACKAGES)
    version = read_pins(TORCH)["torch"].version
    if os.environ.get("BLOCKLINE_TORCH") == "any":
        with step(3, f"torch {version} and all that it asks for, without a check of their files"):
            _pip("install", f"torch=={version}")
        with step(4, "CUDA libraries: pip installed them with torch where its build needs them"):
            pass
    else:
        install_torch(version)
    with step(5, "this project, and a check that all versions fit together"):
        _pip("install", "--no-deps", "--no-build-isolation", "-e", ROOT)
        _pip("check")


@contextmanager
def step(number: int, words: str) -> Iterator[None]:
    """Prints one line: what is done, and then how long it took or that it failed."""
    print(f"{number}/{STEPS} {words} ... ", end="", flush=True)
    began = time.monotonic()
    try:
        yield
    except BaseException:
        print("failed", flush=True)
        raise
    print(f"{time.monotonic() - began:.0f} s", flush=True)


def _pip(*arguments: str | Path) -> None:
    """Runs pip. Its output goes to the log.

    Raises:
        SystemExit: pip failed. The message has the last lines of its output.
    """
    command = ["pip", *map(str, arguments)]
    quiet = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_PROGRESS_BAR": "off"}
    environment = os.environ | quiet | {"PYTHONUNBUFFERED": "1"}  # the log has output and errors in their order
    with open(LOG, "a+", encoding="utf-8", errors="replace") as log:
        log.write(f"$ {' '.join(command)}\n")
        log.flush()
        began = log.tell()
        code = subprocess.run(
            [sys.executable, "-m", *command], env=environment, stdout=log, stderr=subprocess.STDOUT
        ).returncode
        log.seek(began)
        last = [f"    {line.rstrip()}" for line in log][-LINES_OF_A_FAILURE:]
    if code:
        problem = (
            f"setup: `{' '.join(command)}` got exit code {code}, expected 0; its whole output is in "
            f"{LOG.relative_to(ROOT)}; fix what the lines above name, then run `make setup` again"
        )
        raise SystemExit("\n".join([*last, problem]))


def install_torch(version: str) -> None:
    """Installs the build that pip finds, if the lock lists it, and the libraries that this build asks for."""
    with step(3, f"torch {version}"), tempfile.TemporaryDirectory() as folder:
        _pip("download", "--no-deps", "--only-binary=:all:", "--dest", folder, f"torch=={version}")
        (wheel,) = Path(folder).iterdir()
        check_torch(wheel)
        _pip("install", "--no-deps", "--no-index", "--find-links", folder, "-r", TORCH)
    importlib.invalidate_caches()
    if asks_for_cuda(importlib.metadata.requires("torch") or []):
        with step(4, f"CUDA libraries of this build of torch ({len(pins_for_this_machine(CUDA))})"):
            _pip("install", "--no-deps", "-r", CUDA)
    else:
        with step(4, "CUDA libraries: this build of torch needs none"):
            pass


def check_torch(wheel: Path) -> None:
    """Refuses a build of torch that the lock does not list.

    Raises:
        SystemExit: the message names the file and its SHA-256.
    """
    with open(wheel, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest not in read_pins(TORCH)["torch"].hashes:
        raise SystemExit(
            f"torch: got {wheel.name} with SHA-256 {digest}, expected a file that {TORCH.relative_to(ROOT)} lists; it "
            "was not installed; let pip find the usual build, or trust this one with `BLOCKLINE_TORCH=any make setup`"
        )


def asks_for_cuda(requirements: list[str]) -> bool:
    """Whether a build of torch with these requirements runs on the libraries of the CUDA lock."""
    libraries = read_pins(CUDA)
    return any(normal(re.split(r"[^A-Za-z0-9._-]", requirement)[0]) in libraries for requirement in requirements)


if __name__ == "__main__":
    main()
