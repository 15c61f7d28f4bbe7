"""`python -m engines compare`: runs the same steps on several backends and compares their results."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from engines.library.backend import CHOICES
from exporter.bundle.bundle import Bundle
from exporter.common import command, terminal
from exporter.common.errors import InputError
from exporter.placing.files import check_writable, write_atomically

if TYPE_CHECKING:
    from engines.comparison.compare import CompareRequest
    from exporter.model.weights import WeightSource


def add_parser(commands: argparse._SubParsersAction) -> None:
    text = "run the same steps on several backends and compare each with the first, operation by operation"
    parser = commands.add_parser("compare", allow_abbrev=False, help=text)
    parser.add_argument("bundle", metavar="BUNDLE", help="folder of the bundle")
    text = "source of the weights; the bundle's weights are compared with it"
    parser.add_argument("--checkpoint", metavar="DIR", help=text)
    parser.add_argument("--model", metavar="NAME", help="geometry of a Meta checkpoint, as for export")
    text = "backends with commas between them, the reference first (default: eager and all that can run here)"
    parser.add_argument("--backends", metavar="LIST", help=text)
    text = "execution provider of onnxruntime (default CPUExecutionProvider)"
    parser.add_argument("--provider", metavar="NAME", help=text)
    text = f"whose parser the interpreter uses: {', '.join(CHOICES[:-1])} or {CHOICES[-1]} (default auto)"
    parser.add_argument("--parser", default="auto", metavar="NAME", help=text)
    text = "measure every operation by itself (default: where an output fails)"
    parser.add_argument("--audit", action=argparse.BooleanOptionalAction, help=text)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed for the random inputs (default 0)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots of the error by layer")
    text = "cache rows per sequence (default 32, or the engine's capacity where TensorRT runs)"
    parser.add_argument("--cache-capacity", type=int, metavar="N", help=text)
    text = "let a version-compatible engine run its own code on the CPU; only for engines from a source that you trust"
    parser.add_argument("--allow-host-code", action="store_true", help=text)
    _add_files(parser)
    command.add_format(parser)
    parser.set_defaults(run=run)


def _add_files(parser: argparse.ArgumentParser) -> None:
    title = "files for Polygraphy, with one entry per step; the cache is among the inputs and outputs"
    group = parser.add_argument_group(title)
    text = "inputs, for `polygraphy run --load-inputs`"
    group.add_argument("--save-inputs", type=Path, metavar="FILE", help=text)
    text = "outputs of the reference, for `python -m engines compare-outputs`"
    group.add_argument("--save-outputs", type=Path, metavar="FILE", help=text)
    text = "script, for `polygraphy run --data-loader-script`"
    group.add_argument("--save-data-loader", type=Path, metavar="FILE", help=text)


def run(arguments: argparse.Namespace) -> int:
    from engines.comparison.compare import CompareRequest, compare_bundle
    from engines.comparison.html_page import to_html
    from engines.comparison.report import print_result, to_dict

    bundle = Bundle.open(arguments.bundle)
    request = CompareRequest(
        arguments.backends,
        arguments.provider,
        arguments.parser,
        arguments.audit,
        arguments.seed,
        arguments.cache_capacity,
        arguments.allow_host_code,
    )
    outputs = (arguments.html, arguments.save_inputs, arguments.save_outputs, arguments.save_data_loader)
    check_writable(*(path for path in outputs if path is not None))
    result = compare_bundle(bundle, request, terminal.say, _source_weights(bundle, arguments))
    _save_for_polygraphy(bundle, request, arguments)
    if arguments.html is not None:
        write_atomically(arguments.html, to_html(result))
        terminal.say(f"wrote {arguments.html}")
    if arguments.format == "json":
        terminal.print_json(to_dict(result))
    else:
        print_result(result)
    return command.EXIT_GOOD if result.passed else command.EXIT_CHECK_FAILED


def _source_weights(bundle: Bundle, arguments: argparse.Namespace) -> WeightSource | None:
    """The weights of --checkpoint; None where none was given."""
    if arguments.checkpoint is None:
        return None
    from exporter.checkpoint.formats import open_checkpoint

    checkpoint = open_checkpoint(arguments.checkpoint, arguments.model)
    expected = bundle.manifest.config
    if checkpoint.config != expected:
        raise InputError(
            f"checkpoint {arguments.checkpoint}: got geometry {checkpoint.config}, expected {expected} of the bundle"
        )
    return checkpoint.weights


def _save_for_polygraphy(bundle: Bundle, request: CompareRequest, arguments: argparse.Namespace) -> None:
    wanted = {kind: getattr(arguments, f"save_{kind}") for kind in ("inputs", "outputs", "data_loader")}
    if not any(wanted.values()):
        return
    from engines.comparison import polygraphy_files
    from engines.comparison.compare import run_limits

    for kind, path in wanted.items():
        if path is not None:
            getattr(polygraphy_files, f"save_{kind}")(bundle, path, request.seed, run_limits(bundle, request))
            terminal.say(f"wrote {path}")
