"""python -m benchmarks: times our step and other runtimes' steps in turn, over the same weights and tokens.

`--list` names the contenders, the workloads and the other measurements.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.machine.processes import use_cores
from benchmarks.output import tables as report
from benchmarks.output.record_form import check_record
from benchmarks.race.lineup import LINEUP, choose_lineup
from benchmarks.race.plans import run_plan
from benchmarks.race.workloads import FULL, QUICK, Plan
from exporter.common import command, terminal
from exporter.common.errors import InputError

CHECKPOINT = Path("build/checkpoints/smollm2-135m")
OTHERS = {  # module → what it measures
    "benchmarks.own.token_agreement": "agreement with transformers token by token, for every dtype and backend",
    "benchmarks.own.blocks": "export, validation, audit and compilation of full-size blocks",
    "benchmarks.own.large_checkpoint": "export of a 16 GB checkpoint compared with a plain copy; compilation in parts",
    "benchmarks.own.exporters": "export of the small real model by our exporter, optimum's and genai's builder",
    "benchmarks.own.runtime_overhead": "time that the runtime adds to a step",
    "benchmarks.own.measured_errors": "errors that the allowed tolerances are derived from",
    "benchmarks.own.gpu_check": "parity, aliases, graphs and latency on a machine with a GPU",
    "benchmarks.campaigns.kills": "commands killed at random moments and before every call that changes files",
    "benchmarks.campaigns.races": "two commands at once in one folder; readers of a bundle that is replaced",
    "benchmarks.campaigns.soak": "threads that share one session, with planted faults, for a long time",
    "benchmarks.campaigns.hostile_input": "hostile files and arguments for every call and command that opens them",
    "benchmarks.campaigns.mutants": "faults planted into graphs, weights, networks, records and profiles",
}


def _parser() -> argparse.ArgumentParser:
    parser = command.CommandParser(
        prog="python -m benchmarks", description="Compare our step with other runtimes' steps, or profile one step."
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="run tiny models, with only those peers that --only names")
    add("--only", nargs="+", metavar="NAME", help="contenders to run besides the reference, eager and ours")
    add("--workloads", nargs="+", metavar="NAME", help="workloads to run; the run is not recorded then")
    add("--threads", type=int, metavar="N", help="cores to use (default: all)")
    add("--checkpoint", type=Path, default=CHECKPOINT, metavar="DIR", help="the real model (default %(default)s)")
    add("--list", action="store_true", help="list contenders, workloads and the other measurements")
    add("--show", type=Path, metavar="RECORD", help="print the tables of an existing record")
    add("--plots", type=Path, metavar="RECORD", help="draw an existing record again, to docs/figures")
    add = parser.add_argument_group("profile of one decode step").add_argument
    add("--profile", type=Path, metavar="BUNDLE", help="print onnxruntime's profile by operator and by component")
    add("--past-len", type=int, default=1000, metavar="P", help="cached tokens (default %(default)s)")
    add("--batch", type=int, default=1, metavar="B", help="sequences (default %(default)s)")
    add("--cache-capacity", type=int, default=2048, metavar="C", help="tokens in the cache (default %(default)s)")
    command.add_format(parser)
    return parser


def _main(arguments: argparse.Namespace) -> int | None:
    if arguments.list:
        return _list()
    if arguments.show:
        return _show(json.loads(arguments.show.read_text(encoding="utf-8")), arguments.format)
    if arguments.plots:
        return _draw(json.loads(arguments.plots.read_text(encoding="utf-8")), Path(FULL.figures))
    threads = use_cores(arguments.threads)
    if arguments.profile:
        return _profile(arguments, threads)
    plan, lineup = QUICK if arguments.quick else FULL, choose_lineup(arguments.only, arguments.quick)
    record = run_plan(plan, lineup, threads, arguments.checkpoint, arguments.workloads)
    check_record(record)
    if arguments.workloads is None and arguments.only is None:
        _write(record, plan)
    return _show(record, arguments.format)


def _list() -> None:
    for entry in LINEUP:
        where = f", in build/peers/{entry.environment}" if entry.environment else ", on a GPU" if entry.gpu else ""
        terminal.say(f"contender  {entry.name}: weights {entry.weights}{where}")
    for workload in FULL.workloads:
        cases = [*(case.name for case in workload.decodes), *(f"prefill {length:,}" for length in workload.prefills)]
        terminal.say(f"workload   {workload.name}: {', '.join(cases)}")
    for module, what in OTHERS.items():
        terminal.say(f"python -m {module}: {what}")


def _write(record: dict, plan: Plan) -> None:
    path = Path(plan.record)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    terminal.say(f"record: {path}")
    _draw(record, Path(plan.figures))


def _show(record: dict, form: str) -> None:
    if form == "json":
        terminal.print_json(record)
        return
    for table in report.tables(record):
        terminal.stderr.print(table)
    terminal.say(f"threads {record['threads']}, {record['machine']['cpu']}, {record['seconds']} s in total")


def _draw(record: dict, folder: Path) -> None:
    try:
        from benchmarks.output.plots import draw
    except ModuleNotFoundError as missing:
        raise InputError(
            f"plots: {missing.name} is not installed; run `make bench`, or pip install 'blockline[bench]'"
        ) from missing
    for file in draw(record, folder):
        terminal.say(f"plot: {file}")


def _profile(arguments: argparse.Namespace, threads: int) -> None:
    from benchmarks.machine.step_profile import tables
    from exporter.bundle.bundle import Bundle

    bundle = Bundle.open(arguments.profile)
    shown, data = tables(bundle, arguments.batch, arguments.past_len, arguments.cache_capacity, threads)
    if arguments.format == "json":
        terminal.print_json(data)
    for table in shown if arguments.format == "table" else ():
        terminal.stderr.print(table)


def main(arguments: list[str] | None = None) -> int:
    return command.run(_main, _parser(), arguments)


if __name__ == "__main__":
    sys.exit(main())
