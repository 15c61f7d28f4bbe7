"""`python -m exporter import`: fetches the small real model as a checkpoint folder."""

from __future__ import annotations

import argparse

from exporter.common import terminal


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Adds the parser of this command."""
    parser = commands.add_parser("import", help="fetch the small real model, SmolLM2-135M, as a checkpoint folder")
    parser.add_argument("model", choices=["smollm2-135m"], help="the model to fetch")
    parser.add_argument("-o", "--output", metavar="DIR", help="folder to make (default build/checkpoints/MODEL)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Fetches the model into the output folder."""
    from exporter.checkpoint.smollm2 import import_smollm2

    target = import_smollm2(arguments.output) if arguments.output is not None else import_smollm2()
    terminal.say(f"{arguments.model}: checkpoint in {target}")
