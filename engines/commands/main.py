"""`python -m engines`: build, inspect, compare, refit."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from engines.building.build import BuildRequest, build_onnx, build_parts
from engines.library.backend import Backend, choose_backend
from engines.network.build_options import HARDWARE_COMPATIBILITY, PROFILING_VERBOSITY, BuildOptions
from engines.network.profiles import DEFAULT_MAX_BATCH, DEFAULT_MAX_SEQ_LEN
from exporter.bundle.bundle import Bundle
from exporter.bundle.engine_records import EngineRecord, read_records
from exporter.common import command, terminal
from exporter.common.errors import InputError
from exporter.placing.files import check_writable, write_atomically
from exporter.spec.limits import DEFAULT_CACHE_CAPACITY

if TYPE_CHECKING:
    from engines.comparison.compare import CompareRequest
    from exporter.model.weights import WeightSource


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="blockline-build", description="From a bundle, or any ONNX file, to a TensorRT engine."
    )
    commands = parser.add_subparsers(title="commands", required=True, parser_class=command.CommandParser)

    build = commands.add_parser("build", help="check a graph and compile it; needs no GPU with tensorrt-rtx")
    build.add_argument("bundle", nargs="?", metavar="BUNDLE", help="the bundle's folder; the engine goes into it")
    build.add_argument("--onnx", metavar="FILE", help="an ONNX file instead of a bundle")
    build.add_argument("-o", "--output", metavar="FOLDER", help="where the engine of --onnx goes")
    _add_backend(build)
    _add_shapes(build)
    _add_options(build)
    build.set_defaults(run=_build)

    inspect = commands.add_parser("inspect", help="show a bundle's network as TensorRT understands it, and its engines")
    inspect.add_argument("bundle", metavar="BUNDLE", help="the bundle's folder")
    _add_backend(inspect)
    _add_shapes(inspect)
    command.add_format(inspect)
    inspect.set_defaults(run=_inspect)

    _add_compare(commands)

    refit = commands.add_parser(
        "refit", help="put the bundle's weights into an engine built with --refit or --strip-plan (needs a GPU)"
    )
    refit.add_argument("bundle", metavar="BUNDLE", help="the bundle's folder")
    refit.add_argument("--engine", metavar="FILE", help="its name in the bundle (default: the only one)")
    refit.set_defaults(run=_refit)
    return parser


def _add_compare(commands: argparse._SubParsersAction) -> None:
    compare = commands.add_parser(
        "compare",
        allow_abbrev=False,
        help="run the same steps on several backends and hold each against the first, operation by operation",
    )
    compare.add_argument("bundle", metavar="BUNDLE", help="the bundle's folder")
    compare.add_argument(
        "--checkpoint", metavar="DIR", help="where the weights came from, to hold the bundle's against them"
    )
    compare.add_argument("--model", metavar="NAME", help="geometry of a Meta checkpoint, as for export")
    compare.add_argument(
        "--backends",
        metavar="LIST",
        help="names with commas, the reference first (default: eager and all that can run here)",
    )
    compare.add_argument(
        "--provider", metavar="NAME", help="onnxruntime's execution provider (default CPUExecutionProvider)"
    )
    compare.add_argument(
        "--parser",
        default="auto",
        metavar="NAME",
        help="whose parser the interpreter uses: auto, tensorrt or tensorrt-rtx",
    )
    compare.add_argument(
        "--audit",
        action=argparse.BooleanOptionalAction,
        help="measure every operation by itself (default: where an output fails)",
    )
    compare.add_argument("--seed", type=int, default=0, metavar="N", help="of the random inputs (default 0)")
    compare.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots of the error by layer")
    compare.add_argument(
        "--cache-capacity",
        type=int,
        metavar="N",
        help="rows per sequence (default 32, or the engine's where TensorRT runs)",
    )
    files = compare.add_argument_group(
        "files for Polygraphy, one entry a step; the cache is among the inputs and outputs"
    )
    files.add_argument("--save-inputs", type=Path, metavar="FILE", help="for `polygraphy run --load-inputs`")
    files.add_argument(
        "--save-outputs", type=Path, metavar="FILE", help="the reference's outputs, for `polygraphy run --load-outputs`"
    )
    files.add_argument(
        "--save-data-loader", type=Path, metavar="FILE", help="a script for `polygraphy run --data-loader-script`"
    )
    command.add_format(compare)
    compare.set_defaults(run=_compare)


def _add_backend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend",
        default="auto",
        metavar="NAME",
        help="tensorrt, tensorrt-rtx, or auto: tensorrt where a GPU is visible",
    )


def _add_shapes(parser: argparse.ArgumentParser) -> None:
    shapes = parser.add_argument_group("shapes")
    shapes.add_argument(
        "--max-batch", type=int, metavar="N", help=f"most sequences of one step (default {DEFAULT_MAX_BATCH})"
    )
    shapes.add_argument(
        "--max-seq-len",
        type=int,
        metavar="N",
        help=f"most new tokens of one step, not the total (default {DEFAULT_MAX_SEQ_LEN})",
    )
    shapes.add_argument(
        "--cache-capacity", type=int, metavar="N", help=f"cache rows per sequence (default {DEFAULT_CACHE_CAPACITY})"
    )
    for which in ("min", "opt", "max"):
        shapes.add_argument(
            f"--{which}-shapes",
            nargs="+",
            action="append",
            default=[],
            metavar="SHAPES",
            help=f"{which} shape of each dynamic input, x:1x16,y:1 or x:[1,16] y:[1]; given again for a second profile",
        )


def _add_options(parser: argparse.ArgumentParser) -> None:
    options = parser.add_argument_group("options of TensorRT")
    options.add_argument("--workspace", type=int, metavar="MIB", help="limit of the workspace, in MiB")
    options.add_argument("--builder-optimization-level", type=int, metavar="0-5", help="how long to search for kernels")
    options.add_argument("--timing-cache", type=Path, metavar="FILE", help="kernel timings to reuse and extend")
    options.add_argument("--version-compatible", action="store_true", help="run on later versions of TensorRT too")
    options.add_argument(
        "--hardware-compatibility",
        default="none",
        metavar="LEVEL",
        help=f"one of {', '.join(HARDWARE_COMPATIBILITY)} (default none)",
    )
    options.add_argument(
        "--strip-plan", action="store_true", help="leave the weights out of the engine; refit them before use"
    )
    options.add_argument("--refit", action="store_true", help="allow weights to be replaced later")
    options.add_argument(
        "--profiling-verbosity",
        default="layer_names_only",
        metavar="WHICH",
        help=f"one of {', '.join(PROFILING_VERBOSITY)} (default layer_names_only)",
    )
    options.add_argument(
        "--tf32", action="store_true", help="allow TF32 in float32 matrix products (default: not allowed)"
    )


def _request(arguments: argparse.Namespace, options: BuildOptions) -> BuildRequest:
    shapes = {
        f"{which}_shapes": tuple(",".join(texts) for texts in getattr(arguments, f"{which}_shapes"))
        for which in ("min", "opt", "max")
    }
    return BuildRequest(arguments.max_batch, arguments.max_seq_len, arguments.cache_capacity, **shapes, options=options)


def _backend(arguments: argparse.Namespace) -> Backend:
    backend = choose_backend(arguments.backend)
    terminal.say(f"backend: {backend} ({backend.reason})")
    return backend


def _build(arguments: argparse.Namespace) -> None:
    if bool(arguments.bundle) == bool(arguments.onnx) or bool(arguments.onnx) != bool(arguments.output):
        raise InputError("build: give either a BUNDLE, or --onnx FILE with -o FOLDER")
    options = BuildOptions(
        workspace_mib=arguments.workspace,
        builder_optimization_level=arguments.builder_optimization_level,
        timing_cache=arguments.timing_cache,
        version_compatible=arguments.version_compatible,
        hardware_compatibility=arguments.hardware_compatibility,
        strip_plan=arguments.strip_plan,
        refit=arguments.refit,
        profiling_verbosity=arguments.profiling_verbosity,
        tf32=arguments.tf32,
    )
    request = _request(arguments, options)
    backend = _backend(arguments)
    if arguments.bundle:
        records = build_parts(Bundle.open(arguments.bundle), backend, request, terminal.say)
    else:
        records = [build_onnx(Path(arguments.onnx), Path(arguments.output), backend, request, terminal.say)]
    for record in records:
        _print_record(record)


def _print_record(record: EngineRecord) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_row("engine", f"{record.file}, {record.size_bytes / 2**20:,.1f} MiB")
    table.add_row("built with", f"{record.backend} {record.version}; {record.portability}")
    table.add_row("took", f"{record.build_seconds:.1f} s, {record.peak_memory_bytes / 2**30:.2f} GiB at most")
    table.add_row("TF32", "allowed" if record.options.get("tf32") else "not allowed")
    for profile in record.profiles:
        table.add_row(f"profile {profile['name']}", _ranges(profile))
    terminal.stderr.print(table)


def _ranges(profile: dict) -> str:
    """The dynamic inputs of a profile, each as min … max; cache tensors follow the batch and are left out."""
    shown = {
        name: r
        for name, r in profile["ranges"].items()
        if r["min"] != r["max"] and not name.startswith("past_key_values.")
    }
    return ", ".join(
        f"{name} {'×'.join(map(str, r['min']))} … {'×'.join(map(str, r['max']))}" for name, r in shown.items()
    )


def _inspect(arguments: argparse.Namespace) -> None:
    from engines.building.inspection import inspect_bundle

    backend = _backend(arguments)
    bundle = Bundle.open(arguments.bundle)
    results = [inspect_bundle(part, backend, _request(arguments, BuildOptions())) for part in bundle.parts]
    if arguments.format == "json":
        terminal.print_json({"parts": results} if bundle.manifest.parts else results[0])
        return
    for result in results:
        _print_inspection(result)


def _print_inspection(result: dict) -> None:
    table = Table(
        "tensor",
        "mode",
        "dtype",
        "shape",
        "shares memory with",
        title=f"{result['unit']}, {result['dtype']}",
        title_justify="left",
    )
    for tensor in result["io"]:
        table.add_row(
            tensor["name"], tensor["mode"], tensor["dtype"], "×".join(map(str, tensor["shape"])), tensor["alias"] or ""
        )
    terminal.stderr.print(table)
    terminal.say(f"layers: {', '.join(f'{count} {name}' for name, count in result['layers'].items())}")
    masked = sum(layer["mask"] and layer["causal_kind"] == "NONE" for layer in result["attention"])
    terminal.say(f"attention: {len(result['attention'])} layers, {masked} with an explicit mask and no causal kind")
    terminal.say(f"cache updates: {result['kv_cache_updates']}, each of an input into an output at the same address")
    memory = result["memory"]
    terminal.say(
        f"memory: weights {memory['weights_bytes'] / 2**20:,.1f} MiB, activations about {memory['activations_estimate_bytes'] / 2**20:,.1f} MiB, "
        f"cache {memory['cache_bytes_per_sequence'] / 2**20:,.1f} MiB a sequence of {result['cache_capacity']} tokens"
    )
    for note in result["notes"]:
        terminal.say(f"note: {note}")
    for engine in result["engines"]:
        _print_record(EngineRecord(**{name: engine[name] for name in EngineRecord.__dataclass_fields__}))
        terminal.say(f"usable here: {engine['usable']}")
    if not result["engines"]:
        terminal.say("engines: none; `python -m engines build` makes one")


def _compare(arguments: argparse.Namespace) -> int:
    from engines.comparison.compare import CompareRequest, compare_bundle
    from engines.comparison.html_page import to_html
    from engines.comparison.report import print_result, to_dict

    bundle = Bundle.open(arguments.bundle)
    backends = tuple(arguments.backends.split(",")) if arguments.backends is not None else None
    request = CompareRequest(
        backends, arguments.provider, arguments.parser, arguments.audit, arguments.seed, arguments.cache_capacity
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
    if arguments.checkpoint is None:
        return None
    from exporter.checkpoint.formats import open_checkpoint

    checkpoint = open_checkpoint(arguments.checkpoint, arguments.model)
    if checkpoint.config != bundle.manifest.config:
        raise InputError(
            f"checkpoint {arguments.checkpoint}: its geometry is {checkpoint.config}, expected {bundle.manifest.config}, the bundle's"
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


def _refit(arguments: argparse.Namespace) -> None:
    from engines.building.refit import refit_bundle

    for bundle in Bundle.open(arguments.bundle).parts:
        records = [r for r in read_records(bundle.folder) if arguments.engine in (None, r.file)]
        if len(records) != 1:
            names = [record.file for record in read_records(bundle.folder)]
            raise InputError(f"refit: got --engine {arguments.engine} for {bundle.folder}, expected one of {names}")
        _print_record(refit_bundle(bundle, choose_backend(records[0].backend), records[0]))


def main(arguments: list[str] | None = None) -> int:
    return command.run(lambda parsed: parsed.run(parsed), _parser(), arguments)
