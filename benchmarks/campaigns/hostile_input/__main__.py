"""Runs the campaign of hostile input.

python -m benchmarks.campaigns.hostile_input [--cases N] [--record]     writes benchmarks/records/hostile_input.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.campaigns.hostile_input.campaign import CASE_BYTES, CASE_SECONDS, run_campaign
from benchmarks.campaigns.hostile_input.originals import make_originals
from benchmarks.machine.description import machine, stamp

SHARES = {  # kind of input → share of the cases
    "manifest": 12,
    "geometry": 8,
    "graph": 14,
    "external data": 10,
    "data file": 6,
    "tokenizer": 5,
    "report and genai config": 3,
    "engines": 6,
    "config": 7,
    "safetensors": 8,
    "shard index": 4,
    "params": 3,
    "pth": 6,
    "command line": 12,
    "prompt": 3,
}
RECORD = Path("benchmarks/records/hostile_input.json")


def main() -> int:
    arguments = _parser().parse_args()
    kinds = arguments.kinds.split(",") if arguments.kinds else list(SHARES)
    total = sum(SHARES[kind] for kind in kinds)
    cases = {kind: -(-arguments.cases * SHARES[kind] // total) for kind in kinds}
    origin = stamp()  # before the run, because the working tree may change during it
    with tempfile.TemporaryDirectory() as scratch:
        originals = arguments.originals or Path(scratch)
        if not (originals / "sharded").is_dir():
            make_originals(originals)
        result = run_campaign(cases, arguments.seed, arguments.jobs, originals.absolute(), _reporter())
    record = {
        "what": "hostile files and arguments: success, or the project's own error with exit code 1 or 2",
        "limits": {"cpu_seconds": CASE_SECONDS, "bytes": CASE_BYTES},
        "seed": arguments.seed,
        "machine": machine(),
        **origin,
        **result,
    }
    if arguments.record:
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    else:
        print(json.dumps(result, indent=1))
    return 1 if result["faults"] else 0


def _parser() -> argparse.ArgumentParser:
    prog = "python -m benchmarks.campaigns.hostile_input"
    add = (parser := argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])).add_argument
    add("--cases", type=int, default=20_000, metavar="N", help="approximate number of cases (default 20,000)")
    add("--seed", type=int, default=0, metavar="N", help="seed for all inputs (default 0)")
    add("--jobs", type=int, default=1, metavar="N", help="number of worker processes (default 1)")
    add("--kinds", metavar="NAMES", help=f"kinds of input, with commas between (default: all): {', '.join(SHARES)}")
    add("--originals", type=Path, metavar="DIR", help="folder that keeps the good bundles for later runs")
    add("--record", action="store_true", help=f"write {RECORD}")
    return parser


def _reporter() -> Callable[[dict], None]:
    """Returns a function that prints each fault, and the number of cases after every thousand."""
    numbers = itertools.count(1)

    def report(result: dict) -> None:
        if (number := next(numbers)) % 1000 == 0:
            print(f"{number:,} cases", file=sys.stderr, flush=True)
        for fault in result["faults"]:
            print(f"{result['kind']} {result['number']}: {fault}", file=sys.stderr, flush=True)

    return report


if __name__ == "__main__":
    sys.exit(main())
