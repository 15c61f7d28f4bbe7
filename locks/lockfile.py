"""Reads the files of the lock. Needs the standard library only: `make setup` reads them in an empty environment."""

from __future__ import annotations

import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "locks"
BUILD = FOLDER / "build.txt"  # what builds source archives and this project itself
PACKAGES = FOLDER / "packages.txt"  # everything that is not in the other files
TORCH = FOLDER / "torch.txt"
CUDA = FOLDER / "cuda.txt"  # libraries that only torch's CUDA build asks for
UV = FOLDER / "uv.txt"  # the tool that renews the lock, in an environment of its own
INSTALLED = (BUILD, PACKAGES, TORCH, CUDA)

_PIN = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;]+)(?:\s*;\s*(?P<marker>[^\\]+?))?"
    r"(?P<hashes>(?:\s+--hash=sha256:[0-9a-f]{64})+)"
)


@dataclass(frozen=True)
class Pin:
    """One package of the lock.

    Attributes:
        name: in normal form, lower case with hyphens.
        version: the one version.
        marker: where it is installed, as in a requirement; "" means everywhere.
        hashes: SHA-256 of every file of that version that may be installed.
    """

    name: str
    version: str
    marker: str
    hashes: frozenset[str]


def normal(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def applies_here(marker: str) -> bool:
    """Whether a marker of the lock is true for this Python on this machine.

    The lock's markers are terms `name == 'value'`, joined by `and`, and such groups joined by `or`.
    """
    here = {"platform_machine": platform.machine(), "python_version": f"{sys.version_info[0]}.{sys.version_info[1]}"}
    groups = [re.findall(r"(\w+) == '([^']*)'", group) for group in marker.split(" or ")]
    return any(all(here[name] == value for name, value in group) for group in groups)


def pins_for_this_machine(path: Path) -> list[Pin]:
    """The packages of one file that setup installs here."""
    return [pin for pin in read_pins(path).values() if applies_here(pin.marker)]


def read_pins(path: Path) -> dict[str, Pin]:
    """The packages of one file, by name.

    Raises:
        ValueError: a line is no package with one version and at least one SHA-256, or a name comes twice.
    """
    lines = (
        line
        for line in path.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
        if line and not line.startswith(("#", "--"))
    )
    pins: dict[str, Pin] = {}
    for line in lines:
        match = _PIN.fullmatch(line.strip())
        if match is None:
            expected = "NAME==VERSION and a SHA-256 for each of its files"
            raise ValueError(f"{path}: got {line[:80]!r}, expected {expected}; renew it with `make lock`")
        pin = Pin(
            normal(match["name"]),
            match["version"],
            match["marker"] or "",
            frozenset(re.findall(r"[0-9a-f]{64}", match["hashes"])),
        )
        if pin.name in pins:
            raise ValueError(f"{path}: {pin.name} comes twice, expected once; renew it with `make lock`")
        pins[pin.name] = pin
    return pins
