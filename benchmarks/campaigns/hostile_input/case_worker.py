"""Runs cases one after the other: reads each from stdin and prints its result on stdout.

An input line is `["kind", number]`; an output line is a JSON object. The parent kills a worker that is silent too long.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import time
import traceback
from pathlib import Path
from random import Random

from benchmarks.campaigns.hostile_input.gates import Gates
from benchmarks.campaigns.hostile_input.inputs import arguments, bundles, checkpoints
from benchmarks.campaigns.hostile_input.originals import CATALOGUE_ENTRY
from benchmarks.campaigns.hostile_input.sandbox import Sandbox, Watch
from exporter.common.errors import CheckFailed, InputError, NumericalError
from exporter.spec.catalogue import CATALOGUE

KINDS = bundles.KINDS | checkpoints.KINDS | arguments.KINDS
ADDRESS_SPACE = 12 * 2**30  # last limit, above the address space at the start; the parent's limits are lower
CONTROL = set(map(chr, (*range(32), *range(127, 160)))) - set("\n\t\r")


def run_case(kind: str, number: int, seed: int, originals: Path, sandbox: Sandbox, gates: Gates) -> dict:
    """Makes the input of a case and opens it through its doors; returns the result."""
    rng = Random(f"{seed}:{kind}:{number}")
    doors = KINDS[kind](originals, sandbox.make(), rng)
    result: dict = {
        "kind": kind,
        "number": number,
        "outcomes": [],
        "faults": [],
        "gates": [],
        "cpu_seconds": 0.0,
        "memory_bytes": 0,
    }
    gates.passed.clear()
    for label, door in doors:
        print(json.dumps({"door": label}), flush=True)
        before = _start_memory()
        started = time.process_time()
        faults: list[str] = []
        said: list[str] = []
        outcome = "success"
        with sandbox.closed(faults, said):
            try:
                outcome = _outcome(door(sandbox.root))
            except SystemExit as stop:
                outcome = _outcome(stop.code)
            except (InputError, OSError):
                outcome = "refused (2)"
            except (CheckFailed, NumericalError):
                outcome = "failed (1)"
            except BaseException as error:
                outcome = "traceback"
                faults.append(f"traceback: {_place(error)}")
        if kind not in arguments.KINDS:  # argparse repeats the arguments
            faults += [f"control character {c!r} in the messages" for c in sorted(CONTROL & set(said[0]))[:1]]
        result["outcomes"].append((label, outcome))
        result["faults"] += [f"{label}: {fault}" for fault in faults]
        result["cpu_seconds"] = max(result["cpu_seconds"], time.process_time() - started)
        result["memory_bytes"] = max(result["memory_bytes"], _peak_memory() - before)
        result["said"] = said[0][-300:]
    result["gates"] = sorted(gates.passed)
    return result


def _outcome(code: int | None) -> str:
    return {None: "success", 0: "success", 1: "failed (1)", 2: "refused (2)"}.get(code, f"exit code {code}")


def _place(error: BaseException) -> str:
    """Returns the error's type, its message, and the last line of the project's code in its traceback."""
    own = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if "/campaigns/" not in f.filename and "site-packages" not in f.filename
    ]
    where = f"{Path(own[-1].filename).name}:{own[-1].lineno} {own[-1].name}" if own else "?"
    return f"{type(error).__name__} at {where}: {str(error)[:150]}"


def _start_memory() -> int:
    """Resets the peak of the resident size; returns the present size in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak_memory() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def main(folder: str, originals: str, seed: str) -> None:
    CATALOGUE.update(CATALOGUE_ENTRY)
    root = Path(folder).absolute()
    sandbox, gates = Sandbox(root, Watch()), Gates()
    sandbox.make()
    os.chdir(root.parent)
    limit = _status("VmSize") + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        kind, number = json.loads(line)
        try:
            result = run_case(kind, number, int(seed), Path(originals), sandbox, gates)
        except Exception as error:  # a case whose input cannot be made must be reported, and the campaign must continue
            lost = {"outcomes": [], "gates": [], "cpu_seconds": 0.0, "memory_bytes": 0}
            result = {
                "kind": kind,
                "number": number,
                "faults": [f"campaign: the input could not be made: {_place(error)}"],
                **lost,
            }
        print(json.dumps(result), flush=True)
    shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
