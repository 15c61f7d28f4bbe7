"""Finds the files in a bundle's folder that do not belong to the bundle, and moves them to the folder that replaces it.

The manifest and the engine records say which files belong to the bundle.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from exporter.bundle.bundle import ENGINES_FILE, REPORT_FILE
from exporter.bundle.engine_records import runtime_cache_name
from exporter.bundle.manifest import DATA_FILE, GRAPH_FILE, MANIFEST_FILE
from exporter.common.documents import read_document
from exporter.common.errors import InputError

_TEMPORARY = re.compile(r"\.([^/]+\.(onnx|engine)|manifest\.json|report\.json|engines\.json)\.partial-\w{8}")

# Names that count as a bundle's own: a manifest may be untrusted and list any name.
_OWN_NAME = re.compile(r"(part\d+/)?[^./\0][^/\0]*")


def take_along(old: Path, new: Path) -> None:
    """Adds to the folder `new`, which will replace `old`, the files in `old` that do not belong to the bundle there.

    They are hard links where the file system has them, else copies.

    Raises:
        InputError: the new bundle has a file of the same name.
        OSError: a file cannot be linked or copied.
    """
    for name in foreign_entries(old):
        if os.path.lexists(new / name):
            raise InputError(
                f"output {old}: its {name} was not written by an export and would be replaced; choose another output"
            )
        (new / name).parent.mkdir(exist_ok=True)
        _take(old / name, new / name)
    alike(old, new)


def take_latecomers(old: Path, new: Path) -> None:
    """Moves to `new` the files that came into `old` after `take_along`, while `new` was replacing it."""
    for name in foreign_entries(old):
        _move_newer(old / name, new / name)


def foreign_entries(folder: Path) -> list[str]:
    """Returns the paths in a folder, relative to it, that belong neither to its bundle nor to a killed run.

    A foreign folder counts as one path.
    """
    owned = _owned_files(folder)
    parts = {name.partition("/")[0] for name in owned if "/" in name}
    found = _others(folder, owned | parts)
    for part in sorted(parts):
        own = {GRAPH_FILE, DATA_FILE, ENGINES_FILE} | _engine_files(folder / part)
        found += [f"{part}/{name}" for name in (_others(folder / part, own) if (folder / part).is_dir() else ())]
    return found


def alike(old: Path, new: Path) -> None:
    """Gives `new` the mode of `old`, and its owner where this user is root."""
    status = old.stat()
    if os.geteuid() == 0:
        os.chown(new, status.st_uid, status.st_gid)
    os.chmod(new, status.st_mode & 0o7777)


def _others(folder: Path, own: set[str]) -> list[str]:
    return [name for name in sorted(os.listdir(folder)) if name not in own and not _TEMPORARY.fullmatch(name)]


def _owned_files(folder: Path) -> set[str]:
    """Returns the names of the files that belong to a folder's bundle, by its manifest and its engine records.

    It returns none where the folder has no manifest of blockline.
    """
    try:
        manifest: Any = read_document(folder / MANIFEST_FILE)
        if not manifest["producer"].startswith("blockline "):
            return set()
        files = {name for name in manifest["files"] if _OWN_NAME.fullmatch(name)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()
    return files | _engine_files(folder) | {MANIFEST_FILE, REPORT_FILE, ENGINES_FILE}


def _engine_files(folder: Path) -> set[str]:
    try:
        data: Any = read_document(folder / ENGINES_FILE)
        names = [record[key] for record in data["engines"] for key in ("file", "graph_file")]
        names += [runtime_cache_name(record["file"]) for record in data["engines"]]
        return {name for name in names if Path(name).name == name}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _take(old: Path, new: Path) -> None:
    if not _is_folder(old):
        _link_or_copy(old, new)
        return
    new.mkdir()
    for entry in old.iterdir():
        _take(entry, new / entry.name)
    alike(old, new)


def _link_or_copy(old: Path, new: Path) -> None:
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError:  # a file system without hard links, or another user's file
        shutil.copy2(old, new, follow_symlinks=False)
        if not new.is_symlink():
            sync(new)


def _move_newer(old: Path, new: Path) -> None:
    if not os.path.lexists(new):
        os.rename(old, new)
    elif _is_folder(old) and _is_folder(new):
        for entry in old.iterdir():
            _move_newer(entry, new / entry.name)
    elif not os.path.samestat(old.lstat(), new.lstat()) and old.lstat().st_mtime_ns > new.lstat().st_mtime_ns:
        os.replace(old, new)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def sync(path: Path) -> None:
    """Waits until the content of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
