"""`python -m exporter verify`: checks a bundle's files, its graph and the origin of its engines."""

from __future__ import annotations

import argparse

from exporter.common import command, terminal


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Adds the parser of this command."""
    parser = commands.add_parser(
        "verify", help="check every file of a bundle, its graph against the contract, and the origin of its engines"
    )
    parser.add_argument("bundle", metavar="BUNDLE", help="the bundle's folder")
    command.add_format(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Verifies the bundle and prints the result."""
    from exporter.validation.verify import verify_bundle

    verification = verify_bundle(arguments.bundle)
    if arguments.format == "json":
        terminal.print_json(verification.to_dict())
    verification.check()
    if arguments.format == "table":
        files = ", ".join(verification.files)
        terminal.say(f"{verification.folder}: {files} are as they were written, the graph keeps its contract")
        if verification.others:
            terminal.say(f"not the bundle's, and not looked at: {', '.join(verification.others)}")
