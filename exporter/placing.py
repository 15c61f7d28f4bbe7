"""Puts files and whole folders in place in one step: written beside their target, locked while they are, then renamed.

What a killed run leaves behind is known by its name and by its lock being free, and the next run removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from exporter.bundle import DATA_FILE, ENGINES_FILE, GRAPH_FILE, MANIFEST_FILE, REPORT_FILE, Bundle, Manifest, to_json
from exporter.documents import is_text, read_document
from exporter.errors import InputError

# --- temporaries ---------------------------------------------------------------------------------------------------------


def claim(parent: Path, name: str, folder: bool) -> tuple[Path, int]:
    """A new file or folder in `parent` for what will be called `name`, and a descriptor that locks it while it is open.

    Leftovers of killed runs under that name are removed first: their locks are free, their owners being dead.

    Raises:
        OSError: `parent` cannot be written.
    """
    prefix = f".{name}.partial-"
    for leftover in parent.glob(f"{glob.escape(prefix)}*"):
        with contextlib.suppress(OSError):
            lock = os.open(leftover, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(leftover)
            finally:
                os.close(lock)
    while True:  # until another run has not taken it for a leftover before it was locked
        if folder:
            path = tempfile.mkdtemp(prefix=prefix, dir=parent)
            try:
                lock = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                continue
        else:
            lock, path = tempfile.mkstemp(prefix=prefix, dir=parent)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(path):
            os.chmod(path, 0o755 if folder else 0o644)
            return Path(path), lock
        os.close(lock)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def temporary_file(folder: Path, name: str) -> Iterator[Path]:
    """A file in the folder to write what will be called `name` into; it is gone at the end unless it was renamed.

    Raises:
        InputError: the folder cannot be written, or writing failed.
    """
    try:
        path, lock = claim(folder, name, folder=False)
    except OSError as error:
        raise InputError(f"output {folder}: it cannot be written ({error.strerror})") from None
    try:
        yield path
    except OSError as error:
        raise InputError(f"output {folder}: {error.strerror}; nothing was left behind") from None
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


def write_atomically(path: Path, text: str) -> None:
    """Replaces a small text file in one step: readers see the old or the new content, never a part.

    Raises:
        InputError: the folder cannot be written; the file is as before.
    """
    temporary = None
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: it is no plain file and would be replaced by one; choose another path")
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise InputError(f"{path}: cannot be written ({error.strerror}); it is as before") from None
        raise


def write_report(bundle: Bundle, report: dict) -> None:
    """Replaces a bundle's report.json."""
    write_atomically(bundle.folder / REPORT_FILE, to_json(report))


# --- whole folders ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def new_folder(target: str | Path) -> Iterator[Path]:
    """Gives a temporary sibling of `target` to write a folder into, and puts it in place when the body ends well.

    An older bundle at `target` is replaced in one step; files there that are not that bundle's own stay. When the body
    raises, nothing changes. Leftovers of killed runs are removed on the way.

    Raises:
        InputError: `target` is a file, or cannot be written, or holds somebody's file of a name that would be written.
    """
    if not os.fspath(target):
        raise InputError("output: got an empty path, expected a folder to make; give one with -o")
    if not is_text(target):
        raise InputError(f"output {target}: its path is not valid UTF-8, which onnx and onnxruntime cannot open; choose another -o")
    target = Path(os.path.abspath(target))
    if target.is_symlink():
        target = target.resolve()
    if target.exists() and not target.is_dir():
        raise InputError(f"output {target}: it is a file, expected a folder or nothing; choose another -o")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary, lock = claim(target.parent, target.name, folder=True)
    except OSError as error:
        raise InputError(f"output {target}: cannot write beside it ({error.strerror}: {error.filename}); choose another -o") from None
    try:
        yield temporary
        _put_in_place(temporary, target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EACCES, errno.EPERM, errno.EROFS, errno.EDQUOT):
            where = f": {error.filename}" if error.filename else ""
            raise InputError(f"output {target}: {error.strerror}{where}; nothing was left behind") from None
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(lock)


def _put_in_place(temporary: Path, target: Path) -> None:
    _sync(temporary)
    if not target.exists():
        os.rename(temporary, target)
        return
    owned = _owned_files(target)
    folders = {name.partition("/")[0] for name in owned if "/" in name}
    _keep_others(target, temporary, owned | folders)
    for part in sorted(folders):
        if (target / part).is_symlink():  # somebody's own folder, which is not this bundle's to empty
            raise InputError(f"output {target}: its {part} is a link, expected a folder that an export made; choose another -o")
        _keep_others(target / part, temporary / part, _engine_files(target / part) | {GRAPH_FILE, DATA_FILE, ENGINES_FILE})
    _exchange(temporary, target)  # the older folder now lies at `temporary`, which the caller removes


def _keep_others(old: Path, new: Path, owned: set[str]) -> None:
    """Takes along what lies in an older folder and is not its bundle's own."""
    for entry in old.iterdir() if old.is_dir() else ():
        if entry.name in owned:
            continue
        if (new / entry.name).exists():
            raise InputError(f"output {old}: its {entry.name} was not written by an export and would be replaced; choose another -o")
        new.mkdir(exist_ok=True)
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, new / entry.name, symlinks=True, copy_function=_link_or_copy)
        else:
            _link_or_copy(entry, new / entry.name)


def _link_or_copy(source: str | Path, destination: str | Path) -> None:
    try:
        os.link(source, destination, follow_symlinks=False)
    except OSError:  # a file system without hard links
        shutil.copy2(source, destination, follow_symlinks=False)


def _owned_files(folder: Path) -> set[str]:
    """Names in a folder that a bundle there put into it: by its manifest and its engine records."""
    try:
        files = set(Manifest.read(folder).files)
    except InputError:
        return set()
    return files | _engine_files(folder) | {MANIFEST_FILE, REPORT_FILE, ENGINES_FILE}


def _engine_files(folder: Path) -> set[str]:
    try:
        records = read_document(folder / ENGINES_FILE)["engines"]
        return {record[key] for record in records for key in ("file", "graph_file") if Path(record[key]).name == record[key]}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _exchange(first: Path, second: Path) -> None:
    """Swaps two folders in one step where the kernel can (renameat2), else in three renames."""
    at_fdcwd, rename_exchange = -100, 2
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is not None and renameat2(at_fdcwd, os.fsencode(first), at_fdcwd, os.fsencode(second), rename_exchange) == 0:
        return
    aside = first.with_name(first.name + ".old")
    os.rename(second, aside)
    os.rename(first, second)
    os.rename(aside, first)


def _sync(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
