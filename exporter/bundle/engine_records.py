"""Reads, writes and checks engines.json, which has one record for each engine of a bundle.

The package `engines` builds and runs the engines.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from exporter.bundle.bundle import ENGINES_FILE, Bundle, sha256_of
from exporter.bundle.manifest import check_format_version, is_sha256
from exporter.common.documents import is_inside, read_document, to_json, unreadable
from exporter.common.errors import BundleError
from exporter.spec.catalogue import LARGEST_COUNT, short
from exporter.spec.tensors import CAPACITY, TOTAL, TensorSpec

FORMAT_VERSION = 1
ENGINES_KEYS = ("format_version", "engines")
OPTION_KEYS = (
    *("workspace_mib", "builder_optimization_level", "timing_cache", "version_compatible", "hardware_compatibility"),
    *("strip_plan", "refit", "profiling_verbosity", "tf32"),
)
SWITCHES = ("timing_cache", "version_compatible", "strip_plan", "refit", "tf32")  # options that are true or false
PROFILE_KEYS, RANGE_KEYS = ("name", "ranges"), ("min", "opt", "max")


@dataclass(frozen=True)
class EngineRecord:
    """The record of one engine.

    Attributes:
        file, size_bytes, sha256: the engine's file in the folder.
        graph_file: the ONNX file with fixed capacity that the engine was built from.
        backend, version: "tensorrt" or "tensorrt-rtx", and its version.
        compute_capability: compute capability of the GPU it was built on; None where the engine is portable.
        portability: the GPUs that it can run on, as text.
        profiles: names and ranges of its optimization profiles.
        cache_capacity: cache rows per sequence; None where the graph has no cache.
        dtypes: tensor name → dtype of every input and output.
        lineage: file name → SHA-256 of the graph and the weights it was built from.
        options: the options of the build.
        build_seconds, peak_memory_bytes: time and memory of the build.
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

    def decode_capacity(self) -> int:
        """Returns the cache rows per sequence of an engine that decodes.

        Raises:
            BundleError: the engine has no cache.
        """
        if self.cache_capacity is None:
            raise BundleError(
                f"engine {self.file}: its record has no cache_capacity, expected a number to decode with; build again"
            )
        return self.cache_capacity

    def largest_shapes(self) -> list[dict[str, list[int]]]:
        """Returns the largest shape of each input, for each profile."""
        return [{name: shapes["max"] for name, shapes in profile["ranges"].items()} for profile in self.profiles]


def runtime_cache_name(engine_file: str) -> str:
    """Returns the name of the file beside an engine in which TensorRT-RTX keeps kernels that it compiled."""
    return f"{engine_file}.runtime_cache"


RECORD_KEYS = tuple(field.name for field in fields(EngineRecord))


def read_records(folder: Path) -> list[EngineRecord]:
    """Returns the records of a folder; none where there is no engines.json.

    Raises:
        BundleError: engines.json is damaged or of an unknown format.
    """
    path = folder / ENGINES_FILE
    if not path.is_file():
        return []
    remedy = "remove it and build again"
    try:
        data = read_document(path)
        if not isinstance(data, dict) or "format_version" not in data:
            raise TypeError("expected an object with a format_version")
        check_format_version(data, FORMAT_VERSION, str(path), remedy)
        if set(data) != set(ENGINES_KEYS):
            raise TypeError(f"expected an object of {', '.join(ENGINES_KEYS)}")
        records = [_typed(EngineRecord(**record)) for record in data["engines"]]
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        if isinstance(error, BundleError):
            raise
        raise BundleError(f"{path}: {unreadable(error, 'it is damaged', remedy)}") from None
    twice = [name for name, count in Counter(record.file for record in records).items() if count > 1]
    if twice:
        raise BundleError(f"{path}: it is damaged (several records of {', '.join(twice)}); {remedy}")
    return records


def records_json(records: list[EngineRecord]) -> str:
    """Returns the content of engines.json. Equal records give equal bytes."""
    return to_json({"format_version": FORMAT_VERSION, "engines": [asdict(record) for record in records]})


