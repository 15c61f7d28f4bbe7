"""Verifies a bundle: checks every file in its folder and gathers all problems before it reports any.

There are two kinds of problem. Damage: a file is not the one that was written. A broken contract: the graph is the one
that was written, but it does not keep its contract.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from exporter.bundle.bundle import ENGINES_FILE, REPORT_FILE, Bundle
from exporter.bundle.engine_records import (
    EngineRecord,
    changed_origins,
    file_problem,
    profile_problem,
    read_records,
    size_problem,
)
from exporter.bundle.genai_config import TOKEN_KEYS, genai_config
from exporter.bundle.manifest import (
    GENAI_CONFIG_FILE,
    GRAPH_FILE,
    MANIFEST_FILE,
    TOKENIZER_FILES,
    Manifest,
    graph_beside,
    graph_files,
)
from exporter.bundle.tokenizer import open_tokenizer
from exporter.common.documents import is_inside, read_document
from exporter.common.errors import BundleError, CheckFailed, together
from exporter.common.timing import timed
from exporter.graph.contract_check import graph_problems
from exporter.graph.fixed_capacity import fixed_graph_problem

log = logging.getLogger(__name__)

DAMAGE, CONTRACT = "damage", "contract"


@dataclass(frozen=True)
class Problem:
    """One problem of one file.

    Attributes:
        kind: "damage" or "contract".
        file: path of the file in the bundle.
        problem: the problem and its fix, in words.
    """

    kind: str
    file: str
    problem: str

    def __str__(self) -> str:
        return f"{self.file}: {self.problem}"


@dataclass(frozen=True)
class Verification:
    """The files of a bundle's folder that were checked, and their problems.

    Attributes:
        folder: the bundle's folder.
        bundle: the bundle; None where the manifest could not be read, and then no other file was checked.
        files: every file that was checked.
        problems: all problems; empty for a whole bundle.
        others: files in the folder that belong neither to the bundle nor to its engines.
    """

    folder: Path
    bundle: Bundle | None
    files: tuple[str, ...]
    problems: tuple[Problem, ...]
    others: tuple[str, ...]

    def check(self) -> None:
        """Raises one error that names all problems, where there are any.

        Raises:
            BundleError: a file is damaged.
            CheckFailed: no file is damaged, but the graph breaks its contract.
        """
        if self.problems:
            kind = BundleError if any(problem.kind == DAMAGE for problem in self.problems) else CheckFailed
            raise kind(together(f"bundle {self.folder}", [str(problem) for problem in self.problems]))

    def to_dict(self) -> dict:
        """Returns one JSON document; where the manifest could not be read, it ends before `written_by`."""
        document = {
            "bundle": str(self.folder),
            "passed": not self.problems,
            "problems": [asdict(problem) for problem in self.problems],
            "files": list(self.files),
            "other_files": list(self.others),
        }
        return document | (self._identity(self.bundle) if self.bundle is not None else {})

    def _identity(self, bundle: Bundle) -> dict:
        manifest = bundle.manifest
        try:
            report = bundle.read_report()
        except BundleError:
            report = {}
        validation = report.get("validation")
        return {
            "written_by": _producer(self.folder),
            "unit": str(manifest.unit),
            "dtype": manifest.dtype,
            "weights": manifest.weights,
            "validation_passed": validation.get("passed") if isinstance(validation, dict) else None,
            "versions": report.get("versions", {}),
            "engines": [
                {
                    "file": f"{prefix}{record.file}",
                    "backend": record.backend,
                    "version": record.version,
                    "cache_capacity": record.cache_capacity,
                }
                for prefix, part in _parts(bundle)
                for record in _records(part)
            ],
        }


def _producer(folder: Path) -> str:
    manifest = read_document(folder / MANIFEST_FILE)
    assert isinstance(manifest, dict), "Bundle.read has checked it"
    return manifest["producer"]


def verify_bundle(folder: str | Path) -> Verification:
    """Checks every file in a bundle's folder.

    Raises:
        BundleError: the folder has no manifest. `Verification.check` raises for a damaged bundle.
    """
    folder = Path(folder)
    try:
        bundle = Bundle.read(folder)
    except BundleError as error:
        if not (folder / MANIFEST_FILE).is_file():
            raise
        reason = str(error).removeprefix(f"{folder / MANIFEST_FILE}: ")
        return Verification(folder, None, (MANIFEST_FILE,), (Problem(DAMAGE, MANIFEST_FILE, reason),), ())
    files = (
        MANIFEST_FILE,
        *bundle.manifest.files,
        *(name for name in (REPORT_FILE,) if (folder / name).exists()),
        *_engine_files(bundle),
    )
    problems = (
        *_graph_problems(bundle),
        *_text_problems(bundle),
        *_report_problems(bundle),
        *_all_engine_problems(bundle),
    )
    return Verification(folder, bundle, files, problems, _other_files(folder, set(files)))


def _parts(bundle: Bundle) -> list[tuple[str, Bundle]]:
    """Returns each graph's own bundle, with the prefix of its files' names in the whole bundle."""
    return [(f"{part.folder.name}/" if bundle.manifest.parts else "", part) for part in bundle.parts]


def _records(bundle: Bundle) -> list[EngineRecord]:
    """Returns a graph's engine records; none where they cannot be read, which `_all_engine_problems` reports."""
    try:
        return read_records(bundle.folder)
    except BundleError:
        return []


