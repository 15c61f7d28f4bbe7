"""`python -m exporter params`: what a model costs, and the time of one step at a machine's limits."""

from __future__ import annotations

import argparse

from rich.table import Table

from exporter.common import command, terminal
from exporter.common.errors import InputError
from exporter.common.terminal import mib
from exporter.costs.ledger import Ledger
from exporter.costs.roofline import Step, roofline
from exporter.spec.catalogue import CATALOGUE, WIDTH_RULES, ModelConfig, lookup
from exporter.spec.dtypes import DTYPES
from exporter.spec.unit import Unit

DEFAULT_PAST_LEN = 1000
ROOFLINE_ARGUMENTS = ("bandwidth", "flops", "unit", "batch", "seq_len", "dtype", "weight_bits")


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Adds the parser of this command."""
    parser = commands.add_parser("params", help="print what a model costs: parameters, bytes, KV cache, FLOPs")
    parser.add_argument("--model", required=True, metavar="NAME", help=f"one of {', '.join(CATALOGUE)}")
    parser.add_argument(
        "--past-len",
        type=int,
        default=DEFAULT_PAST_LEN,
        metavar="P",
        help=f"number of cached tokens that the decoded token reads (default {DEFAULT_PAST_LEN})",
    )
    parser.add_argument(
        "--roofline", action="store_true", help="print the time of one step at a machine's limits, by component"
    )
    group = parser.add_argument_group("with --roofline")
    group.add_argument("--bandwidth", type=float, metavar="GB/S", help="memory read rate, in 10^9 bytes a second")
    group.add_argument(
        "--flops", type=float, metavar="TFLOP/S", help="rate of matrix products, in 10^12 operations a second"
    )
    group.add_argument("--unit", metavar="UNIT", help="block (one block), stack (all blocks) or model (default)")
    group.add_argument("--batch", type=int, metavar="B", help="number of sequences (default 1)")
    group.add_argument("--seq-len", type=int, metavar="T", help="number of new tokens in each sequence (default 1)")
    group.add_argument(
        "--dtype", metavar="DTYPE", help=f"dtype of weights and cache: one of {', '.join(DTYPES)} (default fp16)"
    )
    group.add_argument(
        "--weight-bits",
        type=float,
        metavar="BITS",
        help="bits per weight of quantized matrices, with their scales, such as 4.5",
    )
    command.add_format(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Prints the costs of a model, or with --roofline the limits of one step."""
    config = lookup(arguments.model)
    if arguments.past_len < 0:
        raise InputError(f"--past-len: got {arguments.past_len}, expected 0 or more")
    if arguments.roofline:
        _run_roofline(arguments, config)
        return
    given = [name for name in ROOFLINE_ARGUMENTS if getattr(arguments, name) is not None]
    if given:
        raise InputError(f"params: got --{given[0].replace('_', '-')}, expected it with --roofline only")
    ledger = Ledger.of(config, WIDTH_RULES[arguments.model])
    if arguments.format == "json":
        terminal.print_json({"model": arguments.model, **ledger.to_dict(arguments.past_len)})
        return
    tables = [
        _totals_table(ledger),
        *(_component_table(arguments.model, ledger, component) for component in ledger.components),
        _width_table(ledger),
        _mlp_table(ledger),
        _decode_table(ledger, arguments.past_len),
    ]
    for table in tables:
        terminal.stderr.print(table)


def _run_roofline(arguments: argparse.Namespace, config: ModelConfig) -> None:
    if arguments.bandwidth is None or arguments.flops is None:
        raise InputError(
            "roofline: got no machine, expected --bandwidth GB/S and --flops TFLOP/S; for this one run `make bench`"
        )
    unit = Unit.parse("model" if arguments.unit is None else arguments.unit, config)
    asked = {name: getattr(arguments, name) for name in ("batch", "seq_len", "past_len", "dtype", "weight_bits")}
    step = Step(**{name: value for name, value in asked.items() if value is not None})
    costs = roofline(config, unit, step, arguments.bandwidth * 1e9, arguments.flops * 1e12)
    if arguments.format == "json":
        terminal.print_json({"model": arguments.model, "unit": str(unit), **costs})
    else:
        terminal.stderr.print(_roofline_table(f"{arguments.model}, {unit}", step, costs))


