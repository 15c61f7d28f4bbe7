"""engines.json: one record per engine of a bundle, and the question whether an engine may be used here."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from engines.gpu import Gpu
from exporter.bundle import ENGINES_FILE, Bundle, sha256_of, to_json
from exporter.catalogue import short
from exporter.documents import is_inside, read_document
from exporter.errors import BundleError
from exporter.placing import write_atomically

FORMAT_VERSION = 1
BUILD_OPTIONS = ("version_compatible",)  # what deciding about an engine needs of its options


@dataclass(frozen=True)
class EngineRecord:
    """What is known of one engine.

    Attributes:
        file, size_bytes, sha256: the engine's file in the folder.
        graph_file: the ONNX file with the capacity fixed that it was built from.
        backend, version: "tensorrt" or "tensorrt-rtx", and its version.
        compute_capability: of the GPU it was built on, or None where it is portable.
        portability: the GPUs it is meant for, in words.
        profiles: names and ranges.
        cache_capacity: cache rows per sequence; None where the graph has no cache.
        dtypes: tensor name → dtype of every input and output.
        lineage: SHA-256 of the graph and weights it came from, by file name.
        options: how it was built.
        build_seconds, peak_memory_bytes: what the build took.
    """

    file: str
    size_bytes: int
    sha256: str
    graph_file: str
    backend: str
    version: str
    compute_capability: str | None
    portability: str
    profiles: list[dict]
    cache_capacity: int | None
    dtypes: dict[str, str]
    lineage: dict[str, str]
    options: dict
    build_seconds: float
    peak_memory_bytes: int


def read_records(folder: Path) -> list[EngineRecord]:
    """The records of a folder, none where there is no engines.json.

    Raises:
        BundleError: engines.json is damaged or of an unknown format.
    """
    path = folder / ENGINES_FILE
    if not path.is_file():
        return []
    try:
        data = read_document(path)
        if data["format_version"] != FORMAT_VERSION:
            raise BundleError(f"{path}: got format_version {short(data['format_version'])}, expected {FORMAT_VERSION}; build again")
        return [_typed(EngineRecord(**record)) for record in data["engines"]]
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        if isinstance(error, BundleError):
            raise
        raise BundleError(f"{path}: it is damaged ({str(error)[:300]}); remove it and build again") from None


def _typed(record: EngineRecord) -> EngineRecord:
    """The record, its values of the kinds that its fields say; raises TypeError where they are not."""
    kinds = {
        str: ("file", "sha256", "graph_file", "backend", "version", "portability"),
        dict: ("dtypes", "lineage", "options"),
        list: ("profiles",),
        (int, float): ("size_bytes", "build_seconds", "peak_memory_bytes"),
        (str, type(None)): ("compute_capability",),
        (int, type(None)): ("cache_capacity",),
    }
    for kind, names in kinds.items():
        for name in names:
            if not isinstance(getattr(record, name), kind) or isinstance(getattr(record, name), bool):
                raise TypeError(f"{name} is {type(getattr(record, name)).__name__}")
    if Path(record.file).name != record.file or Path(record.graph_file).name != record.graph_file:
        raise TypeError("it names a file outside of its folder")
    if set(BUILD_OPTIONS) - set(record.options):
        raise TypeError(f"options miss {sorted(set(BUILD_OPTIONS) - set(record.options))}")
    for texts in (record.dtypes, record.lineage):
        if not all(isinstance(text, str) for text in texts.values()):
            raise TypeError("dtypes or lineage hold something else than texts")
    if not all(0 <= value < 2**63 for value in (record.size_bytes, record.build_seconds, record.peak_memory_bytes, record.cache_capacity or 0)):
        raise TypeError("it holds numbers that nothing can have")
    for profile in record.profiles:
        _check_profile(profile)
    return record


def _check_profile(profile: dict) -> None:
    if not isinstance(profile["name"], str):
        raise TypeError(f"a profile is called {short(profile['name'])}")
    for name, r in profile["ranges"].items():
        shapes = (r["min"], r["opt"], r["max"])
        if len({len(shape) for shape in shapes}) != 1 or not all(isinstance(size, int) and size >= 0 for shape in shapes for size in shape):
            raise TypeError(f"the range of {name[:80]} is {short(r)}")


def publish(folder: Path, temporary_engine: Path, record: EngineRecord) -> None:
    """Puts a finished engine and its record in place; builds that end at the same time take turns.

    The record is taken out first and put back last, so that a run killed in between leaves an engine without a record,
    which nothing uses, and never a record of another engine.
    """
    with locked(folder):
        others = [other for other in read_records(folder) if other.file != record.file]
        _write(folder, others)
        os.replace(temporary_engine, folder / record.file)
        _write(folder, [*others, record])


def _write(folder: Path, records: list[EngineRecord]) -> None:
    write_atomically(folder / ENGINES_FILE, to_json({"format_version": FORMAT_VERSION, "engines": [asdict(r) for r in records]}))


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the folder for one writer of engines."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def check_engine(folder: Path, record: EngineRecord, verify: str = "size") -> None:
    """Checks an engine's file against its record: size, and with verify="full" its checksum.

    Raises:
        BundleError: the file is missing or not the one that was built.
    """
    path = folder / record.file
    if not path.is_file() or not is_inside(path, folder):
        raise BundleError(f"engine {path}: it is missing, or a link that leads out of its folder; build again")
    if path.stat().st_size != record.size_bytes or (verify == "full" and sha256_of(path) != record.sha256):
        raise BundleError(f"engine {path}: it is not the file that was built (size or SHA-256 differ); build again")


def check_lineage(bundle: Bundle, record: EngineRecord) -> None:
    """Refuses an engine whose graph or weights are not the bundle's, or that is larger than one of these weights can be.

    Raises:
        BundleError: names what changed.
    """
    if record.size_bytes > bundle.largest_engine:
        path = bundle.folder / record.file
        raise BundleError(f"engine {path}: it has {record.size_bytes:,} bytes, more than an engine of these weights has; build again")
    changed = sorted(name for name, checksum in bundle.lineage.items() if record.lineage.get(name) != checksum)
    if changed:
        raise BundleError(f"engine {bundle.folder / record.file}: {', '.join(changed)} changed since it was built; build again")


def check_runnable(record: EngineRecord, backend: str, version: str, gpus: Sequence[Gpu]) -> None:
    """Refuses an engine of another backend, version or GPU, before anything of it is loaded.

    Raises:
        BundleError: "built with X, this is Y".
    """
    if record.backend != backend:
        raise BundleError(f"engine {record.file}: built with {record.backend} {record.version}, this is {backend} {version}; build again with it")
    if record.version != version and not record.options["version_compatible"]:
        raise BundleError(f"engine {record.file}: built with {record.backend} {record.version}, this is {version}; build again")
    if not gpus:
        raise BundleError(f"engine {record.file}: it needs a GPU, and none is visible")
    here = gpus[0]
    if record.compute_capability is not None and record.compute_capability != here.compute_capability:
        raise BundleError(
            f"engine {record.file}: built for compute capability {record.compute_capability}, this is {here.name} with "
            f"{here.compute_capability}; build again here, or build with --hardware-compatibility"
        )
