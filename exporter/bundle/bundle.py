"""The bundle: a folder that one stage passes to the next, written completely or not at all.

    model.onnx  model.onnx.data  manifest.json  report.json  engines.json  engines  tokenizer files

manifest.json describes the bundle (`exporter.bundle.manifest`), report.json has its measurements, and engines.json
lists the engines that were compiled from it. This module needs no torch and no onnx.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from exporter.bundle.graph_form import check_graph_form
from exporter.bundle.manifest import DATA_FILE, GRAPH_FILE, MANIFEST_FILE, Manifest, graph_beside, part_folder
from exporter.common.documents import LARGEST_BYTES, is_inside, is_text, read_document, unreadable
from exporter.common.errors import BundleError, InputError, together
from exporter.common.timing import timed
from exporter.spec.catalogue import short

log = logging.getLogger(__name__)

REPORT_FILE = "report.json"
ENGINES_FILE = "engines.json"
VERIFY = ("graph", "full")  # the checksums that opening takes: of the graph, or of every file

_REPORT_REMEDY = "remove it and run `python -m exporter validate {}` again"


@dataclass(frozen=True)
class Bundle:
    """An opened bundle.

    Attributes:
        folder: its folder.
        manifest: its manifest.
        whole: the bundle that this one is a part of; None where it is no part.
        written: device, inode and change time of the manifest's file, which differ in a bundle that replaced this one.
    """

    folder: Path
    manifest: Manifest
    whole: Bundle | None = field(default=None, compare=False, repr=False)
    written: tuple[int, int, int] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def open(cls, folder: str | Path, verify: str = "graph") -> Bundle:
        """Opens a bundle and checks its files against the manifest. If another run replaces the bundle, it starts
        again.

        Args:
            folder: the bundle's folder.
            verify: "graph" checks every size and the checksum of model.onnx; "full" every checksum.

        Raises:
            InputError: `verify` is unknown, or `folder` is no path.
            BundleError: a file is missing, truncated, changed or leads out of the folder, the manifest cannot be read,
                or the graph does not have the form of exports.
        """
        if verify not in VERIFY:
            raise InputError(f"verify: got {verify!r}, expected one of {', '.join(VERIFY)}")
        while True:
            bundle = cls.read(folder)
            files = bundle.manifest.files
            hashed = [name for name in files if verify == "full" or name.rpartition("/")[2] == GRAPH_FILE]
            with timed(log, "%s: sizes of %d files, checksums of %s", bundle.folder, len(files), ", ".join(hashed)):
                damaged, misshapen = bundle.problems(verify)
            if _written(bundle.folder / MANIFEST_FILE) == bundle.written:
                break  # else an export has replaced the folder since its manifest was read
        if damaged:
            problems = [f"{name} {problem}" for name, problem in damaged.items()]
            raise BundleError(together(f"bundle {bundle.folder}", problems))
        for name, problem in misshapen.items():
            raise BundleError(f"{bundle.folder / name}: {problem}; export the bundle again")
        manifest, mib = bundle.manifest, bundle.manifest.weights_bytes / 2**20
        log.info("%s: %s, %s, weights of %.1f MiB", bundle.folder, manifest.unit, manifest.dtype, mib)
        return bundle

    @classmethod
    def read(cls, folder: str | Path) -> Bundle:
        """Reads a bundle's manifest and no other file. The stages use `open`, which also checks the files.

        Raises:
            InputError: `folder` is no path.
            BundleError: there is no manifest, or it cannot be read.
        """
        if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
            raise InputError(f"bundle: got {folder!r}, expected the path of its folder")
        folder = Path(folder)
        path = folder / MANIFEST_FILE
        if not is_text(folder):
            raise BundleError(
                f"bundle {folder}: its path is not valid UTF-8, which onnx and onnxruntime cannot open; rename it"
            )
        if not path.is_file():
            what = "not a folder" if folder.exists() else "no such folder"
            if folder.is_dir():
                what = f"it holds no {MANIFEST_FILE}"
            raise BundleError(f"bundle {folder}: {what}; make one with `python -m exporter export … -o {folder}`")
        written = _written(path)
        return cls(folder, Manifest.read(folder), written=written)

    def check_unchanged(self) -> None:
        """Checks that nothing has replaced the bundle's folder since the bundle was opened.

        Raises:
            BundleError: another bundle, or a new export of the same one, is there now.
        """
        whole = self.whole or self
        if whole.written is not None and _written(whole.folder / MANIFEST_FILE) != whole.written:
            raise BundleError(
                f"bundle {whole.folder}: an export has replaced it since it was opened; the result is void; run again"
            )

    def problems(self, verify: str) -> tuple[dict[str, str], dict[str, str]]:
        """Returns the problems of the files that the manifest lists, and of graphs without the form of exports.

        The form of a graph is checked only where its files are complete. The checksums of data are taken last, and only
        where the graph has the expected form.

        Args:
            verify: "graph" takes the checksums of graphs, "full" takes those of all files.

        Returns:
            File name → problem of the file, and file name → problem of the graph's form.
        """
        graphs = [name for name in self.manifest.files if name.rpartition("/")[2] == GRAPH_FILE]
        damaged = self.file_problems(graphs)
        misshapen = self._form_problems(damaged)
        if verify == "full":
            others = (name for name in self.manifest.files if name not in graphs)
            damaged |= self.file_problems([name for name in others if graph_beside(name) not in misshapen])
        return damaged, misshapen

    def _form_problems(self, damaged: Collection[str]) -> dict[str, str]:
        found = {}
        for part in self.parts:
            graph, data = ((part.folder / name).relative_to(self.folder).as_posix() for name in (GRAPH_FILE, DATA_FILE))
            if graph in damaged or data in damaged:
                continue
            try:
                check_graph_form(part.graph_path, part.manifest)
            except ValueError as error:
                found[graph] = str(error)
            except OSError as error:  # an export may replace the folder at this moment
                found[graph] = f"it cannot be read ({error.strerror})"
        return found

    def file_problems(self, checksums: Collection[str]) -> dict[str, str]:
        """Returns file name → problem for the files that are missing, of another size or of another checksum.

        Args:
            checksums: names of the files whose checksum is taken.
        """
        problems = {}
        for name, entry in self.manifest.files.items():
            path = self.folder / name
            try:
                if not path.is_file():
                    raise FileNotFoundError
                if not is_inside(path, self.folder):
                    problems[name] = "is a link that leads out of the folder; put the file itself there"
                    continue
                size, expected = path.stat().st_size, entry["size_bytes"]
                if size != expected:
                    problems[name] = (
                        f"has {size:,} bytes, expected {expected:,}; it was truncated or replaced; export again"
                    )
                elif graph_beside(name) == name and size > LARGEST_BYTES:
                    problems[name] = f"has {size:,} bytes, expected at most {LARGEST_BYTES:,}; export again"
                elif name in checksums and (got := sha256_of(path)) != entry["sha256"]:
                    problems[name] = checksum_problem(got, entry["sha256"])
            except FileNotFoundError:  # an export may also replace the folder at this moment
                problems[name] = "is missing; restore it or export the bundle again"
        return problems

    @property
    def parts(self) -> list[Bundle]:
        """The bundle itself, or one bundle for each part where the unit has several graphs."""
        if not self.manifest.parts:
            return [self]
        return [
            Bundle(self.folder / part_folder(index), self.manifest.of_part(index), self)
            for index in range(len(self.manifest.parts))
        ]

    @property
    def largest_engine(self) -> int:
        """Upper bound of an engine's bytes: an engine holds the weights once, and kernels."""
        return 4 * self.manifest.weights_bytes + 2**31

    @property
    def graph_path(self) -> Path:
        return self.folder / GRAPH_FILE

    @property
    def lineage(self) -> dict[str, str]:
        """SHA-256 of the graph and of its weights, as the manifest has them.

        An engine's record is compared with them. What a record says about its own origin comes from
        `exporter.bundle.origin.Origin`, which reads the files.
        """
        return {name: self.manifest.files[name]["sha256"] for name in (GRAPH_FILE, DATA_FILE)}

    def read_report(self) -> dict:
        """Returns the measurements of this bundle; empty where there is no report.

        Raises:
            BundleError: the report is damaged.
        """
        path, remedy = self.folder / REPORT_FILE, _REPORT_REMEDY.format(self.folder)
        if not path.is_file():
            return {}
        try:
            report = read_document(path)
        except (OSError, ValueError) as error:
            raise BundleError(f"{path}: {unreadable(error, 'not JSON that can be read', remedy)}") from None
        if not isinstance(report, dict):
            raise BundleError(f"{path}: got a JSON {type(report).__name__}, expected an object; {remedy}")
        if not isinstance(report.get("validation", {}), dict):
            found = short(report["validation"])
            raise BundleError(f"{path}: got {found} at validation, expected an object; {remedy}")
        return report


def check_in_place(bundle: Bundle) -> None:
    """Checks that a bundle's cache is updated in place.

    Raises:
        InputError: the cache grows; the message names the runtimes for such a bundle.
    """
    if bundle.manifest.unit.cache != "in_place":
        raise InputError(
            f"bundle {bundle.folder}: its cache grows, expected one updated in place; optimum and onnxruntime-genai "
            'run such bundles; export it again with cache="in_place"'
        )


def _written(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise BundleError(f"{path}: cannot be read ({error.strerror})") from None
    return status.st_dev, status.st_ino, status.st_ctime_ns


def checksum_problem(got: str, expected: str) -> str:
    """Returns the problem of a file whose SHA-256 is not the manifest's, with the fix."""
    checksums = f"{got:.12}…, expected {expected:.12}…"
    return f"has another SHA-256 than the manifest says ({checksums}); it was changed; restore it or export again"


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file's content in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_entry(path: Path, sha256: str | None = None) -> dict:
    """Returns the manifest's record of one file. It takes the checksum unless the writer already has it."""
    return {"size_bytes": path.stat().st_size, "sha256": sha256 or sha256_of(path)}
