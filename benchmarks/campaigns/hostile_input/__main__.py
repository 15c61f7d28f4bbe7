"""`python -m benchmarks.campaigns.hostile_input`: the campaign at any size; with --record, figures into benchmarks/records."""

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

# Shares of a campaign by kind of input.
SHARES = {
    "manifest": 12, "geometry": 8, "graph": 14, "external data": 10, "data file": 6, "tokenizer": 5, "report and genai config": 3, "engines": 6,
    "config": 7, "safetensors": 8, "shard index": 4, "params": 3, "pth": 6, "command line": 12, "prompt": 3,
}  # fmt: skip
RECORD = Path("benchmarks/records/hostile_input.json")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000, metavar="N", help="about how many in all (default 20,000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="workers (default 1)")
    parser.add_argument("--kinds", help=f"names with commas (default all): {', '.join(SHARES)}")
    parser.add_argument("--originals", type=Path, metavar="DIR", help="keep the good bundles there and use them again")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD}")
    arguments = parser.parse_args()
    kinds = arguments.kinds.split(",") if arguments.kinds else list(SHARES)
    total = sum(SHARES[kind] for kind in kinds)
    cases = {kind: -(-arguments.cases * SHARES[kind] // total) for kind in kinds}
    of_the_code = stamp()  # before the run, in which the working tree may change
    with tempfile.TemporaryDirectory() as scratch:
        originals = arguments.originals or Path(scratch)
        if not (originals / "sharded").is_dir():
            make_originals(originals)
        result = run_campaign(cases, arguments.seed, arguments.jobs, originals.absolute(), _reporter())
    record = {
        "what": "hostile files and arguments through every door: success, or the project's own error with exit code 1 or 2",
        "limits": {"cpu_seconds": CASE_SECONDS, "bytes": CASE_BYTES},
        "seed": arguments.seed, "machine": machine(), **of_the_code, **result,
    }  # fmt: skip
    if arguments.record:
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    else:
        print(json.dumps(result, indent=1))
    return 1 if result["faults"] else 0


def _reporter() -> Callable[[dict], None]:
    """Says each fault, and every thousand cases how many there were."""
    numbers = itertools.count(1)

    def report(result: dict) -> None:
        if (number := next(numbers)) % 1000 == 0:
            print(f"{number:,} cases", file=sys.stderr, flush=True)
        for fault in result["faults"]:
            print(f"{result['kind']} {result['number']}: {fault}", file=sys.stderr, flush=True)

    return report


if __name__ == "__main__":
    sys.exit(main())
