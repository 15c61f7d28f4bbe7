"""`python -m engines`: build, inspect, compare, compare-outputs, refit."""

from __future__ import annotations

import argparse

from engines.commands import build, compare, compare_outputs, inspect_command, refit
from engines.commands.flags import flags_in_errors
from exporter.common import command

COMMANDS = (build, inspect_command, compare, compare_outputs, refit)


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    text = "From a bundle, or any ONNX file, to a TensorRT engine."
    parser = argparse.ArgumentParser(prog="blockline-build", description=text)
    commands = parser.add_subparsers(title="commands", required=True, parser_class=command.CommandParser)
    for each in COMMANDS:
        each.add_parser(commands)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns its exit code."""
    return command.run(_run, make_parser(), arguments)


def _run(parsed: argparse.Namespace) -> int | None:
    with flags_in_errors():
        return parsed.run(parsed)
