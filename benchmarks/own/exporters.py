"""Measures the export of the small real model by our exporter and by two others: time and peak memory.

python -m benchmarks.own.exporters CHECKPOINT     writes benchmarks/records/exporters.json

Each writes a float32 ONNX model for generation from the same checkpoint, without validation, in a process of its own.
The exporters run in turn.
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
    """Exports with optimum. Its transformers 4 misses the RoPE base of checkpoints that transformers 5 saved.

    It would take 10,000, so the base is written where transformers 4 reads it.
    """
    rope = json.loads((checkpoint / "config.json").read_text()).get("rope_parameters", {})
    settings = {key: rope[key] for key in ("rope_theta",) if key in rope}
    restated = restate(checkpoint, folder.parent / "checkpoint", settings)
    return measure_command([str(prepare("optimum")), "-c", OPTIMUM, str(restated), str(folder)])


def genai_builder(checkpoint: Path, folder: Path) -> dict:
    """Exports with genai's builder. It reads the architecture from config.json, which not every folder states."""
    restated = restate(checkpoint, folder.parent / "checkpoint", {"architectures": ["LlamaForCausalLM"]})
    places = ["-i", str(restated), "-o", str(folder.absolute()), "-c", str(folder.parent / "cache")]
    builder = [str(prepare("genai_builder")), "-m", "onnxruntime_genai.models.builder"]
    return measure_command([*builder, *places, "-p", "fp32", "-e", "cpu"])


def restate(checkpoint: Path, folder: Path, settings: dict) -> Path:
    """Makes a folder of links to a checkpoint's files, with further settings in its config.json."""
    folder.mkdir()
    for path in checkpoint.iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path.absolute())
    (folder / "config.json").write_text(json.dumps(json.loads((checkpoint / "config.json").read_text()) | settings))
    return folder


EXPORTERS = {"ours": ours, "optimum": optimum, "genai": genai_builder}


def by_depth(checkpoints: Mapping[int, Path], names: Iterable[str], scratch: Path) -> list[dict]:
    """Measures the export of models of several depths; returns a row for each depth and exporter.

    Args:
        checkpoints: number of layers → checkpoint folder.
        names: names in `EXPORTERS`.
        scratch: folder for the exported files, which are removed again.

    Returns:
        Rows with seconds and peak memory, or with the reason under "not_timed" where an exporter is missing or failed.
    """
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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.own.exporters", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="folder of the small real model")
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
        name: {key: statistics.median(run[key] for run in rows) for key in rows[0]} for name, rows in runs.items()
    }
    ratios = {}
    for name, values in medians.items():
        ratios[name] = {key: round(value / medians["ours"][key], 2) for key, value in values.items()}
    print(json.dumps({"ratios to ours": ratios, "missing": missing}, indent=1))
    record = {**stamp(), "machine": machine(), "medians": medians, "ratios": ratios, "missing": missing}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
