"""The versions of the installed packages, for reports."""

from __future__ import annotations

import importlib.metadata
import platform

from exporter import __version__


def versions(*packages: str) -> dict[str, str]:
    """Returns the versions of those packages that are installed, and the versions of blockline and Python."""
    found = {"blockline": __version__, "python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
