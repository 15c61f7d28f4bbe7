"""Parts of a campaign of faults: commands, a folder with other people's files for them, and checks of the result."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import engines.commands.main
import exporter.commands.main
from benchmarks.campaigns.children import run_in_child
from engines.building.publishing import read_records
from engines.library.backend import choose_backend
from engines.library.usable_engines import check_engine, check_lineage
from exporter.bundle.bundle import REPORT_FILE, Bundle
from exporter.common.errors import InputError
from exporter.spec.catalogue import CATALOGUE, ModelConfig

MODEL = "tiny"
TINY = ModelConfig(
    hidden_size=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    vocab_size=101,
    context_length=64,
)
OLD_SEED, NEW_SEED = 0, 1  # equal sizes, so that only checksums reveal a mixture
FOREIGN = {
    "target/notes.txt": "mine",
    "target/results/deep/table.csv": "a,b",
    "neighbour.txt": "beside",
    ".other.partial-x/half": "another run's",
}


@dataclass(frozen=True)
class Command:
    """One of the project's commands, with the state of the folder before it.

    Attributes:
        name: name in records.
        main: the command's main function.
        arguments: the arguments, without the target's folder.
        place: the option before the target's folder; "" where the folder is the first argument.
        over_folder: whether the target exists before the command: an old bundle, or for a checkpoint a folder of other
            people's files.
        engine: whether the old bundle has an engine.
    """

    name: str
    main: Callable[[list[str]], int]
    arguments: tuple[str, ...]
    place: str = ""
    over_folder: bool = True
    engine: bool = False

    def line(self, folder: Path) -> list[str]:
        first, *rest = self.arguments
        return [first, *((self.place, str(folder)) if self.place else (str(folder),)), *rest]


def export_command(name: str, seed: int, **where: bool) -> Command:
    return Command(name, exporter.commands.main.main, ("export", "--model", MODEL, "--seed", str(seed)), "-o", **where)


_BUILD = ("build", "--backend", "tensorrt-rtx", "--cache-capacity", "32", "--max-seq-len", "8", "--max-batch", "1")
COMMANDS = (
    export_command("export over nothing", NEW_SEED, over_folder=False),
    export_command("export over a bundle", NEW_SEED, engine=True),
    Command("validate", exporter.commands.main.main, ("validate",), engine=True),
    Command("build, a first engine", engines.commands.main.main, _BUILD),
    Command("build, over an engine", engines.commands.main.main, _BUILD, engine=True),
)


class Site:
    """A folder to run commands in, made again for each trial, with checks of the result.

    Attributes:
        folder: the folder of the target and its neighbours.
        target: the folder that a command makes or changes; it may not exist.
        own: names in `folder` that are neither the target nor other people's.
    """

    kind = "folder"
    own: frozenset[str] = frozenset()

    def __init__(self, root: Path) -> None:
        self._root = root
        self.folder = root / "site"
        self.target = self.folder / "target"

    def template(self, command: Command) -> Path:
        """Returns the folder to copy before a command whose target exists."""
        raise NotImplementedError

    def target_losses(self) -> list[str]:
        """Returns what is wrong with an existing target."""
        raise NotImplementedError

    def target_files(self) -> set[str]:
        """Returns the names in the target after a successful run, without other people's."""
        raise NotImplementedError

    def state(self) -> str:
        """Returns how far a run had come, judged by the files."""
        raise NotImplementedError

    def reset(self, command: Command) -> None:
        """Restores the folder to its state before the command."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.template(command), self.folder)
        if not command.over_folder:
            shutil.rmtree(self.target)

    def losses(self, command: Command) -> list[str]:
        """Returns what is wrong after a fault: a mixture, a damaged file, a missing target, a changed foreign file."""
        found = []
        for name, text in FOREIGN.items():
            path = self.folder / name
            if not name.startswith("target/") or command.over_folder:
                if not path.is_file():
                    found.append(f"{name} is gone")
                elif path.read_text() != text:
                    found.append(f"{name} was changed")
        if not self.target.exists():
            return [*found, f"the {self.kind} is gone"] if command.over_folder else found
        return found + self.target_losses()

    def strays(self, command: Command) -> list[str]:
        """Returns the files that a successful run should not have left."""
        expected = {"target"} | self.own | {name.partition("/")[0] for name in FOREIGN}
        found = [path.name for path in self.folder.iterdir() if path.name not in expected]
        inside = self.target_files() | ({"notes.txt", "results"} if command.over_folder else set())
        return found + [f"target/{path.name}" for path in self.target.iterdir() if path.name not in inside]


def add_foreign_files(folder: Path) -> None:
    for name, text in FOREIGN.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


class BundleSite(Site):
    """A site whose target is a bundle: the old one before a command, the old or the new one afterwards."""

    kind = "bundle"

    def __init__(self, root: Path, engine: bool = True) -> None:
        """Makes both bundles below `root`. Without `engine` the old one never has an engine, which saves a build."""
        super().__init__(root)
        CATALOGUE[MODEL] = TINY
        self._engine = engine
        self._templates: dict[bool, Path] = {}
        for seed in (OLD_SEED, NEW_SEED):  # in this process, so that children have everything loaded
            exporter.commands.main.main(export_command("", seed).line(root / f"seed{seed}"))
        self.old, self.new = (Bundle.open(root / f"seed{seed}").manifest for seed in (OLD_SEED, NEW_SEED))

    def template(self, command: Command) -> Path:
        engine = command.engine and self._engine
        if engine not in self._templates:
            template = self._root / ("template with an engine" if engine else "template")
            shutil.copytree(self._root / f"seed{OLD_SEED}", template / "target")
            if engine and run_in_child(lambda: engines.commands.main.main(COMMANDS[-1].line(template / "target"))) != 0:
                raise RuntimeError("the build for the campaign failed")
            add_foreign_files(template)
            self._templates[engine] = template
        return self._templates[engine]

    def target_losses(self) -> list[str]:
        found = []
        try:
            bundle = Bundle.open(self.target, verify="full")
            if bundle.manifest not in (self.old, self.new):
                found.append("the bundle is neither the old nor the new one")
            if not bundle.read_report().get("validation", {}).get("passed"):
                found.append(f"{REPORT_FILE} has no validation that passed")
            for record in read_records(bundle.folder):
                check_engine(bundle.folder, record, verify="full")
                check_lineage(bundle, record)
        except InputError as error:
            found.append(str(error))
        return found

    def target_files(self) -> set[str]:
        records = read_records(self.target)
        engines = {name for record in records for name in ("engines.json", record.file, record.graph_file)}
        return {"manifest.json", "report.json", *self.new.files} | engines

    def state(self) -> str:
        outside = list(self.folder.glob(".target.*partial-*"))
        inside = [path.name for path in self.target.glob(".*.partial-*")] if self.target.is_dir() else []
        if outside:
            names = {path.name for path in outside[0].iterdir()} if outside[0].is_dir() else set()
            if self._is_new():
                return "the older bundle being removed"
            if REPORT_FILE in names:
                return "about to be put in place"
            return "being validated" if "manifest.json" in names else "being written" if names else "just begun"
        if inside:
            kinds = ("engine", "onnx", "json")
            kind = next((kind for kind in kinds if any(f".{kind}.partial-" in name for name in inside)), "file")
            writing = len(inside) > 1 or kind == "json"
            empty = all(path.stat().st_size == 0 for path in self.target.glob(".*.partial-*"))
            return f"{kind} being {'published' if writing and kind == 'engine' else 'made' if empty else 'written'}"
        return "in place" if self._is_new() else "before or between files"

    def _is_new(self) -> bool:
        try:
            return json.loads((self.target / "manifest.json").read_text())["weights"] == self.new.weights
        except OSError:
            return False


def warm_up() -> str:
    """Loads the backend, so that children have it loaded; returns its name."""
    sys.stdout.flush()
    return str(choose_backend("tensorrt-rtx"))