def _roofline_table(what: str, step: Step, costs: dict) -> Table:
    shape = f"batch {step.batch}, {step.seq_len:,} new tokens each after {step.past_len:,} cached, {step.dtype}"
    table = Table("component", title=f"{what}: {shape}", title_justify="left")
    for column in ("weights", "cache", "GFLOP", "transfers, ms", "arithmetic, ms", "at the limit, ms"):
        table.add_column(column, justify="right")
    table.add_column("bound by")
    for row in costs["components"]:
        times = [row["transfer_ms"], row["arithmetic_ms"]]
        table.add_row(row["name"], *_cost_cells(row), *(f"{ms:.4f}" for ms in [*times, max(times)]), row["bound"])
    table.add_section()
    rate = f"{step.batch * step.seq_len / costs['limit_ms'] * 1e3:,.0f} tokens/s"
    table.add_row("step", *_cost_cells(costs), "", "", f"{costs['limit_ms']:.4f}", rate)
    return table


def _cost_cells(costs: dict) -> tuple[str, str, str]:
    return mib(costs["weight_bytes"]), mib(costs["cache_bytes"]), f"{costs['flops'] / 1e9:,.3f}"


def _totals_table(ledger: Ledger) -> Table:
    layers, config = ledger.config.n_layers, ledger.config
    table = Table("whole model", title="Totals", title_justify="left")
    table.add_column("parameters", justify="right")
    for name in DTYPES:
        table.add_column(name, justify="right")
    rows = {
        "one block": ledger.block_parameters,
        f"{layers} blocks": ledger.block_parameters * layers,
        "token embedding": ledger.embedding_parameters,
        "final norm": config.hidden_size,
        "output head" + (" (tied)" if config.tie_word_embeddings else ""): ledger.head_parameters,
        "model": ledger.model_parameters,
    }
    for name, count in rows.items():
        table.add_row(name, f"{count:,}", *(mib(count * dtype.n_bytes) for dtype in DTYPES.values()))
    return table


def _component_table(model: str, ledger: Ledger, component: str) -> Table:
    layers, total = ledger.config.n_layers, ledger.component_parameters(component)
    table = Table("weight", "calculation", title=f"{model}: {component}", title_justify="left")
    table.add_column("parameters", justify="right")
    for row in ledger.rows:
        if row.component == component:
            table.add_row(row.name, row.calculation, f"{row.parameters:,}")
    table.add_section()
    table.add_row("per block", "", f"{total:,}")
    table.add_row(f"× {layers} blocks", "", f"{total * layers:,}")
    return table


def _width_table(ledger: Ledger) -> Table:
    table = Table("step", title="MLP width", title_justify="left")
    table.add_column("result", justify="right")
    for calculation, result in ledger.width_steps:
        table.add_row(calculation, f"{result:,}")
    return table


def _mlp_table(ledger: Ledger) -> Table:
    table = Table("MLP of one block", "parameters", "16-bit weights", title="SwiGLU against GELU", title_justify="left")
    rows = {
        "SwiGLU": ledger.component_parameters("swiglu_mlp"),
        "GELU, same width": ledger.gelu_mlp["same_width"],
        "GELU, width 4d": ledger.gelu_mlp["width_4d"],
    }
    for name, count in rows.items():
        table.add_row(name, f"{count:,}", mib(2 * count))
    return table


def _decode_table(ledger: Ledger, past_len: int) -> Table:
    context = ledger.config.context_length
    title = f"Decoding one token: {ledger.flops_per_token(past_len):,} FLOPs at P = {past_len:,}"
    headers = (f"KV cache of {context:,} tokens", f"bytes moved per token at P = {past_len:,}")
    table = Table("dtype", "KV cache per token", *headers, title=title, title_justify="left")
    for name in DTYPES:
        per_token, moved = ledger.cache_bytes_per_token(name), ledger.bytes_per_token(past_len, name)
        table.add_row(name, f"{per_token:,} B", mib(per_token * context), mib(moved))
    return table
