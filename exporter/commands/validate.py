"""`python -m exporter validate`: compares a bundle's graph in onnxruntime with the eager definition."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rich.table import Table

from exporter.commands.validation_answers import add_limits, say_answers
from exporter.common import command, terminal
from exporter.common.errors import InputError

if TYPE_CHECKING:  # this module loads onnxruntime
    from exporter.validation.comparison import Comparison

SHOWN_SHAPES = 3  # a table row shows the first shapes only


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Adds the parser of this command."""
    parser = commands.add_parser("validate", help="compare a bundle's graph in onnxruntime with the eager definition")
    parser.add_argument("bundle", metavar="BUNDLE", help="the bundle's folder")
    parser.add_argument("--seed", type=int, default=0, help="seed for the random inputs (default 0)")
    parser.add_argument(
        "--by-layer",
        action=argparse.BooleanOptionalAction,
        help="validate block by block, which needs the memory of one block (default: only for a model that does not "
        "fit into memory)",
    )
    parser.add_argument(
        "--no-report", action="store_true", help="print the result and write nothing; a read-only bundle needs this"
    )
    add_limits(parser)
    command.add_format(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Validates the bundle, records the result in its report and prints it."""
    from exporter.bundle.bundle import REPORT_FILE, Bundle
    from exporter.placing.files import check_writable, write_report
    from exporter.placing.folder_lock import changing
    from exporter.validation.bundle_validation import validate_bundle
    from exporter.validation.cost import CostLimits

    bundle = Bundle.open(arguments.bundle)
    if not arguments.no_report:
        try:
            check_writable(bundle.folder / REPORT_FILE, own=True)
        except InputError as error:
            raise InputError(f"{error}; --no-report validates without writing") from None
    limits = CostLimits(arguments.max_kl, arguments.min_agreement)
    section, comparisons = validate_bundle(
        bundle, seed=arguments.seed, by_layer=arguments.by_layer, say=terminal.say, limits=limits
    )
    if not arguments.no_report:
        with changing(bundle):
            write_report(bundle, bundle.read_report() | {"validation": section})
    if arguments.format == "json":
        terminal.print_json(section)
    else:
        terminal.stderr.print(_comparison_table(section, comparisons))
        say_answers(section)
    return command.EXIT_GOOD if section["passed"] else command.EXIT_CHECK_FAILED


def _comparison_table(section: dict, comparisons: list[Comparison]) -> Table:
    columns = ("scenario", "tensor", "shapes", "largest error", "result")
    meaning = section["meaning"]
    title = f"{meaning['reference']} against {meaning['candidate']}, through {meaning['through']}"
    table = Table(*columns, title=title, title_justify="left")
    for c in comparisons:
        shapes = " ".join("×".join(map(str, shape)) for shape in c.shapes[:SHOWN_SHAPES])
        shapes += " …" if len(c.shapes) > SHOWN_SHAPES else ""
        table.add_row(c.scenario, c.tensor, shapes, f"{c.max_error:.2e}", _result(c, meaning))
    return table


def _result(comparison: Comparison, meaning: dict) -> str:
    """Returns the result of a row. Where operations were judged, they decide, and a row shows the travelled error."""
    if comparison.passed:
        return "PASSED"
    is_output = comparison.scenario not in {c["scenario"] for c in meaning["stored"]}
    return "by operation" if meaning["judged_by"] == "operations" and is_output else "FAILED"
