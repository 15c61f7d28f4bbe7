"""python -m benchmarks: our step beside everyone else's, the same weights and tokens, in turn. `--list` names what else is measured."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path

from benchmarks.machine.description import machine, stamp
from benchmarks.machine.machine_limits import measure_limits
from benchmarks.output import tables as report
from benchmarks.output.record_form import check_record
from benchmarks.own.exporters import EXPORTERS, by_depth
from benchmarks.race.lineup import LINEUP, OURS, REFERENCE, Entry
from benchmarks.race.models import random_checkpoint
from benchmarks.race.run import Run
from benchmarks.race.targets import measured_targets
from benchmarks.race.workloads import FULL, QUICK, Plan
from exporter.common import command, terminal
from exporter.common.errors import InputError

CHECKPOINT = Path("build/checkpoints/smollm2-135m")
FOLDER = Path("build/bench")
OTHERS = {
    "benchmarks.own.token_agreement": "token-level agreement with transformers, every dtype and backend",
    "benchmarks.own.blocks": "export, validation, audit and compilation of full-size blocks",
    "benchmarks.own.large_checkpoint": "a whole 16 GB checkpoint exported against a plain copy, and compiled in parts",
    "benchmarks.own.exporters": "the small real model through our exporter, optimum's and genai's builder",
    "benchmarks.own.runtime_overhead": "what the runtime adds to a step",
    "benchmarks.own.measured_errors": "the errors that the tolerance ledger stands on",
    "benchmarks.campaigns.kills": "commands killed at random moments and before every call that touches the file system",
    "benchmarks.campaigns.races": "two commands at once in one folder, and readers of a bundle that is replaced",
    "benchmarks.campaigns.soak": "sequences coming and going in a session that threads share, with faults made on purpose",
    "benchmarks.campaigns.hostile_input": "hostile files and arguments through every door",
    "benchmarks.own.gpu_check": "on a machine with a GPU: parity, aliases, graphs and latency",
}


def _parser() -> argparse.ArgumentParser:
    parser = command.CommandParser(
        prog="python -m benchmarks", description="Our step beside everyone else's; also a profile of one step."
    )
    parser.add_argument(
        "--quick", action="store_true", help="for CI: tiny models; of the peers only those that --only names"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contenders to take, beside the reference and ours")
    parser.add_argument("--workloads", nargs="+", metavar="NAME", help="workloads to take; nothing is recorded then")
    parser.add_argument("--threads", type=int, metavar="N", help="cores to use (default: all)")
    parser.add_argument(
        "--checkpoint", type=Path, default=CHECKPOINT, metavar="DIR", help="the real model (default %(default)s)"
    )
    parser.add_argument("--list", action="store_true", help="name contenders, workloads and the other benchmarks")
    parser.add_argument(
        "--show", type=Path, metavar="RECORD", help="print the tables of a record that was written before"
    )
    parser.add_argument("--plots", type=Path, metavar="RECORD", help="draw a record again, to docs/figures")
    profile = parser.add_argument_group("profile of one decode step")
    profile.add_argument(
        "--profile", type=Path, metavar="BUNDLE", help="by operator and by component, from onnxruntime's profiler"
    )
    profile.add_argument("--past-len", type=int, default=1000, metavar="P", help="cached tokens (default %(default)s)")
    profile.add_argument("--batch", type=int, default=1, metavar="B", help="sequences (default %(default)s)")
    profile.add_argument("--cache-capacity", type=int, default=2048, metavar="C", help="default %(default)s")
    command.add_format(parser)
    return parser


def _main(arguments: argparse.Namespace) -> int | None:
    if arguments.list:
        return _list()
    if arguments.show:
        return _show(json.loads(arguments.show.read_text(encoding="utf-8")), arguments.format)
    if arguments.plots:
        return _draw(json.loads(arguments.plots.read_text(encoding="utf-8")), Path(FULL.figures))
    threads = _use_threads(arguments.threads)
    if arguments.profile:
        return _profile(arguments, threads)
    plan = QUICK if arguments.quick else FULL
    record = measure(plan, _lineup(arguments), threads, arguments.checkpoint, arguments.workloads)
    check_record(record)
    if arguments.workloads is None and arguments.only is None:
        path = Path(plan.record)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        terminal.say(f"recorded in {path}")
        _draw(record, Path(plan.figures))
    return _show(record, arguments.format)


def _use_threads(wanted: int | None) -> int:
    """Keeps this process and those it starts to so many cores; returns how many."""
    cores = sorted(os.sched_getaffinity(0))
    if wanted is not None and not 1 <= wanted <= len(cores):
        raise InputError(f"threads: got {wanted}, expected 1 to {len(cores)}, the cores of this machine")
    os.sched_setaffinity(0, cores[:wanted])
    return wanted or len(cores)


def _lineup(arguments: argparse.Namespace) -> list[Entry]:
    names = [entry.name for entry in LINEUP]
    unknown = set(arguments.only or ()) - set(names)
    if unknown:
        raise InputError(f"contenders: got {', '.join(sorted(unknown))}, expected some of {', '.join(names)}")
    default = [entry.name for entry in LINEUP if not (arguments.quick and entry.environment)]
    wanted = {REFERENCE, "eager", OURS, *(arguments.only or default)}
    return [entry for entry in LINEUP if entry.name in wanted]


def measure(plan: Plan, lineup: list[Entry], threads: int, checkpoint: Path, only: list[str] | None = None) -> dict:
    """Runs a plan and returns its record; `only` names workloads, and leaves out the exports by depth."""
    started = time.perf_counter()
    names = [workload.name for workload in plan.workloads]
    if set(only or ()) - set(names):
        raise InputError(f"workloads: got {', '.join(only or ())}, expected some of {', '.join(names)}")
    real = checkpoint if (checkpoint / "config.json").is_file() else None
    if real is None and any(workload.config is None for workload in plan.workloads):
        raise InputError(f"checkpoint {checkpoint}: no config.json there; fetch the real model with `make checkpoint`")
    load_average = os.getloadavg()[0]
    limits = measure_limits(threads, plan.bandwidth_bytes)
    terminal.say(
        f"reads {limits.bandwidth / 1e9:.1f} GB/s, float32 products {limits.flop_rate / 1e9:.0f} GFLOP/s; load average {load_average:.1f}"
    )
    run = Run(lineup, threads, real, FOLDER, limits, terminal.say)
    workloads = {
        workload.name: run.workload(workload) for workload in plan.workloads if only is None or workload.name in only
    }
    record = {
        **stamp(),
        "machine": machine() | {"load_average_before": load_average},
        "threads": threads,
        "limits": limits.to_dict(),
        "workloads": workloads,
        "exports by depth": [] if only else _exports(plan, lineup, real),
        "targets": [],
    }
    record["seconds"] = round(time.perf_counter() - started, 1)
    return record | {"targets": measured_targets(record)}


def _exports(plan: Plan, lineup: list[Entry], tokenizer: Path | None) -> list[dict]:
    terminal.say(f"exports of {', '.join(map(str, plan.depths))} layers")
    checkpoints = {
        depth: random_checkpoint(
            FOLDER / "checkpoints" / f"depth-{depth}", dataclasses.replace(plan.depth_config, n_layers=depth), tokenizer
        )
        for depth in plan.depths
    }
    taking_part = {entry.name for entry in lineup}
    return by_depth(checkpoints, [name for name in EXPORTERS if name in taking_part], FOLDER)


def _list() -> None:
    for entry in LINEUP:
        where = f", in build/peers/{entry.environment}" if entry.environment else ", on a GPU" if entry.gpu else ""
        terminal.say(f"contender  {entry.name}: weights {entry.weights}{where}")
    for workload in FULL.workloads:
        cases = [*(case.name for case in workload.decodes), *(f"prefill {length:,}" for length in workload.prefills)]
        terminal.say(f"workload   {workload.name}: {', '.join(cases)}")
    for module, what in OTHERS.items():
        terminal.say(f"python -m {module}: {what}")


def _show(record: dict, form: str) -> None:
    if form == "json":
        terminal.print_json(record)
        return
    for table in report.tables(record):
        terminal.stderr.print(table)
    terminal.say(f"threads {record['threads']}, {record['machine']['cpu']}, {record['seconds']} s in all")


def _draw(record: dict, folder: Path) -> None:
    try:
        from benchmarks.output.plots import draw
    except ModuleNotFoundError as missing:
        raise InputError(
            f"plots: {missing.name} is not installed; run `make bench`, or pip install 'blockline[bench]'"
        ) from missing
    for file in draw(record, folder):
        terminal.say(f"drawn: {file}")


def _profile(arguments: argparse.Namespace, threads: int) -> None:
    from benchmarks.machine.step_profile import tables
    from exporter.bundle.bundle import Bundle

    shown, data = tables(
        Bundle.open(arguments.profile), arguments.batch, arguments.past_len, arguments.cache_capacity, threads
    )
    if arguments.format == "json":
        terminal.print_json(data)
    for table in shown if arguments.format == "table" else ():
        terminal.stderr.print(table)


def main(arguments: list[str] | None = None) -> int:
    return command.run(_main, _parser(), arguments)


if __name__ == "__main__":
    sys.exit(main())
