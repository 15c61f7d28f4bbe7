"""`python -m exporter`: params, import, export, validate, verify. Each command is one module beside this one."""

from __future__ import annotations

import argparse

from exporter.commands import export, import_model, params, validate, verify
from exporter.common import command


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands. It sets `run` to the function that runs the parsed command."""
    parser = argparse.ArgumentParser(
        prog="blockline-export", description="Turns a checkpoint into a validated ONNX bundle."
    )
    commands = parser.add_subparsers(title="commands", required=True, parser_class=command.CommandParser)
    for module in (params, import_model, export, validate, verify):
        module.add_parser(commands)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    return command.run(lambda parsed: parsed.run(parsed), make_parser(), arguments)
