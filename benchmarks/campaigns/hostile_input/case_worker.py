"""Runs cases one after the other in this process, as told on stdin, and says on stdout how each went.

A line in is `["kind", number]`; a line out is a JSON object. The parent ends a worker that is silent for too long.
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
ADDRESS_SPACE = 12 * 2**30  # beyond what is mapped at the start: a net under everything, not the measure
CONTROL = set(map(chr, (*range(32), *range(127, 160)))) - set("\n\t\r")


def run_case(kind: str, number: int, seed: int, originals: Path, sandbox: Sandbox, gates: Gates) -> dict:
    """Makes the case's input and takes it through its doors."""
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
        hears_itself = kind in arguments.KINDS  # argparse repeats what was typed
        faults += (
            []
            if hears_itself
            else [f"control character {c!r} in the messages" for c in sorted(CONTROL & set(said[0]))[:1]]
        )
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
    """The error's type, its message, and the last line of the project that it came through."""
    own = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if "/campaigns/" not in f.filename and "site-packages" not in f.filename
    ]
    where = f"{Path(own[-1].filename).name}:{own[-1].lineno} {own[-1].name}" if own else "?"
    return f"{type(error).__name__} at {where}: {str(error)[:150]}"


def _start_memory() -> int:
    """Forgets the highest resident size so far; returns the present one in bytes."""
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
        except Exception as error:  # a case that could not be made must show, and not end the campaign
            lost = {"outcomes": [], "gates": [], "cpu_seconds": 0.0, "memory_bytes": 0}
            result = {
                "kind": kind,
                "number": number,
                "faults": [f"campaign: it failed itself: {_place(error)}"],
                **lost,
            }
        print(json.dumps(result), flush=True)
    shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
