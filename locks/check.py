"""The audit that needs no network: the lock against pyproject.toml, and this environment against the lock.

    .venv/bin/python -m locks.check

It knows no advisories: a pinned package with a known hole passes. docs/supply_chain.md says how to ask for those.
"""

from __future__ import annotations

import importlib.metadata
import sys
import tomllib
from collections.abc import Iterable, Mapping, Set

from packaging.markers import Marker
from packaging.requirements import Requirement

from locks.install import asks_for_cuda
from locks.lockfile import CUDA, INSTALLED, ROOT, UV, Pin, normal, read_pins
from locks.renew import EXTRAS

NOT_LOCKED = ("blockline", "pip")  # this project, and what Python's own venv brings to install the rest


def requirements() -> list[Requirement]:
    """What pyproject.toml asks for, with every extra that setup installs, and what builds it."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = data["project"]
    texts = [*project["dependencies"], *(text for extra in EXTRAS for text in project["optional-dependencies"][extra])]
    return [Requirement(text) for text in (*texts, *data["build-system"]["requires"])]


def range_problems(wanted: Iterable[Requirement], pins: Mapping[str, Pin]) -> list[str]:
    """Requirements that the lock leaves out or answers with a version outside of their range."""
    problems = []
    for requirement in wanted:
        pin = pins.get(normal(requirement.name))
        if pin is None:
            problems.append(f"{requirement}: the lock does not have it")
        elif not requirement.specifier.contains(pin.version, prereleases=True):
            problems.append(f"{requirement}: the lock has {pin.version}")
    return problems


def environment_problems(
    installed: Mapping[str, str], pins: Mapping[str, Pin], added: Set[str] = frozenset()
) -> list[str]:
    """Packages that are missing, of another version, or neither the lock's nor among `added`.

    A local label (torch's "+cpu") names a build of a version.
    """
    expected = {name: pin.version for name, pin in pins.items() if not pin.marker or Marker(pin.marker).evaluate()}
    got = {
        name: version for name, version in installed.items() if name in expected or name not in {*NOT_LOCKED, *added}
    }
    return [
        f"{name}: got {got.get(name, 'nothing')}, expected {expected.get(name, 'nothing')}"
        for name in sorted({*got, *expected})
        if name not in got or name not in expected or expected[name] not in (got[name], got[name].partition("+")[0])
    ]


def installed_packages() -> dict[str, str]:
    """The packages of this environment: name → version."""
    return {normal(package.metadata["Name"]): package.version for package in importlib.metadata.distributions()}


def added_by_other_extras(installed: Mapping[str, str]) -> set[str]:
    """What an extra that setup doesn't install has brought, such as `tensorrt` on a GPU machine."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    waiting = [Requirement(text).name for extra, texts in extras.items() if extra not in EXTRAS for text in texts]
    added: set[str] = set()
    while waiting:
        name = normal(waiting.pop())
        if name in installed and name not in added:
            added.add(name)
            waiting += [Requirement(text).name for text in importlib.metadata.requires(name) or []]
    return added


def locked_packages() -> dict[str, Pin]:
    """What the lock installs beside the build of torch that is here."""
    files = [path for path in INSTALLED if path != CUDA or asks_for_cuda(importlib.metadata.requires("torch") or [])]
    return {name: pin for path in files for name, pin in read_pins(path).items()}


def problems() -> list[str]:
    """Everything that is wrong with the lock and with this environment."""
    read_pins(UV)
    pins, installed = locked_packages(), installed_packages()
    return [
        *range_problems(requirements(), pins),
        *environment_problems(installed, pins, added_by_other_extras(installed)),
    ]


def main() -> int:
    found = problems()
    for problem in found:
        print(f"lock: {problem}", file=sys.stderr)
    if found:
        print(
            "lock: make the environment anew with `rm -r .venv && make setup`, or the lock with `make lock`",
            file=sys.stderr,
        )
    else:
        print(f"lock: {len(set(installed_packages()) - set(NOT_LOCKED))} packages are here, each as pinned")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
