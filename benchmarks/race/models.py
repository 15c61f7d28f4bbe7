"""Makes the files that contenders read from one checkpoint: a bundle, a peer's own export, a GGUF file, an engine.

Peers' files stay in build/bench; they are made again when the checkpoint, the peer's version or its call changes.
Our own files are made again in every run.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.machine.processes import measure
from benchmarks.own import exporters
from benchmarks.own.large_checkpoint import generate_checkpoint
from benchmarks.peers.environments import BUILD_SETTINGS, PACKAGES, PeerMissing
from benchmarks.race import gguf_file
from exporter.spec.catalogue import ModelConfig

Maker = Callable[["Models", Path, tuple[str, ...]], dict]


@dataclass
class Models:
    """One checkpoint in every form.

    Attributes:
        checkpoint: a Hugging Face folder.
        folder: folder for the forms.
        made: form → `seconds` and `peak_memory_bytes` of making it, for the forms made in this run.
        missing: form → reason why it could not be made.
    """

    checkpoint: Path
    folder: Path
    made: dict[str, dict] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    _paths: dict[str, Path] = field(default_factory=dict)

    def path(self, form: str) -> Path:
        """Returns the file or folder of a form; makes it on first use.

        Raises:
            PeerMissing: the peer that makes it is missing or failed; a second call does not try again.
        """
        if form in self.missing:
            raise PeerMissing(self.missing[form])
        if form not in self._paths:
            try:
                self._paths[form] = self._make(form)
            except (PeerMissing, RuntimeError) as reason:
                self.missing[form] = last_line(str(reason))
                raise PeerMissing(self.missing[form]) from reason
        return self._paths[form]

    def _make(self, form: str) -> Path:
        name, *arguments = form.split()
        if name == "checkpoint":
            return self.checkpoint
        target = self.folder / form.replace(" ", "_")
        stamp, file = target / "made-from", target / "model"
        wanted = self._identity(name)
        if name not in OURS and stamp.is_file() and stamp.read_text() == wanted:
            return file
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        self.made[form] = MAKERS[name](self, file, tuple(arguments))
        stamp.write_text(wanted)
        return file

    def _identity(self, name: str) -> str:
        """Returns a hash of what a peer's form depends on: its packages, its call, the checkpoint's files."""
        files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in self.checkpoint.iterdir())
        peer = {"genai": "genai_builder", "gguf": "llama_cpp"}.get(name, name)
        recipes = [Path(module.__file__).read_text(encoding="utf-8") for module in (exporters, gguf_file)]
        parts = [PACKAGES.get(peer), BUILD_SETTINGS.get(peer), recipes, files]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _bundle(models: Models, file: Path, arguments: tuple[str, ...]) -> dict:
    """Exports with the model's whole context: the largest cache capacities need more positions than the default."""
    context = json.loads((models.checkpoint / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
    return exporters.ours(models.checkpoint, file, "--max-positions", str(context), *arguments)


def _engine(models: Models, file: Path, arguments: tuple[str, ...]) -> dict:
    _bundle(models, file, arguments)
    limits = ("--max-seq-len", "1024", "--cache-capacity", "2048")
    return measure("engines", "build", str(file), "--backend", "tensorrt", *limits)


MAKERS: dict[str, Maker] = {
    "bundle": _bundle,
    "engine": _engine,
    "optimum": lambda models, file, arguments: exporters.optimum(models.checkpoint, file),
    "genai": lambda models, file, arguments: exporters.genai_builder(models.checkpoint, file),
    "gguf": lambda models, file, arguments: gguf_file.make(models.checkpoint, file, *arguments),
}
OURS = ("bundle", "engine")


def last_line(text: str) -> str:
    """Returns the last line of a text that is not empty."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no reason given")


def random_checkpoint(folder: Path, config: ModelConfig, tokenizer: Path | None = None) -> Path:
    """Writes a float32 Hugging Face folder of random weights; keeps the one of an earlier run with the same config.

    Args:
        folder: the folder.
        config: geometry of the model.
        tokenizer: checkpoint folder whose tokenizer is copied, because some peers need one; None copies none.
    """
    wanted = json.dumps(config.to_dict())
    stamp = folder / "made-from.json"
    if not stamp.is_file() or stamp.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        generate_checkpoint(folder, config, dtype=torch.float32)
        for name in ("tokenizer.json", "tokenizer_config.json") if tokenizer else ():
            shutil.copyfile(tokenizer / name, folder / name)
        stamp.write_text(wanted)
    return folder