def _engine_files(bundle: Bundle) -> list[str]:
    names: dict[str, None] = {}  # an ordered set, because engines may share a graph
    for prefix, part in _parts(bundle):
        if (part.folder / ENGINES_FILE).is_file():
            names[f"{prefix}{ENGINES_FILE}"] = None
        for record in _records(part):
            names |= {
                f"{prefix}{name}": None for name in (record.file, record.graph_file) if name not in ("", GRAPH_FILE)
            }
    return list(names)


def _other_files(folder: Path, known: set[str]) -> tuple[str, ...]:
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return tuple(sorted(found - known))


# --- the manifest's files ---------------------------------------------------------------------------------------------


def _graph_problems(bundle: Bundle) -> Iterator[Problem]:
    """Yields problems of all files that the manifest lists, and of the graphs among them."""
    with timed(log, "sizes and checksums of %s", ", ".join(bundle.manifest.files)):
        damaged, misshapen = bundle.problems("full")
    yield from (Problem(DAMAGE, name, f"it {problem}") for name, problem in damaged.items())
    suspect = {*map(graph_beside, damaged), *misshapen}
    for prefix, part in _parts(bundle):
        name = f"{prefix}{GRAPH_FILE}"
        if part.graph_path.is_file() and is_inside(part.graph_path, part.folder):
            with timed(log, "%s against its contract", name):
                problems = graph_problems(part.graph_path, part.manifest.contract, trusted=name not in suspect)
            yield from (
                Problem(CONTRACT, name, problem)
                for problem in (*problems, *([misshapen[name]] if name in misshapen else []))
            )


def _text_problems(bundle: Bundle) -> Iterator[Problem]:
    """Yields problems of the tokenizer's files, of genai_config.json and of the end tokens."""
    manifest = bundle.manifest
    listed = set(manifest.files) - set(graph_files(len(manifest.parts)))
    growing = manifest.unit.cache == "growing"
    if growing != (GENAI_CONFIG_FILE in listed):
        listing = f"{'no ' if growing else ''}{GENAI_CONFIG_FILE}"
        yield Problem(DAMAGE, MANIFEST_FILE, f"it lists {listing} for a cache that is {manifest.unit.cache}")
    of_tokenizer = sorted(listed & set(TOKENIZER_FILES))
    if manifest.unit.kind != "model" and of_tokenizer:
        names = ", ".join(of_tokenizer)
        yield Problem(DAMAGE, MANIFEST_FILE, f"it lists {names} for a {manifest.unit}, which has no tokens")
    for name in sorted(listed):
        if (bundle.folder / name).is_file() and name.endswith(".json"):
            yield from (Problem(DAMAGE, name, f"{problem}; export again") for problem in _json_problems(bundle, name))
    beyond = [token for token in manifest.end_token_ids if token >= manifest.config.vocab_size]
    if beyond:
        size = manifest.config.vocab_size
        problem = f"got end_token_ids {beyond}, expected tokens below {size:,}, the size of the vocabulary"
        yield Problem(DAMAGE, MANIFEST_FILE, problem)


def _json_problems(bundle: Bundle, name: str) -> Iterator[str]:
    manifest = bundle.manifest
    try:
        data = read_document(bundle.folder / name)
    except (OSError, ValueError) as error:
        yield f"it is not JSON ({str(error)[:200]})"
        return
    if name == GENAI_CONFIG_FILE:
        yield from _genai_problems(manifest, data)
    if name == "tokenizer.json":
        try:
            largest = max(open_tokenizer(bundle).get_vocab().values(), default=0)
        except BundleError as error:
            yield str(error)
            return
        if largest >= manifest.config.vocab_size:
            size = manifest.config.vocab_size
            yield f"its largest token is {largest:,}, expected one below {size:,}, the size of the vocabulary"


