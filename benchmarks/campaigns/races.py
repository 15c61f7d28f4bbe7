"""Runs two commands on one bundle at the same time, and readers of a bundle that is replaced; looks for mixtures.

python -m benchmarks.campaigns.races [--rounds 10] [--seed 0]      writes benchmarks/records/races.json

Of two commands one may win or one may be refused. A bundle or an output that is a mixture is a loss.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import exporter.commands.main
from benchmarks.campaigns.children import fork
from benchmarks.campaigns.trials import (
    COMMANDS,
    MODEL,
    NEW_SEED,
    OLD_SEED,
    BundleSite,
    Command,
    Site,
    export_command,
    warm_up,
)
from benchmarks.machine.description import machine, stamp
from exporter.common.errors import BundleError
from exporter.placing.folders import new_folder
from runtime import DecodeSession

RECORD = Path(__file__).parent.parent / "records" / "races.json"
ENDINGS = {0: "good", 2: "refused"}
EXPORT_NEW, VALIDATE, BUILD = COMMANDS[1], COMMANDS[2], COMMANDS[4]
EXPORT_OLD = export_command("export of the old one", OLD_SEED, engine=True)
PAIRS = (
    (EXPORT_NEW, EXPORT_OLD),
    (EXPORT_NEW, BUILD),
    (BUILD, BUILD),
    (BUILD, VALIDATE),
    (EXPORT_NEW, VALIDATE),
    (VALIDATE, VALIDATE),
)


def race(site: Site, first: Command, second: Command, n_rounds: int, rng: random.Random) -> dict:
    """Starts both commands `n_rounds` times, the second a random moment after the first; returns endings and losses."""
    endings: collections.Counter[str] = collections.Counter()
    losses: list[str] = []
    for _ in range(n_rounds):
        site.reset(first)
        children = []
        for command in (first, second):
            children.append(fork(lambda command=command: command.main(command.line(site.target))))
            time.sleep(rng.uniform(0, 0.2))
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        endings[" and ".join(ENDINGS.get(code, f"exit {code}") for code in codes)] += 1
        if 0 not in codes or set(codes) - set(ENDINGS):
            losses.append(f"the commands exit with {codes}")
        losses += site.losses(first) + [f"left over: {name}" for name in site.strays(first)]
    return {"rounds": n_rounds, "endings": dict(endings), "losses": losses}


def race_readers(folder: Path, n_rounds: int) -> dict:
    """Opens and decodes a bundle in parts while a child replaces it by another one and back without a pause.

    The outputs of every session must be those of one of the two bundles, also in a step after the bundle was replaced.
    Returns how often each was seen, and the losses.
    """
    sources = [folder / f"parts{seed}" for seed in (OLD_SEED, NEW_SEED)]
    for seed, source in zip((OLD_SEED, NEW_SEED), sources, strict=True):
        unit = ["--model", MODEL, "--unit", "stack", "--parts", "2", "--seed", str(seed)]
        exporter.commands.main.main(["export", *unit, "--no-validate", "-o", str(source)])
    target = folder / "replaced"
    shutil.copytree(sources[0], target)
    expected = [_two_steps(source) for source in sources]

    def replace_for_ever() -> None:
        while True:
            for source in (sources[1], sources[0]):
                with new_folder(target) as made:
                    shutil.copytree(source, made, dirs_exist_ok=True)

    writer = fork(replace_for_ever)
    seen: collections.Counter[str] = collections.Counter()
    losses: list[str] = []
    try:
        for _ in range(n_rounds):
            try:
                outputs = _two_steps(target)
            except BundleError as error:
                refused = "replaced" in str(error)
                seen["refused"] += refused
                losses += [] if refused else [str(error)]
                continue
            which = [np.array_equal(outputs, each) for each in expected]
            seen["the old one" if which[0] else "the new one" if which[1] else "a mixture"] += 1
            losses += [] if any(which) else ["a session's outputs are of neither bundle"]
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
    return {"rounds": n_rounds, "seen": dict(seen), "losses": losses}


def _two_steps(folder: Path) -> np.ndarray:
    with DecodeSession.open(folder, backend="onnxruntime", max_batch=1, cache_capacity=16, verify="full") as session:
        x = np.random.default_rng(0).standard_normal((1, 4, session.manifest.config.hidden_size)).astype(np.float16)
        first = session.prefill(x)
        time.sleep(0.02)
        return np.concatenate([first, session.decode(x[:, :1])], axis=1)


def main() -> int:
    prog, description = "python -m benchmarks.campaigns.races", __doc__.splitlines()[0]
    add = (parser := argparse.ArgumentParser(prog=prog, description=description)).add_argument
    rounds = "rounds of each pair of commands; readers get ten times as many (default 10)"
    add("--rounds", type=int, default=10, metavar="N", help=rounds)
    add("--seed", type=int, default=0, metavar="N", help="seed for the moments (default 0)")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    record = {**stamp(), "machine": machine(), "seed": arguments.seed, "backend": warm_up()}
    with tempfile.TemporaryDirectory() as root:
        site = BundleSite(Path(root))
        races = {"readers": race_readers(Path(root), 10 * arguments.rounds)}
        for first, second in PAIRS:
            races[f"{first.name} | {second.name}"] = race(site, first, second, arguments.rounds, rng)
            print(json.dumps(races, indent=1), file=sys.stderr, flush=True)
    n_losses = sum(len(each["losses"]) for each in races.values())
    RECORD.write_text(json.dumps({**record, "n_losses": n_losses, "races": races}, indent=1) + "\n", encoding="utf-8")
    print(f"{n_losses} losses; record: {RECORD}", file=sys.stderr)
    return 1 if n_losses else 0


if __name__ == "__main__":
    sys.exit(main())
