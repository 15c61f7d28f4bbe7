"""`python -m engines inspect`: shows a bundle's network as TensorRT parses it, and the bundle's engines."""

from __future__ import annotations

import argparse

from rich.table import Table

from engines.commands.arguments import add_backend, add_shapes, build_request, chosen_backend
from engines.commands.record_table import print_record
from engines.network.build_options import BuildOptions
from exporter.bundle.bundle import Bundle
from exporter.bundle.engine_records import EngineRecord
from exporter.common import command, terminal


def add_parser(commands: argparse._SubParsersAction) -> None:
    text = "show a bundle's network as TensorRT parses it, and the bundle's engines"
    parser = commands.add_parser("inspect", help=text)
    parser.add_argument("bundle", metavar="BUNDLE", help="folder of the bundle")
    add_backend(parser)
    add_shapes(parser)
    command.add_format(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from engines.building.inspection import inspect_bundle

    backend = chosen_backend(arguments)
    bundle = Bundle.open(arguments.bundle)
    results = [inspect_bundle(part, backend, build_request(arguments, BuildOptions())) for part in bundle.parts]
    if arguments.format == "json":
        terminal.print_json({"parts": results} if bundle.manifest.parts else results[0])
        return
    for result in results:
        _print_network(result)
        _print_engines(result["engines"])


def _print_network(result: dict) -> None:
    title = f"{result['unit']}, {result['dtype']}"
    table = Table("tensor", "mode", "dtype", "shape", "shares memory with", title=title, title_justify="left")
    for tensor in result["io"]:
        shape = "×".join(map(str, tensor["shape"]))
        table.add_row(tensor["name"], tensor["mode"], tensor["dtype"], shape, tensor["alias"] or "")
    terminal.stderr.print(table)
    terminal.say(f"layers: {', '.join(f'{count} {name}' for name, count in result['layers'].items())}")
    masked = sum(layer["mask"] and layer["causal_kind"] == "NONE" for layer in result["attention"])
    terminal.say(f"attention: {len(result['attention'])} layers, {masked} with an explicit mask and no causal kind")
    terminal.say(f"cache updates: {result['kv_cache_updates']}, each from an input to an output at the same address")
    mib = {name: f"{n_bytes / 2**20:,.1f} MiB" for name, n_bytes in result["memory"].items()}
    terminal.say(
        f"memory: weights {mib['weights_bytes']}, activations about {mib['activations_estimate_bytes']}, "
        f"cache {mib['cache_bytes_per_sequence']} per sequence of {result['cache_capacity']} tokens"
    )
    for note in result["notes"]:
        terminal.say(f"note: {note}")


def _print_engines(engines: list[dict]) -> None:
    for engine in engines:
        print_record(EngineRecord(**{name: engine[name] for name in EngineRecord.__dataclass_fields__}))
        terminal.say(f"usable here: {engine['usable']}")
    if not engines:
        terminal.say("engines: none; `python -m engines build` makes one")