def _typed(record: EngineRecord) -> EngineRecord:
    """Returns the record after a check of its values.

    Raises:
        TypeError: a value has another type than its field, or is out of range.
    """
    kinds: dict[Any, tuple[str, ...]] = {
        str: ("file", "sha256", "graph_file", "backend", "version", "portability"),
        dict: ("dtypes", "lineage", "options"),
        list: ("profiles",),
        int: ("size_bytes", "peak_memory_bytes"),
        (int, float): ("build_seconds",),
        (str, type(None)): ("compute_capability",),
        (int, type(None)): ("cache_capacity",),
    }
    for kind, names in kinds.items():
        for name in names:
            if not isinstance(getattr(record, name), kind) or isinstance(getattr(record, name), bool):
                raise TypeError(f"{name} is {type(getattr(record, name)).__name__}")
    if Path(record.file).name != record.file or Path(record.graph_file).name != record.graph_file:
        raise TypeError("it names a file outside of its folder")
    if not is_sha256(record.sha256) or not all(is_sha256(checksum) for checksum in record.lineage.values()):
        raise TypeError("a checksum is no SHA-256")
    if not all(isinstance(dtype, str) for dtype in record.dtypes.values()):
        raise TypeError("a dtype is no text")
    if set(record.options) != set(OPTION_KEYS):
        raise TypeError(f"options {sorted(set(record.options) ^ set(OPTION_KEYS))} are unknown or missing")
    if not all(isinstance(record.options[name], bool) for name in SWITCHES):
        raise TypeError(f"one of the options {', '.join(SWITCHES)} is neither true nor false")
    numbers = (record.size_bytes, record.build_seconds, record.peak_memory_bytes)
    capacity_fits = record.cache_capacity is None or 1 <= record.cache_capacity < 2**63
    if not capacity_fits or not all(0 <= value < 2**63 for value in numbers):
        raise TypeError("it holds numbers out of range")
    for profile in record.profiles:
        _check_profile(profile)
    return record


def _check_profile(profile: dict) -> None:
    """Checks that a profile is a name and ranges of whole numbers.

    Raises:
        TypeError: it has another form.
    """
    if set(profile) != set(PROFILE_KEYS) or not isinstance(profile["name"], str):
        raise TypeError(f"a profile is {sorted(profile)}, expected {', '.join(PROFILE_KEYS)}")
    for name, shapes in profile["ranges"].items():
        sizes = [size for shape in shapes.values() for size in shape]
        alike = set(shapes) == set(RANGE_KEYS) and len({len(shape) for shape in shapes.values()}) == 1
        if not alike or not all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in sizes):
            raise TypeError(f"the shapes of {name[:80]} are {short(shapes)}")


def file_problem(folder: Path, record: EngineRecord, verify: str = "size") -> str | None:
    """Returns the problem of an engine's file; None where there is none.

    Args:
        folder: the bundle's folder.
        record: the engine's record.
        verify: "size" compares the size; "full" also compares the checksum.
    """
    path = folder / record.file
    if not path.is_file():
        return "it is missing; build again"
    if not is_inside(path, folder):
        return "it is a link that leads out of the folder; build again"
    size = path.stat().st_size
    if size != record.size_bytes:
        return f"it is not the file that was built ({size:,} bytes, expected {record.size_bytes:,}); build again"
    if verify == "full" and sha256_of(path) != record.sha256:
        return "it is not the file that was built (another SHA-256); build again"
    return None


def size_problem(bundle: Bundle, record: EngineRecord) -> str | None:
    """Returns the problem of the size in a record; None where there is none.

    A file larger than weights and kernels can be is neither hashed nor loaded.
    """
    if record.size_bytes > bundle.largest_engine:
        return f"it has {record.size_bytes:,} bytes, more than an engine of these weights has; build again"
    return None


def profile_problem(bundle: Bundle, record: EngineRecord) -> str | None:
    """Returns what a record's profiles say that no engine of the bundle can take; None where there is nothing.

    Every input has a shape with the axes of the contract, one symbol has one size, and min ≤ opt ≤ max. How large an
    engine's own profiles are, only the engine knows; the runtime reads them from it.
    """
    specs = {spec.name: spec for spec in bundle.manifest.contract.inputs}
    for profile in record.profiles:
        name, ranges = short(profile["name"]), profile["ranges"]
        if set(ranges) != set(specs):
            return f"profile {name} has the inputs {short(sorted(ranges))}, expected {sorted(specs)}; build again"
        smallest: dict[str, int] = {}
        for kind in RANGE_KEYS:
            sizes = {} if record.cache_capacity is None else {CAPACITY: record.cache_capacity}
            for tensor, spec in specs.items():
                problem = _shape_problem(ranges[tensor][kind], spec, sizes)
                if problem:
                    return f"profile {name}, {kind} {tensor}: {problem}; build again"
            less = sorted(axis for axis in smallest if sizes[axis] < smallest[axis])
            if less or sizes.get(TOTAL, 0) > (record.cache_capacity or LARGEST_COUNT):
                what = less[0] if less else TOTAL
                return f"profile {name}: {what} is {sizes[what]} in {kind}, expected min ≤ opt ≤ max; build again"
            smallest = sizes
    return None


def _shape_problem(shape: list[int], spec: TensorSpec, sizes: dict[str, int]) -> str | None:
    """Compares a shape with the axes of its input; `sizes` gets the size of each symbol that it has none of yet."""
    expected = [
        axis if isinstance(axis, int) else sizes.setdefault(axis, shape[place] if place < len(shape) else 0)
        for place, axis in enumerate(spec.axes)
    ]
    return None if shape == expected and min(shape, default=1) >= 1 else f"got {shape}, expected {expected}"


def changed_origins(bundle: Bundle, record: EngineRecord) -> list[str]:
    """Returns the names of those files, graph or weights, that differ from what an engine was built from."""
    return sorted(name for name, checksum in bundle.lineage.items() if record.lineage.get(name) != checksum)
