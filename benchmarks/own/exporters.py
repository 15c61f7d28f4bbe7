"""Exporting the small real model, side by side with the exporters people would use instead: time and peak memory.

python -m benchmarks.own.exporters CHECKPOINT     writes benchmarks/records/exporters.json

All write a float32 ONNX model for generation from the same checkpoint, unvalidated, each in a process of its own; runs are interleaved.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.machine.description import machine, stamp
from benchmarks.machine.processes import measure, measure_command
from benchmarks.peers.environments import PeerMissing, prepare

RECORD = Path(__file__).parents[1] / "records" / "exporters.json"
ROUNDS = 3
OPTIMUM = (
    "import sys; from optimum.exporters.onnx import main_export; "
    "main_export(sys.argv[1], output=sys.argv[2], task='text-generation-with-past', do_validation=False)"
)


def ours(checkpoint: Path, folder: Path, *extra: str) -> dict:
    model = ["--checkpoint", str(checkpoint), "--unit", "model", "--dtype", "fp32"]
    return measure("exporter", "export", *model, *extra, "--no-validate", "-o", str(folder))


def optimum(checkpoint: Path, folder: Path) -> dict:
    """Its transformers 4 looks for the RoPE base where checkpoints saved by transformers 5 no longer have it, and takes 10,000 instead."""
    rope = json.loads((checkpoint / "config.json").read_text()).get("rope_parameters", {})
    restated = restate(
        checkpoint, folder.parent / "checkpoint", {key: rope[key] for key in ("rope_theta",) if key in rope}
    )
    return measure_command([str(prepare("optimum")), "-c", OPTIMUM, str(restated), str(folder)])


def genai_builder(checkpoint: Path, folder: Path) -> dict:
    """The builder wants to read the architecture from config.json, which not every folder states."""
    restated = restate(checkpoint, folder.parent / "checkpoint", {"architectures": ["LlamaForCausalLM"]})
    arguments = [
        "-i",
        str(restated),
        "-o",
        str(folder.absolute()),
        "-p",
        "fp32",
        "-e",
        "cpu",
        "-c",
        str(folder.parent / "cache"),
    ]
    return measure_command([str(prepare("genai_builder")), "-m", "onnxruntime_genai.models.builder", *arguments])


def restate(checkpoint: Path, folder: Path, settings: dict) -> Path:
    """A folder of links to a checkpoint's files, with more said in its config.json: the same model in a peer's own words."""
    folder.mkdir()
    for path in checkpoint.iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path.absolute())
    (folder / "config.json").write_text(json.dumps(json.loads((checkpoint / "config.json").read_text()) | settings))
    return folder


EXPORTERS = {"ours": ours, "optimum": optimum, "genai": genai_builder}


def by_depth(checkpoints: Mapping[int, Path], names: Iterable[str], scratch: Path) -> list[dict]:
    """Time and peak memory of exporting models of several depths; depth → checkpoint. An exporter that is missing says why."""
    rows = []
    for depth, checkpoint in checkpoints.items():
        for name in names:
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                try:
                    figures = EXPORTERS[name](checkpoint, Path(folder) / "model")
                except (PeerMissing, RuntimeError) as reason:
                    figures = {"not_timed": str(reason).strip().splitlines()[-1]}
            rows.append({"n_layers": depth, "exporter": name, **figures})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.own.exporters")
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    checkpoint = parser.parse_args().checkpoint.absolute()
    runs: dict[str, list[dict]] = {}
    missing: dict[str, str] = {}
    for number in range(ROUNDS):
        for exporter in (ours, optimum, genai_builder):
            if exporter.__name__ in missing:
                continue
            with tempfile.TemporaryDirectory(dir="build") as scratch:
                try:
                    figures = exporter(checkpoint, Path(scratch) / "model")
                except (PeerMissing, RuntimeError) as reason:
                    missing[exporter.__name__] = str(reason)[-500:]
                    continue
            runs.setdefault(exporter.__name__, []).append(figures)
            print(number, exporter.__name__, figures, flush=True)
    medians = {
        name: {key: statistics.median(run[key] for run in of_one) for key in of_one[0]} for name, of_one in runs.items()
    }
    ratios = {
        name: {key: round(values[key] / medians["ours"][key], 2) for key in values} for name, values in medians.items()
    }
    print(json.dumps({"ratios to ours": ratios, "missing": missing}, indent=1))
    RECORD.write_text(
        json.dumps(
            {**stamp(), "machine": machine(), "medians": medians, "ratios": ratios, "missing": missing}, indent=1
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
