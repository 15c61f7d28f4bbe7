"""Hostile bundles: one kind for each file of a bundle. Often the manifest's checksums are made right again."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from random import Random

from benchmarks.campaigns.hostile_input.doors import (
    BUNDLE_DOORS,
    ENGINE_DOORS,
    FILE_DOORS,
    GRAPH_DOORS,
    TEXT_DOORS,
    Door,
    draw,
)
from benchmarks.campaigns.hostile_input.inputs.data_files import mutate_data
from benchmarks.campaigns.hostile_input.inputs.external_data import mutate_external
from benchmarks.campaigns.hostile_input.inputs.graphs import mutate_graph
from benchmarks.campaigns.hostile_input.values import (
    FOREIGN_PATHS,
    damage_text,
    flip_bytes,
    hostile_value,
    mutate,
    to_text,
)
from exporter.bundle.bundle import sha256_of
from exporter.spec.weight_formats import WEIGHT_FORMATS

PLAIN = (
    "block",
    "block",
    "block",
    "model",
    "model",
    "half",
    "bfloat",
    "parts",
    "growing",
    "component",
    "int8",
    "int4",
    "uint8",
    "uint4",
)


def copy(originals: Path, folder: Path, rng: Random, names: tuple[str, ...] = PLAIN) -> str:
    """Copies a random existing original to `folder`; returns its name."""
    name = rng.choice([name for name in names if (originals / name).is_dir()])
    shutil.copytree(originals / name, folder)
    return name


def seal(folder: Path, rng: Random, how_often: float = 0.95) -> None:
    """Writes the present sizes and checksums of the files into the manifest, if the manifest can still be read."""
    path = folder / "manifest.json"
    if rng.random() > how_often or path.is_symlink() or not path.is_file() or path.stat().st_size > 2**20:
        return
    try:
        manifest = json.loads(path.read_text())
        for name, entry in manifest["files"].items():
            file = folder / name
            if file.is_file():
                size = file.stat().st_size
                entry |= {"size_bytes": size, "sha256": sha256_of(file) if size < 2**30 else entry["sha256"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return
    path.write_text(json.dumps(manifest))


def mutate_json_file(path: Path, rng: Random) -> None:
    text = path.read_bytes() if path.is_file() else b"{}"
    if rng.random() < 0.75:
        text = to_text(mutate(json.loads(text), rng))
    if rng.random() < 0.3:
        text = damage_text(text, rng)
    path.write_bytes(text)


def _graph_of(folder: Path, rng: Random) -> Path:
    return rng.choice(sorted(folder.rglob("model.onnx")))


def manifest(originals: Path, folder: Path, rng: Random) -> list[Door]:
    copy(originals, folder, rng)
    mutate_json_file(folder / "manifest.json", rng)
    if rng.random() < 0.3:
        seal(folder, rng)
    return draw(BUNDLE_DOORS, rng, 2)


def geometry(originals: Path, folder: Path, rng: Random) -> list[Door]:
    """Makes a manifest whose numbers agree with each other but not with the graph."""
    copy(originals, folder, rng)
    path = folder / "manifest.json"
    data = json.loads(path.read_text())
    config = data["config"]
    for _ in range(rng.choice((1, 1, 2))):
        key = rng.choice([*config, "max_positions", "end_token_ids", "weights", "unit", "weight_format"])
        if key in config:
            value = config[key]
            plain = isinstance(value, int) and not isinstance(value, bool)
            if plain:
                config[key] = rng.choice((value * 2, value + 1, max(1, value // 2), 2**31 - 1, 10**6))
            else:
                config[key] = hostile_value(rng)
        elif key == "unit":
            data["unit"][rng.choice(list(data["unit"]))] = rng.choice(
                (1, 2, 0, 10**9, "stack", "model", "all", "growing", None)
            )
        elif key == "max_positions":
            data[key] = rng.choice((1, 2, 63, 65, config["context_length"]))
            config["context_length"] = rng.choice((config["context_length"], 2**31 - 1))
        elif key == "weight_format":
            size = rng.choice((16, 32, 48, 64, 2**40, hostile_value(rng)))
            data[key] = rng.choice((None, {"dtype": rng.choice(WEIGHT_FORMATS), "block_size": size}))
        else:
            data[key] = rng.choice(
                (
                    {"source": "random"},
                    {"source": "random", "seed": "x"},
                    {"source": "random", "seed": -1},
                    [10**30],
                    [-1],
                    [1.0],
                )
            )
    _restate_tensors(data)
    path.write_bytes(to_text(data))
    seal(folder, rng, 0.5)
    return draw(GRAPH_DOORS, rng, 2)


def _restate_tensors(data: dict) -> None:
    """Changes inputs, outputs and cache pairs to those of the changed config, if the config is valid."""
    from exporter.spec.catalogue import ModelConfig
    from exporter.spec.tensors import graph_contract
    from exporter.spec.unit import Unit

    try:
        if data["unit"]["n_layers"] > 100:
            return
        contract = graph_contract(ModelConfig.from_dict(data["config"]), Unit(**data["unit"]), data["dtype"])
    except (ValueError, TypeError, KeyError):
        return
    data["inputs"] = [spec.to_dict() for spec in contract.inputs]
    data["outputs"] = [spec.to_dict() for spec in contract.outputs]
    data["cache_pairs"] = [list(pair) for pair in contract.cache_pairs]


def graph(originals: Path, folder: Path, rng: Random) -> list[Door]:
    copy(originals, folder, rng)
    mutate_graph(_graph_of(folder, rng), rng)
    seal(folder, rng)
    return draw(GRAPH_DOORS, rng, 2)


def external_data(originals: Path, folder: Path, rng: Random) -> list[Door]:
    copy(originals, folder, rng)
    path = _graph_of(folder, rng)
    mutate_external(path, rng)
    (path.parent / "link.bin").symlink_to(os.path.relpath(folder.parent / "outside" / "secret.bin", path.parent))
    (path.parent / "folder").symlink_to(folder.parent / "outside")
    os.mkfifo(path.parent / "pipe")
    seal(folder, rng)
    return draw(GRAPH_DOORS, rng, 2)


def data_file(originals: Path, folder: Path, rng: Random) -> list[Door]:
    copy(originals, folder, rng)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    data = [path for path in files if path.name == "model.onnx.data" and path.stat().st_size]
    mutate_data(rng.choice(data if data and rng.random() < 0.6 else files), rng)
    seal(folder, rng)
    return draw(FILE_DOORS, rng, 2)


def tokenizer(originals: Path, folder: Path, rng: Random) -> list[Door]:
    copy(originals, folder, rng, ("model",))
    mutate_json_file(folder / "tokenizer.json", rng)
    seal(folder, rng, 1.0)
    return draw(TEXT_DOORS, rng, 2)


def other_json(originals: Path, folder: Path, rng: Random) -> list[Door]:
    """Changes report.json or genai_config.json."""
    name = copy(originals, folder, rng, ("model", "growing"))
    mutate_json_file(folder / ("genai_config.json" if name == "growing" else "report.json"), rng)
    seal(folder, rng)
    return draw(TEXT_DOORS, rng, 2)


def engines(originals: Path, folder: Path, rng: Random) -> list[Door]:
    """Changes engines.json or the engine's file."""
    copy(originals, folder, rng, ("half",))
    engine = next(path for path in folder.iterdir() if path.suffix == ".engine")
    records = folder / "engines.json"
    how = rng.randrange(4)
    if how <= 1:
        mutate_json_file(records, rng)
    elif how == 2:
        _mutate_engine(engine, records, rng)
    else:
        data = json.loads(records.read_text())
        data["engines"][0][rng.choice(("file", "graph_file"))] = rng.choice(FOREIGN_PATHS)
        records.write_bytes(to_text(data))
    return draw(ENGINE_DOORS, rng, 2)


def _mutate_engine(engine: Path, records: Path, rng: Random) -> None:
    """Replaces the engine by other content or another kind of file, with a record that matches."""
    if rng.random() < 0.5:
        content = engine.read_bytes()
        engine.write_bytes(
            rng.choice(
                (
                    content[: rng.randrange(len(content))],
                    b"",
                    rng.randbytes(1000),
                    flip_bytes(content, rng),
                    b"engine" * 99,
                )
            )
        )
    else:
        mutate_data(engine, rng)
    if engine.is_file() and not engine.resolve().is_relative_to("/proc"):
        data = json.loads(records.read_text())
        size = engine.stat().st_size
        data["engines"][0] |= {"size_bytes": size, "sha256": sha256_of(engine) if size < 2**30 else ""}
        records.write_text(json.dumps(data))


KINDS = {
    "manifest": manifest,
    "geometry": geometry,
    "graph": graph,
    "external data": external_data,
    "data file": data_file,
    "tokenizer": tokenizer,
    "report and genai config": other_json,
    "engines": engines,
}
