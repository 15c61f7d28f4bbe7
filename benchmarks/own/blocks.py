"""Measures export, validation, audit and compilation of one full-size block: time and peak memory of each command.

python -m benchmarks.own.blocks [MODEL ...]          writes benchmarks/records/blocks.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks.machine.description import machine, stamp
from benchmarks.machine.processes import measure

MODELS = ("llama3-8b", "llama3-70b")
RECORD = Path(__file__).parents[1] / "records" / "blocks.json"


def measure_block(model: str, folder: Path) -> dict:
    """Returns all figures of one model's block at fp16."""
    bundle = str(folder / model)
    figures = {
        "export, not validated": measure("exporter", "export", "--model", model, "--no-validate", "-o", bundle),
        "export and validate": measure("exporter", "export", "--model", model, "-o", bundle),
        "compare and audit": measure("engines", "compare", bundle, "--audit", "--format", "json"),
        "compile": measure("engines", "build", bundle, "--backend", "tensorrt-rtx"),
    }
    record = json.loads((Path(bundle) / "engines.json").read_text())["engines"][0]
    report = json.loads((Path(bundle) / "report.json").read_text())
    return {
        "weights_bytes": (Path(bundle) / "model.onnx.data").stat().st_size,
        "engine_bytes": record["size_bytes"],
        "engine": f"{record['backend']} {record['version']}",
        "validation_max_error": report["validation"]["meaning"]["max_error"],
        **figures,
    }


def main() -> None:
    """Measures the named models, prints a table and writes the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.own.blocks", description=__doc__.splitlines()[0])
    names = ", ".join(MODELS)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"models of the catalogue (default: {names})")
    models = parser.parse_args().models or MODELS
    with tempfile.TemporaryDirectory(dir="build") as scratch:
        blocks = {model: measure_block(model, Path(scratch)) for model in models}
    for model, figures in blocks.items():
        for name, value in figures.items():
            if isinstance(value, dict):
                print(f"{model:12} {name:24} {value['seconds']:7.1f} s  {value['peak_memory_bytes'] / 2**30:5.2f} GiB")
    RECORD.write_text(json.dumps({**stamp(), "machine": machine(), "blocks": blocks}, indent=1) + "\n")


if __name__ == "__main__":
    main()
