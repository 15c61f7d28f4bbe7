"""`python -m engines compare-outputs`: compares outputs that Polygraphy has saved with those of the reference."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.table import Table

from exporter.bundle.bundle import Bundle
from exporter.common import command, terminal

DEFAULT_TOLERANCE = (
    0.02  # absolute and relative, for fp16; the user of a Polygraphy file chooses it, as in its commands
)


def add_parser(commands: argparse._SubParsersAction) -> None:
    text = "compare outputs that Polygraphy has saved with the reference's; every output must be there"
    parser = commands.add_parser("compare-outputs", help=text)
    parser.add_argument("bundle", metavar="BUNDLE", help="folder of the bundle whose graph ran")
    text = "outputs of the reference, from `python -m engines compare --save-outputs`"
    parser.add_argument("reference", type=Path, metavar="REFERENCE", help=text)
    text = "outputs of the same inputs, from `polygraphy run --load-inputs … --save-outputs`"
    parser.add_argument("candidate", type=Path, metavar="CANDIDATE", help=text)
    for name, what in (("--atol", "absolute"), ("--rtol", "relative")):
        text = f"{what} tolerance (default {DEFAULT_TOLERANCE})"
        parser.add_argument(name, type=float, default=DEFAULT_TOLERANCE, metavar="X", help=text)
    command.add_format(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from engines.comparison.saved_outputs import compare_outputs

    bundle = Bundle.open(arguments.bundle)
    results = compare_outputs(bundle, arguments.reference, arguments.candidate, arguments.atol, arguments.rtol)
    passed = all(result.passed for result in results)
    if arguments.format == "json":
        terminal.print_json({"passed": passed, "outputs": [result.to_dict() for result in results]})
    else:
        title = f"|a − b| ≤ {arguments.atol:g} + {arguments.rtol:g} · |a|"
        table = Table("runner", "output", "steps", "largest |a − b|", "worst at", "result", title=title)
        for result in results:
            place = f"step {result.at}, {list(result.worst.worst_index or ())}"
            verdict = "PASSED" if result.passed else "FAILED"
            row = (result.runner, result.output, str(result.steps), f"{result.worst.max_abs:.2e}", place, verdict)
            table.add_row(*row)
        terminal.stderr.print(table)
        terminal.say(f"{arguments.candidate}: {'PASSED' if passed else 'FAILED'}")
    return command.EXIT_GOOD if passed else command.EXIT_CHECK_FAILED
