"""Runs the campaign of mutants.

python -m benchmarks.campaigns.mutants [--per-kind N] [--record]     writes benchmarks/records/mutants.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from benchmarks.campaigns.mutants.good_units import GOOD_UNITS
from benchmarks.campaigns.mutants.mutant_campaign import jobs, real_jobs, run_jobs
from benchmarks.campaigns.mutants.twin_oracle import LARGEST_EQUAL_CHANGE, SEED
from benchmarks.machine.description import machine, stamp

RECORD = Path("benchmarks/records/mutants.json")


def main() -> int:
    arguments = _parser().parse_args()
    origin, started = stamp(), time.perf_counter()  # before the run, because the working tree may change during it
    chosen = jobs(arguments.per_kind, arguments.units.split(",") if arguments.units else tuple(GOOD_UNITS))
    if arguments.checkpoint is not None:
        chosen += real_jobs(arguments.checkpoint, arguments.real)
    result = run_jobs(chosen, arguments.seed, lambda line: print(line, file=sys.stderr, flush=True))
    record = {
        "what": "mutants of graphs, weights, networks, engine records and profiles: those that compute something else "
        "must be caught",
        "oracle": {"largest equal change, of rms": LARGEST_EQUAL_CHANGE, "seed of its inputs": SEED},
        "seed": arguments.seed,
        "per kind": arguments.per_kind,
        "machine": machine(),
        **origin,
        "seconds": round(time.perf_counter() - started, 1),
        **result,
    }
    if arguments.record:
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    else:
        print(json.dumps(record, indent=1))
    return 1 if result["passed wrongly"] else 0


def _parser() -> argparse.ArgumentParser:
    prog = "python -m benchmarks.campaigns.mutants"
    add = (parser := argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])).add_argument
    add("--per-kind", type=int, default=1, metavar="N", help="mutants of each kind and unit (default 1)")
    add("--seed", type=int, default=0, metavar="N", help="seed for the choice of mutants (default 0)")
    add("--units", metavar="NAMES", help="names of good units, with commas between (default: all)")
    add("--checkpoint", type=Path, metavar="DIR", help="the real model, whose layers are tried too")
    add("--real", type=int, default=12, metavar="N", help="mutants of each part of the real model (default 12)")
    add("--record", action="store_true", help=f"write {RECORD}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
