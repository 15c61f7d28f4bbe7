"""`python -m exporter`: params, import, export, validate, verify."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from exporter.common import command, terminal
from exporter.common.errors import InputError
from exporter.costs.ledger import Ledger
from exporter.costs.roofline import Step, roofline
from exporter.spec.catalogue import CATALOGUE, WIDTH_RULES, ModelConfig, lookup
from exporter.spec.dtypes import DTYPES, lookup_dtype
from exporter.spec.limits import DEFAULT_MAX_POSITIONS, check_max_positions
from exporter.spec.parameters import weight_shapes
from exporter.spec.unit import COMPONENTS, LOGITS, Unit
from exporter.spec.weight_formats import WEIGHT_FORMATS, WeightFormat

if TYPE_CHECKING:  # they load torch
    from exporter.export import ExportRequest
    from exporter.model.weights import WeightSource

DEFAULT_PAST_LEN = 1000
ROOFLINE_ARGUMENTS = ("bandwidth", "flops", "unit", "batch", "seq_len", "dtype", "weight_bits")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="blockline-export", description="From a checkpoint to a validated ONNX bundle."
    )
    commands = parser.add_subparsers(title="commands", required=True, parser_class=command.CommandParser)

    params = commands.add_parser("params", help="print what a model costs: parameters, bytes, KV cache, FLOPs")
    params.add_argument("--model", required=True, metavar="NAME", help=f"one of {', '.join(CATALOGUE)}")
    params.add_argument(
        "--past-len",
        type=int,
        default=DEFAULT_PAST_LEN,
        metavar="P",
        help="cached tokens that the decoded token reads (default 1000)",
    )
    _add_roofline_arguments(params)
    command.add_format(params)
    params.set_defaults(run=_params)

    importer = commands.add_parser("import", help="fetch the small real model, SmolLM2-135M, as a checkpoint folder")
    importer.add_argument("model", choices=["smollm2-135m"], help="the model to fetch")
    importer.add_argument("-o", "--output", metavar="DIR", help="folder to make (default build/checkpoints/MODEL)")
    importer.set_defaults(run=_import)

    export = commands.add_parser("export", help="export a block, stack, model or component to a bundle and validate it")
    _add_export_arguments(export)
    export.set_defaults(run=_export)

    validate = commands.add_parser("validate", help="compare a bundle's graph in onnxruntime with the eager definition")
    validate.add_argument("bundle", metavar="BUNDLE", help="the bundle's folder")
    validate.add_argument("--seed", type=int, default=0, help="of the random inputs (default 0)")
    validate.add_argument(
        "--by-layer",
        action=argparse.BooleanOptionalAction,
        help="one block at a time, in the memory of one (default: where the whole would not fit)",
    )
    validate.add_argument(
        "--no-report", action="store_true", help="only print the result: a read-only bundle can be validated so"
    )
    command.add_format(validate)
    validate.set_defaults(run=_validate)

    verify = commands.add_parser(
        "verify", help="check every file of a bundle, its graph against the contract, and where its engines came from"
    )
    verify.add_argument("bundle", metavar="BUNDLE", help="the bundle's folder")
    command.add_format(verify)
    verify.set_defaults(run=_verify)
    return parser


def _add_roofline_arguments(params: argparse.ArgumentParser) -> None:
    params.add_argument(
        "--roofline", action="store_true", help="instead: one step's time at a machine's limits, by component"
    )
    group = params.add_argument_group("with --roofline")
    group.add_argument(
        "--bandwidth", type=float, metavar="GB/S", help="what the machine reads from memory, 10^9 bytes a second"
    )
    group.add_argument(
        "--flops", type=float, metavar="TFLOP/S", help="what its matrix products reach, 10^12 operations a second"
    )
    group.add_argument("--unit", metavar="UNIT", help="block (one of them), stack (all) or model (default)")
    group.add_argument("--batch", type=int, metavar="B", help="sequences (default 1)")
    group.add_argument("--seq-len", type=int, metavar="T", help="new tokens of each (default 1)")
    group.add_argument(
        "--dtype", metavar="DTYPE", help=f"of weights and cache, one of {', '.join(DTYPES)} (default fp16)"
    )
    group.add_argument(
        "--weight-bits",
        type=float,
        metavar="BITS",
        help="of a weight in quantized matrices, scales included, such as 4.5",
    )


def _add_export_arguments(export: argparse.ArgumentParser) -> None:
    export.add_argument(
        "--model",
        metavar="NAME",
        help=f"geometry from the catalogue with random weights, or what a Meta checkpoint leaves out: {', '.join(CATALOGUE)}",
    )
    export.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="Hugging Face folder, or Meta folder together with --model: geometry and weights",
    )
    export.add_argument(
        "--unit",
        default="block",
        metavar="UNIT",
        help=f"block (default), stack, model or component:NAME, NAME one of {', '.join(COMPONENTS)}",
    )
    export.add_argument(
        "--layers", metavar="N|A:B", help="the first N layers, or layers A to B-1; a block takes layer 0"
    )
    export.add_argument("--dtype", default="fp16", metavar="DTYPE", help=f"one of {', '.join(DTYPES)} (default fp16)")
    export.add_argument(
        "--attention-dtype",
        metavar="DTYPE",
        help="fp32 computes attention in float32 between casts (default: the dtype)",
    )
    export.add_argument(
        "--weights",
        metavar="FORMAT",
        help=f"store matrices in integers with a scale a block: {', '.join(WEIGHT_FORMATS)}; TensorRT takes the signed ones only",
    )
    export.add_argument(
        "--block-size",
        type=int,
        metavar="N",
        help="weights that share a scale, a power of two of at least 16 (default 32)",
    )
    export.add_argument(
        "--seed", type=int, default=0, help="of random weights, where there is no checkpoint (default 0)"
    )
    export.add_argument(
        "--max-positions",
        type=int,
        metavar="N",
        help=f"longest sequence (default {DEFAULT_MAX_POSITIONS}, at most the model's context)",
    )
    export.add_argument(
        "--logits",
        metavar="WHICH",
        help=f"a model's logits: one of {', '.join(LOGITS)} (default last; all where the cache grows)",
    )
    export.add_argument(
        "--cache",
        default="in_place",
        metavar="HOW",
        help="in_place (default), or growing: past in, present out, as optimum and onnxruntime-genai drive a model",
    )
    export.add_argument(
        "--parts",
        type=int,
        metavar="N",
        help="cut a stack or model into N graphs, which build compiles one after the other",
    )
    export.add_argument(
        "--part-budget",
        type=float,
        metavar="GIB",
        help="instead: as few parts as can each be compiled in this much memory",
    )
    export.add_argument("--no-validate", action="store_true", help="skip the comparison with the eager definition")
    export.add_argument(
        "-o", "--output", required=True, metavar="BUNDLE", help="folder to make; an older bundle there is replaced"
    )


def _params(arguments: argparse.Namespace) -> None:
    config = lookup(arguments.model)
    if arguments.past_len < 0:
        raise InputError(f"past-len: got {arguments.past_len}, expected 0 or more")
    if arguments.roofline:
        _roofline(arguments, config)
        return
    given = [name for name in ROOFLINE_ARGUMENTS if getattr(arguments, name) is not None]
    if given:
        raise InputError(f"params: got --{given[0].replace('_', '-')}, expected it with --roofline only")
    ledger = Ledger.of(config, WIDTH_RULES[arguments.model])
    if arguments.format == "json":
        terminal.print_json({"model": arguments.model, **ledger.to_dict(arguments.past_len)})
    else:
        _print_ledger(arguments.model, ledger, arguments.past_len)


def _roofline(arguments: argparse.Namespace, config: ModelConfig) -> None:
    if arguments.bandwidth is None or arguments.flops is None:
        raise InputError(
            "roofline: got no machine, expected --bandwidth GB/S and --flops TFLOP/S; for this one run `make bench`"
        )
    unit = Unit.parse(arguments.unit or "model", config)
    asked = {name: getattr(arguments, name) for name in ("batch", "seq_len", "past_len", "dtype", "weight_bits")}
    step = Step(**{name: value for name, value in asked.items() if value is not None})
    table = roofline(config, unit, step, arguments.bandwidth * 1e9, arguments.flops * 1e12)
    if arguments.format == "json":
        terminal.print_json({"model": arguments.model, "unit": str(unit), **table})
    else:
        _print_roofline(f"{arguments.model}, {unit}", step, table)


def _print_roofline(what: str, step: Step, table: dict) -> None:
    shape = f"batch {step.batch}, {step.seq_len:,} new tokens each after {step.past_len:,} cached, {step.dtype}"
    shown = Table("component", title=f"{what}: {shape}", title_justify="left")
    for column in ("weights", "cache", "GFLOP", "transfers, ms", "arithmetic, ms", "at the limit, ms"):
        shown.add_column(column, justify="right")
    shown.add_column("bound by")
    for row in table["components"]:
        times = [row["transfer_ms"], row["arithmetic_ms"]]
        cells = [
            _mib(row["weight_bytes"]),
            _mib(row["cache_bytes"]),
            f"{row['flops'] / 1e9:,.3f}",
            *(f"{ms:.4f}" for ms in [*times, max(times)]),
        ]
        shown.add_row(row["name"], *cells, row["bound"])
    shown.add_section()
    whole = [
        _mib(table["weight_bytes"]),
        _mib(table["cache_bytes"]),
        f"{table['flops'] / 1e9:,.3f}",
        "",
        "",
        f"{table['limit_ms']:.4f}",
    ]
    shown.add_row("step", *whole, f"{step.batch * step.seq_len / table['limit_ms'] * 1e3:,.0f} tokens/s")
    terminal.stderr.print(shown)


def _print_ledger(model: str, ledger: Ledger, past_len: int) -> None:
    out = terminal.stderr
    layers = ledger.config.n_layers
    for component in ledger.components:
        table = Table("weight", "calculation", title=f"{model}: {component}", title_justify="left")
        table.add_column("parameters", justify="right")
        for row in ledger.rows:
            if row.component == component:
                table.add_row(row.name, row.calculation, f"{row.parameters:,}")
        total = ledger.component_parameters(component)
        table.add_section()
        table.add_row("per block", "", f"{total:,}")
        table.add_row(f"× {layers} blocks", "", f"{total * layers:,}")
        out.print(table)

    width = Table("step", title="MLP width", title_justify="left")
    width.add_column("result", justify="right")
    for calculation, result in ledger.width_steps:
        width.add_row(calculation, f"{result:,}")
    out.print(width)

    mlp = ledger.component_parameters("swiglu_mlp")
    sizes = Table("MLP of one block", "parameters", "16-bit weights", title="SwiGLU against GELU", title_justify="left")
    rows = {
        "SwiGLU": mlp,
        "GELU, same width": ledger.gelu_mlp["same_width"],
        "GELU, width 4d": ledger.gelu_mlp["width_4d"],
    }
    for name, count in rows.items():
        sizes.add_row(name, f"{count:,}", _mib(2 * count))
    out.print(sizes)

    totals = Table("whole model", title="Totals", title_justify="left")
    totals.add_column("parameters", justify="right")
    for name in DTYPES:
        totals.add_column(name, justify="right")
    rows = {
        "one block": ledger.block_parameters,
        f"{layers} blocks": ledger.block_parameters * layers,
        "token embedding": ledger.embedding_parameters,
        "final norm": ledger.config.hidden_size,
        "output head" + (" (tied)" if ledger.config.tie_word_embeddings else ""): ledger.head_parameters,
        "model": ledger.model_parameters,
    }
    for name, count in rows.items():
        totals.add_row(name, f"{count:,}", *(_mib(count * dtype.n_bytes) for dtype in DTYPES.values()))
    out.print(totals)

    context = ledger.config.context_length
    decode = Table("dtype", "KV cache per token", f"KV cache of {context:,} tokens", f"bytes moved per token at P = {past_len:,}",
                   title=f"Decoding one token: {ledger.flops_per_token(past_len):,} FLOPs at P = {past_len:,}", title_justify="left")  # fmt: skip
    for name in DTYPES:
        per_token = ledger.cache_bytes_per_token(name)
        decode.add_row(
            name, f"{per_token:,} B", _mib(per_token * context), _mib(ledger.bytes_per_token(past_len, name))
        )
    out.print(decode)


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:,.1f} MiB"


def _import(arguments: argparse.Namespace) -> None:
    from exporter.checkpoint.smollm2 import import_smollm2

    target = import_smollm2(arguments.output) if arguments.output else import_smollm2()
    terminal.say(f"{arguments.model}: checkpoint in {target}")


def _export(arguments: argparse.Namespace) -> None:
    lookup_dtype(arguments.dtype)
    request = _request(arguments)
    from exporter.export import export_bundle

    shapes = weight_shapes(request.config, request.unit)
    total = sum(math.prod(shape) for shape in shapes.values()) * lookup_dtype(request.dtype).n_bytes
    with terminal.byte_progress("weights", total) as progress:
        bundle = export_bundle(request, arguments.output, not arguments.no_validate, progress, terminal.say)
    report = bundle.read_report()
    if "validation" in report:
        section = report["validation"]
        terminal.say(
            f"validated: largest error {section['max_error']:.2e} of rms, allowed {section['max_allowed']:.0e}, through {section['through']}"
        )
        _say_control(section)
    else:
        terminal.say("not validated, as asked")
    size = sum(entry["size_bytes"] for entry in bundle.manifest.files.values())
    terminal.say(f"{bundle.folder}: {request.unit}, {request.dtype}, {_mib(size)}, {report['export']['seconds']:.1f} s")


def _request(arguments: argparse.Namespace) -> ExportRequest:
    """Reads the checkpoint or the catalogue; everything wrong with the arguments shows here, before anything is written."""
    from exporter.model.weights import RandomWeights

    if not arguments.model and not arguments.checkpoint:
        raise InputError("export: give either --model NAME (random weights) or --checkpoint DIR")
    extra: dict = {}
    weights: WeightSource
    if arguments.checkpoint:
        from exporter.checkpoint.formats import open_checkpoint

        checkpoint = open_checkpoint(arguments.checkpoint, arguments.model)
        config, weights = checkpoint.config, checkpoint.weights
        extra = {"end_token_ids": checkpoint.end_token_ids, "tokenizer_files": checkpoint.tokenizer_files}
        provenance = {"checkpoint": Path(arguments.checkpoint).name, "tensors": checkpoint.weights.counts}
    else:
        config = lookup(arguments.model)
        weights = RandomWeights(config, arguments.seed)
        provenance = {"model": arguments.model}
        terminal.say(f"weights: random, from seed {arguments.seed}; give --checkpoint for real ones")
    unit = Unit.parse(arguments.unit, config, arguments.layers, arguments.logits, arguments.cache)
    from exporter.costs.stored_size import parts_within
    from exporter.export import ExportRequest

    if arguments.parts is not None and arguments.part_budget is not None:
        raise InputError("export: give either --parts N or --part-budget GIB")
    weight_format = _weight_format(arguments)
    n_parts = 1 if arguments.parts is None else arguments.parts
    if arguments.part_budget is not None:
        lookup_dtype(arguments.dtype)
        if weight_format is not None:
            weight_format.check(config)
        positions, budget_bytes = (
            check_max_positions(arguments.max_positions, config),
            int(arguments.part_budget * 2**30),
        )
        n_parts = parts_within(config, unit, arguments.dtype, positions, weight_format, budget_bytes)
    return ExportRequest(
        config=config,
        unit=unit,
        weights=weights,
        dtype=arguments.dtype,
        max_positions=arguments.max_positions,
        attention_dtype=arguments.attention_dtype,
        n_parts=n_parts,
        weight_format=weight_format,
        provenance=provenance,
        **extra,
    )


def _weight_format(arguments: argparse.Namespace) -> WeightFormat | None:
    if arguments.weights is None:
        if arguments.block_size is not None:
            raise InputError(
                f"block size: got {arguments.block_size} without --weights, expected one of {', '.join(WEIGHT_FORMATS)} there"
            )
        return None
    return (
        WeightFormat(arguments.weights)
        if arguments.block_size is None
        else WeightFormat(arguments.weights, arguments.block_size)
    )


def _validate(arguments: argparse.Namespace) -> int:
    from exporter.bundle.bundle import REPORT_FILE, Bundle
    from exporter.placing.files import check_writable, write_report
    from exporter.placing.folder_lock import changing
    from exporter.validation.bundle_validation import validate_bundle

    bundle = Bundle.open(arguments.bundle)
    if not arguments.no_report:
        try:
            check_writable(bundle.folder / REPORT_FILE, own=True)
        except InputError as error:
            raise InputError(f"{error}; --no-report validates without writing") from None
    section, comparisons = validate_bundle(bundle, seed=arguments.seed, by_layer=arguments.by_layer, say=terminal.say)
    if not arguments.no_report:
        with changing(bundle):
            write_report(bundle, bundle.read_report() | {"validation": section})
    if arguments.format == "json":
        terminal.print_json(section)
    else:
        table = Table(
            "scenario",
            "tensor",
            "shapes",
            "largest error",
            "result",
            title=f"{section['reference']} against {section['candidate']}",
            title_justify="left",
        )
        for c in comparisons:
            shapes = " ".join("×".join(map(str, shape)) for shape in c.shapes[:3]) + (" …" if len(c.shapes) > 3 else "")
            table.add_row(c.scenario, c.tensor, shapes, f"{c.max_error:.2e}", "PASSED" if c.passed else "FAILED")
        terminal.stderr.print(table)
        terminal.say(
            f"allowed at most {section['max_allowed']:.0e} of rms: {section['tolerance']['reason']}; through {section['through']}"
        )
        _say_control(section)
    return command.EXIT_GOOD if section["passed"] else command.EXIT_CHECK_FAILED


def _say_control(section: dict) -> None:
    """Says why more was allowed than the ledger's fixed tolerance, where that is so."""
    from exporter.validation.control import explain_control

    if section["control"]:
        terminal.say(explain_control(section["control"], section["tolerance"]["allowed"]))


def _verify(arguments: argparse.Namespace) -> None:
    from exporter.validation.verify import verify_bundle

    verification = verify_bundle(arguments.bundle)
    if arguments.format == "json":
        terminal.print_json(verification.to_dict())
    verification.check()
    if arguments.format == "table":
        terminal.say(
            f"{verification.folder}: {', '.join(verification.files)} are as they were written, the graph keeps its contract"
        )
        if verification.others:
            terminal.say(f"not the bundle's, and not looked at: {', '.join(verification.others)}")


def main(arguments: list[str] | None = None) -> int:
    return command.run(lambda parsed: parsed.run(parsed), _parser(), arguments)
