"""`python -m engines build`: checks a graph and compiles it."""

from __future__ import annotations

import argparse
from pathlib import Path

from engines.building.build import build_onnx, build_parts
from engines.commands.arguments import (
    add_backend,
    add_options,
    add_shapes,
    build_options,
    build_request,
    chosen_backend,
)
from engines.commands.record_table import print_record
from exporter.bundle.bundle import Bundle
from exporter.common import terminal
from exporter.common.errors import InputError


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("build", help="check a graph and compile it; tensorrt-rtx needs no GPU for this")
    parser.add_argument("bundle", nargs="?", metavar="BUNDLE", help="folder of the bundle; the engine goes into it")
    parser.add_argument("--onnx", metavar="FILE", help="ONNX file to build instead of a bundle")
    parser.add_argument("-o", "--output", metavar="FOLDER", help="folder for the engine of --onnx")
    add_backend(parser)
    add_shapes(parser)
    add_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    has_bundle, has_onnx, has_output = (x is not None for x in (arguments.bundle, arguments.onnx, arguments.output))
    if has_bundle == has_onnx or has_onnx != has_output:
        raise InputError("build: give either a BUNDLE, or --onnx FILE with -o FOLDER")
    if arguments.output == "":
        raise InputError("output: got an empty path, expected a folder for the engine; give its path")
    request = build_request(arguments, build_options(arguments))
    backend = chosen_backend(arguments)
    if has_bundle:
        records = build_parts(Bundle.open(arguments.bundle), backend, request, terminal.say)
    else:
        records = [build_onnx(Path(arguments.onnx), Path(arguments.output), backend, request, terminal.say)]
    for record in records:
        print_record(record)
