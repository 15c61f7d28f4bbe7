"""What lies in a bundle's folder and is not the bundle's own: told apart by manifest and engine records, taken along, never lost."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from exporter.bundle.bundle import ENGINES_FILE, REPORT_FILE
from exporter.bundle.manifest import DATA_FILE, GRAPH_FILE, MANIFEST_FILE
from exporter.common.documents import read_document
from exporter.common.errors import InputError

_TEMPORARY = re.compile(r"\.([^/]+\.(onnx|engine)|manifest\.json|report\.json|engines\.json)\.partial-\w{8}")

_OWN_NAME = re.compile(r"(part\d+/)?[^./\0][^/\0]*")  # of all that a manifest says, as it may be anybody's


def take_along(old: Path, new: Path) -> None:
    """Gives a folder that will replace `old` what others put into that one: the same files, by hard links where there are such.

    Raises:
        InputError: a name is the new bundle's too.
        OSError: something cannot be taken along.
    """
    for name in foreign_entries(old):
        if os.path.lexists(new / name):
            raise InputError(
                f"output {old}: its {name} was not written by an export and would be replaced; choose another -o"
            )
        (new / name).parent.mkdir(exist_ok=True)
        _take(old / name, new / name)
    alike(old, new)


def take_latecomers(old: Path, new: Path) -> None:
    """Moves over what was put into `old` after `take_along`, while it was being replaced by `new`."""
    for name in foreign_entries(old):
        _move_newer(old / name, new / name)


def foreign_entries(folder: Path) -> list[str]:
    """Paths in a folder, relative to it, that are not of the bundle there or of a run that was killed; a foreign folder counts as one."""
    owned = _owned_files(folder)
    parts = {name.partition("/")[0] for name in owned if "/" in name}
    found = _others(folder, owned | parts)
    for part in sorted(parts):
        own = {GRAPH_FILE, DATA_FILE, ENGINES_FILE} | _engine_files(folder / part)
        found += [f"{part}/{name}" for name in (_others(folder / part, own) if (folder / part).is_dir() else ())]
    return found


def alike(old: Path, new: Path) -> None:
    """Gives a folder another one's mode, and its owner where this user may."""
    status = old.stat()
    if os.geteuid() == 0:
        os.chown(new, status.st_uid, status.st_gid)
    os.chmod(new, status.st_mode & 0o7777)


def _others(folder: Path, own: set[str]) -> list[str]:
    return [name for name in sorted(os.listdir(folder)) if name not in own and not _TEMPORARY.fullmatch(name)]


def _owned_files(folder: Path) -> set[str]:
    """Names in a folder that a bundle there put into it, by its manifest and its engine records; none without a manifest of ours."""
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
        return {
            record[key]
            for record in data["engines"]
            for key in ("file", "graph_file")
            if Path(record[key]).name == record[key]
        }
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
    """Waits until a file's content, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