def _genai_problems(manifest: Manifest, data: object) -> Iterator[str]:
    settings = genai_config(manifest.config, manifest.max_positions, manifest.end_token_ids, GRAPH_FILE)
    expected = json.loads(json.dumps(settings))
    model = data.get("model") if isinstance(data, dict) else None
    for key in TOKEN_KEYS:  # the manifest does not have them, so any token may be right
        expected["model"].pop(key, None)
        if isinstance(model, dict) and key in model:
            token = expected["model"][key] = model[key]
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                yield f"model.{key}: got {token!r:.80}, expected a whole number of at least 0"
    yield from _differences(data, expected)


def _differences(got: object, expected: object, place: str = "") -> Iterator[str]:
    """Yields the differences between two JSON values, by dotted key."""
    if isinstance(got, dict) and isinstance(expected, dict):
        for key in sorted({*got, *expected}):
            yield from _differences(got.get(key), expected.get(key), f"{place}.{key}" if place else key)
    elif got != expected:
        yield f"{place or 'it'}: got {got!r:.80}, expected {expected!r:.80}"


def _report_problems(bundle: Bundle) -> Iterator[Problem]:
    try:
        report = bundle.read_report()
    except BundleError as error:
        yield Problem(DAMAGE, REPORT_FILE, str(error).removeprefix(f"{bundle.folder / REPORT_FILE}: "))
        return
    validated = report.get("validation", {}).get("files")  # older reports do not name them
    expected = {name: bundle.manifest.files[name]["sha256"] for name in graph_files(len(bundle.manifest.parts))}
    if validated not in (None, expected):
        yield Problem(DAMAGE, REPORT_FILE, "its validation read other files than the manifest lists; validate again")


# --- engines ----------------------------------------------------------------------------------------------------------


def _all_engine_problems(bundle: Bundle) -> Iterator[Problem]:
    for prefix, part in _parts(bundle):
        try:
            records = read_records(part.folder)
        except BundleError as error:
            yield Problem(DAMAGE, f"{prefix}{ENGINES_FILE}", str(error).removeprefix(f"{part.folder / ENGINES_FILE}: "))
            continue
        for record in records:
            log.info("%s%s: its file, origin and record", prefix, record.file)
            yield from (Problem(DAMAGE, f"{prefix}{name}", problem) for name, problem in _engine_problems(part, record))


def _engine_problems(bundle: Bundle, record: EngineRecord) -> Iterator[tuple[str, str]]:
    """Yields problems of one engine: its file, its origin, its graph and its record, each with the file's name."""
    manifest = bundle.manifest
    problem = size_problem(bundle, record) or file_problem(bundle.folder, record, verify="full")
    if problem:
        yield record.file, problem
    changed = changed_origins(bundle, record)
    for name in changed:
        was, expected = record.lineage.get(name, "unknown"), bundle.lineage[name]
        checksums = f"SHA-256 {was:.12}…, the bundle's is {expected:.12}…"
        yield record.file, f"it came from another {name} ({checksums}); build again"
    dtypes = {spec.name: spec.dtype for spec in (*manifest.contract.inputs, *manifest.contract.outputs)}
    if record.dtypes != dtypes:
        differing = sorted(name for name in {*record.dtypes, *dtypes} if record.dtypes.get(name) != dtypes.get(name))
        names = ", ".join(differing)
        yield record.file, f"its record has other tensors or dtypes than the bundle at {names}; build again"
    if problem := profile_problem(bundle, record):
        yield record.file, f"its record contradicts the graph: {problem}"
    capacity = record.cache_capacity
    fits = capacity is None or 1 <= capacity <= manifest.max_positions
    if (capacity is not None) != manifest.unit.has_cache or not fits:
        unit = f"a {manifest.unit} of {manifest.max_positions} positions"
        yield record.file, f"its record has cache_capacity {capacity} for {unit}; build again"
    elif not is_inside(bundle.folder / record.graph_file, bundle.folder):
        yield record.graph_file, "it is a link to a file outside of the folder; build again"
    elif capacity is not None and GRAPH_FILE not in changed and not bundle.file_problems([GRAPH_FILE]):
        problem = fixed_graph_problem(bundle.folder / record.graph_file, bundle.graph_path, capacity)
        if problem:
            yield record.graph_file, problem
