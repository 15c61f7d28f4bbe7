"""The bundle: a folder that one stage hands to the next, written whole or not at all.

    model.onnx  model.onnx.data  manifest.json  report.json  engines.json  engines  tokenizer files

manifest.json says what the bundle is (`exporter.bundle.manifest`); report.json what was measured; engines.json what was compiled from it.
This module needs no torch and no onnx.
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
from exporter.common.documents import LARGEST_BYTES, is_inside, is_text, read_document
from exporter.common.errors import BundleError, InputError, together
from exporter.common.timing import timed
from exporter.spec.catalogue import short

log = logging.getLogger(__name__)

REPORT_FILE = "report.json"
ENGINES_FILE = "engines.json"
VERIFY = ("graph", "full")  # which checksums opening takes: the graph's, or every file's

_REPORT_REMEDY = "remove it and run `python -m exporter validate {}` again"


@dataclass(frozen=True)
class Bundle:
    """An opened bundle.

    Attributes:
        folder: where it lies.
        manifest: what it is.
        whole: the bundle that this one is a part of.
        written: which file the manifest was read from (device, inode, change time), to tell a bundle from one that replaced it.
    """

    folder: Path
    manifest: Manifest
    whole: Bundle | None = field(default=None, compare=False, repr=False)
    written: tuple[int, int, int] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def open(cls, folder: str | Path, verify: str = "graph") -> Bundle:
        """Opens a bundle and checks its files against the manifest; one that is replaced meanwhile is opened anew.

        Args:
            folder: the bundle's folder.
            verify: "graph" checks every size and the checksum of model.onnx; "full" every checksum.

        Raises:
            BundleError: a file is missing, truncated, changed or leads out of the folder, the manifest cannot be read, or the
                graph is not of the form that exports have.
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
            raise BundleError(
                together(f"bundle {bundle.folder}", [f"{name} {problem}" for name, problem in damaged.items()])
            )
        for name, problem in misshapen.items():
            raise BundleError(f"{bundle.folder / name}: {problem}; export the bundle again")
        log.info(
            "%s: %s, %s, weights of %.1f MiB",
            bundle.folder,
            bundle.manifest.unit,
            bundle.manifest.dtype,
            bundle.manifest.weights_bytes / 2**20,
        )
        return bundle

    @classmethod
    def read(cls, folder: str | Path) -> Bundle:
        """Reads a bundle's manifest and looks at no other file; `open` is what stages use.

        Raises:
            InputError: `folder` is no path.
            BundleError: there is no manifest, or it cannot be read.
        """
        if not isinstance(folder, str | os.PathLike):
            raise InputError(f"bundle: got {folder!r}, expected the path of its folder")
        folder = Path(folder)
        path = folder / MANIFEST_FILE
        if not is_text(folder):
            raise BundleError(
                f"bundle {folder}: its path is not valid UTF-8, which onnx and onnxruntime cannot open; rename it"
            )
        if not path.is_file():
            what = (
                "no such folder"
                if not folder.exists()
                else "not a folder"
                if not folder.is_dir()
                else f"it holds no {MANIFEST_FILE}"
            )
            raise BundleError(f"bundle {folder}: {what}; make one with `python -m exporter export … -o {folder}`")
        written = _written(path)
        return cls(folder, Manifest.read(folder), written=written)

    def check_unchanged(self) -> None:
        """Refuses what was read from a bundle's folder if the folder was replaced since the bundle was opened.

        Raises:
            BundleError: another bundle, or the same one written anew, is there now.
        """
        whole = self.whole or self
        if whole.written is not None and _written(whole.folder / MANIFEST_FILE) != whole.written:
            raise BundleError(
                f"bundle {whole.folder}: an export has replaced it since it was opened; what was begun with it is void; run again"
            )

    def problems(self, verify: str) -> tuple[dict[str, str], dict[str, str]]:
        """What is wrong with the files that the manifest lists, and in what graphs are not of the form of exports, both by name.

        A graph is looked into only where its files are there and whole, and data are hashed last, where their graph says how much
        of them there is.

        Args:
            verify: "graph" takes the checksums of graphs, "full" those of all files.
        """
        graphs = [name for name in self.manifest.files if name.rpartition("/")[2] == GRAPH_FILE]
        damaged = self.file_problems(graphs)
        misshapen = self._form_problems(damaged)
        if verify == "full":
            others = [
                name for name in self.manifest.files if name not in graphs and graph_beside(name) not in misshapen
            ]
            damaged |= self.file_problems(others)
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
            except OSError as error:  # where an export replaces the folder at this moment
                found[graph] = f"it cannot be read ({error.strerror})"
        return found

    def file_problems(self, checksums: Collection[str]) -> dict[str, str]:
        """What is wrong with the files that the manifest lists, by name: all that are missing, of another size or, where
        asked, of another checksum.

        Args:
            checksums: names of the files to hash.
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
                if (size := path.stat().st_size) != entry["size_bytes"]:
                    problems[name] = (
                        f"has {size:,} bytes, expected {entry['size_bytes']:,}; it was truncated or replaced; export again"
                    )
                elif graph_beside(name) == name and size > LARGEST_BYTES:
                    problems[name] = f"has {size:,} bytes, expected at most {LARGEST_BYTES:,}; export again"
                elif name in checksums and sha256_of(path) != entry["sha256"]:
                    problems[name] = "has another SHA-256 than the manifest says; it was changed; export again"
            except FileNotFoundError:  # also where an export replaces the folder at this moment
                problems[name] = "is missing; restore it or export the bundle again"
        return problems

    @property
    def parts(self) -> list[Bundle]:
        """The bundle itself, or one bundle for each part where the unit lies in several graphs."""
        if not self.manifest.parts:
            return [self]
        return [
            Bundle(self.folder / part_folder(index), self.manifest.of_part(index), self)
            for index in range(len(self.manifest.parts))
        ]

    @property
    def largest_engine(self) -> int:
        """Bytes that no engine of this bundle reaches: they hold the weights once, and kernels."""
        return 4 * self.manifest.weights_bytes + 2**31

    @property
    def graph_path(self) -> Path:
        return self.folder / GRAPH_FILE

    @property
    def lineage(self) -> dict[str, str]:
        """SHA-256 of the graph and of its weights: what an engine records as its origin."""
        return {name: self.manifest.files[name]["sha256"] for name in (GRAPH_FILE, DATA_FILE)}

    def read_report(self) -> dict:
        """What was measured of this bundle; empty where nothing was.

        Raises:
            BundleError: the report is damaged.
        """
        path = self.folder / REPORT_FILE
        if not path.is_file():
            return {}
        try:
            report = read_document(path)
        except (OSError, ValueError) as error:
            raise BundleError(
                f"{path}: not JSON that can be read ({str(error)[:300]}); {_REPORT_REMEDY.format(self.folder)}"
            ) from None
        if not isinstance(report, dict):
            raise BundleError(
                f"{path}: got a JSON {type(report).__name__}, expected an object; {_REPORT_REMEDY.format(self.folder)}"
            )
        if not isinstance(report.get("validation", {}), dict):
            raise BundleError(
                f"{path}: got {short(report['validation'])} at validation, expected an object; {_REPORT_REMEDY.format(self.folder)}"
            )
        return report


def check_in_place(bundle: Bundle) -> None:
    """Refuses a bundle whose cache grows, where it must be updated in place.

    Raises:
        InputError: names the runtimes such a bundle is for.
    """
    if bundle.manifest.unit.cache != "in_place":
        raise InputError(
            f"bundle {bundle.folder}: its cache grows, expected one updated in place; it is for optimum and onnxruntime-genai, "
            "export another one without --cache growing"
        )


def _written(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise BundleError(f"{path}: cannot be read ({error.strerror})") from None
    return status.st_dev, status.st_ino, status.st_ctime_ns


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_entry(path: Path, sha256: str | None = None) -> dict:
    """The manifest's record of one file; its checksum is taken unless the writer already knows it."""
    return {"size_bytes": path.stat().st_size, "sha256": sha256 or sha256_of(path)}
