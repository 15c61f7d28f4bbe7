"""`python -m runtime`: decode, generate, report and doctor."""

from __future__ import annotations

import argparse

from exporter.common import command
from runtime.commands import decode, doctor, generate, report


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all subcommands. Each subcommand's `run` runs it."""
    parser = argparse.ArgumentParser(
        prog="blockline-run", description="Decode from a bundle with a KV cache that is updated in place."
    )
    commands = parser.add_subparsers(title="commands", required=True, parser_class=command.CommandParser)
    for module in (decode, generate, report, doctor):
        module.add_parser(commands)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs a subcommand and returns its exit code."""
    return command.run(lambda parsed: parsed.run(parsed), make_parser(), arguments)
