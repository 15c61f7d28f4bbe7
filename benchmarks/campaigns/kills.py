"""Kills export, validate, build and import at random moments and before every file-system call, and checks the result.

python -m benchmarks.campaigns.kills [--kills 200] [--seed 0]      writes benchmarks/records/kills.json

After each kill the bundle must be the whole old or the whole new one by every checksum, and a checkpoint must be whole
or missing. After the next run no temporary file may be left. Other people's files must be unchanged.
Children are forked from a process that has done its imports and traced once, so that a kill hits the command's work.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import exporter.placing.folders
from benchmarks.campaigns.checkpoint_trial import CheckpointSite
from benchmarks.campaigns.children import fork, run_in_child
from benchmarks.campaigns.trials import COMMANDS, BundleSite, Command, Site, warm_up
from benchmarks.machine.description import machine, stamp

RECORD = Path(__file__).parent.parent / "records" / "kills.json"
CHANGES = (
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.symlink",
    "os.chmod",
    "os.chown",
    "os.truncate",
)


def kill_at_random(site: Site, command: Command, n_kills: int, rng: random.Random) -> dict:
    """Kills the command `n_kills` times, at moments spread over its usual duration; returns states and losses."""
    durations = []
    for _ in range(3):
        site.reset(command)
        started = time.perf_counter()
        if run_in_child(lambda: command.main(command.line(site.target))) != 0:
            raise RuntimeError(f"{command.name}: it failed without a kill")
        durations.append(time.perf_counter() - started)
    usual = statistics.median(durations)
    states: collections.Counter[str] = collections.Counter()
    losses: list[str] = []
    n = 0
    while n < n_kills:
        site.reset(command)
        child = fork(lambda: command.main(command.line(site.target)))
        delay = usual * 1.1 * (n + rng.random()) / n_kills  # the n-th moment is in the n-th share of the duration
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        state = site.state() if killed else "it had ended"
        states[state] += 1
        losses += [f"{command.name}, killed after {delay:.4f} s ({state}): {loss}" for loss in after(site, command)]
        n += killed
        usual = usual if killed else usual * 0.98  # the kill came too late: the machine is faster now
    return {"seconds": round(usual, 3), "kills": n_kills, "states": dict(states.most_common()), "losses": losses}


def after(site: Site, command: Command) -> list[str]:
    """Returns what is wrong after a kill and after the next run, which must succeed and remove leftovers."""
    losses = site.losses(command)
    code = run_in_child(lambda: command.main(command.line(site.target)))
    if code != 0:
        return [*losses, f"the next run exits {code}"]
    return (
        losses
        + [f"after the next run: {loss}" for loss in site.losses(command)]
        + [f"left over: {name}" for name in site.strays(command)]
    )


def kill_at_every_call(site: Site, command: Command, only: range | None = None) -> dict:
    """Kills the command before its first, second, … change to the folder, until it ends by itself.

    Returns:
        The number of kills, the states of the folder after them, and the losses.
    """
    states: collections.Counter[str] = collections.Counter()
    losses: list[str] = []
    for n in only or itertools.count(1):
        site.reset(command)
        code = run_in_child(lambda n=n: _killed_before(n, site.folder, command, site.target))
        if code == 0:
            break
        if code != -signal.SIGKILL:
            losses.append(f"{command.name}, before call {n}: it exits {code}")
        state = site.state()
        states[state] += 1
        losses += [f"{command.name}, killed before call {n} ({state}): {loss}" for loss in after(site, command)]
    return {"kills": sum(states.values()), "states": dict(states.most_common()), "losses": losses}


def _killed_before(n: int, root: Path, command: Command, target: Path) -> int:
    """Runs the command and kills itself before its n-th call that changes, syncs or locks a file below `root`."""
    calls, inside = itertools.count(1), os.path.realpath(root)

    def count(path: object) -> None:
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        if os.path.abspath(os.fsdecode(path)).startswith(inside) and next(calls) == n:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, arguments: tuple) -> None:
        if event in CHANGES or event == "fcntl.flock":
            relative = (
                event in ("os.remove", "os.rmdir") and arguments[1] >= 0
            )  # relative to an open folder, as in rmtree
            count(f"{os.readlink(f'/proc/self/fd/{arguments[1]}')}/{arguments[0]}" if relative else arguments[0])
        elif (
            event == "open"
            and isinstance(arguments[0], str | bytes | os.PathLike)
            and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        ):
            count(arguments[0])

    def counted(function, path_of):
        def call(*arguments):
            count(path_of(*arguments))
            return function(*arguments)

        return call

    os.fsync = counted(os.fsync, lambda descriptor: descriptor)  # these two have no audit event
    exporter.placing.folders._exchange = counted(exporter.placing.folders._exchange, lambda first, second: first)
    sys.addaudithook(hook)
    return command.main(command.line(target))


def is_build(command: Command) -> bool:
    """Whether a command is a build. Builds take much longer, so they run last and are killed half as often."""
    return command.name.startswith("build")


def main() -> int:
    prog, description = "python -m benchmarks.campaigns.kills", __doc__.splitlines()[0]
    add = (parser := argparse.ArgumentParser(prog=prog, description=description)).add_argument
    add("--kills", type=int, default=200, metavar="N", help="kills at random moments, over all commands (default 200)")
    add("--seed", type=int, default=0, metavar="N", help="seed for the moments (default 0)")
    arguments = parser.parse_args()
    rng, record = random.Random(arguments.seed), {**stamp(), "machine": machine(), "seed": arguments.seed}
    with tempfile.TemporaryDirectory() as root:
        record |= {"backend": warm_up(), "kills": 0, "n_losses": 0, "commands": {}}
        bundles, checkpoints = BundleSite(Path(root)), CheckpointSite(Path(root))
        trials = [(bundles, command) for command in COMMANDS] + [
            (checkpoints, command) for command in checkpoints.commands
        ]
        trials.sort(key=lambda trial: is_build(trial[1]))
        shares = {command.name: 1 if is_build(command) else 2 for _, command in trials}
        for site, command in trials:
            started = time.perf_counter()
            n_kills = -(-arguments.kills * shares[command.name] // sum(shares.values()))
            runs = {
                "at random moments": kill_at_random(site, command, n_kills, rng),
                "before every call": kill_at_every_call(site, command),
            }
            record["commands"][command.name] = {**runs, "seconds": round(time.perf_counter() - started, 1)}
            record["kills"] += sum(run["kills"] for run in runs.values())
            record["n_losses"] += sum(len(run["losses"]) for run in runs.values())
            # The record is written after each command, because the campaign itself can be killed.
            RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            line = f"{command.name}: {record['kills']} kills so far, {record['n_losses']} losses"
            print(line, file=sys.stderr, flush=True)
    return 1 if record["n_losses"] else 0


if __name__ == "__main__":
    sys.exit(main())
