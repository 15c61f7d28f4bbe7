"""Runs the workloads of the benchmark with every contender and returns their records."""

from __future__ import annotations

import contextlib
import functools
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.machine.bytes_read import bytes_read
from benchmarks.machine.machine_limits import Limits, compare_with_limits
from benchmarks.machine.step_profile import component_times
from benchmarks.peers.environments import PeerMissing
from benchmarks.race.harness import WARM_STEPS, ContenderFailed, Lane, Process, judge, race
from benchmarks.race.lineup import OURS, REFERENCE, Entry
from benchmarks.race.models import Models, random_checkpoint
from benchmarks.race.workloads import COMPUTED_PAST, Decode, Workload
from engines.library.gpu import visible_gpus
from exporter.bundle.bundle import Bundle
from exporter.bundle.tokenizer import load_tokenizer
from exporter.checkpoint.formats import open_checkpoint
from exporter.costs.ledger import Ledger
from exporter.costs.roofline import Step, step_costs
from exporter.measuring.agreement import prompts as real_prompts
from exporter.spec.catalogue import ModelConfig
from exporter.spec.unit import Unit

CAN_FILL_REASON = f"its cache cannot be filled from outside, and over {COMPUTED_PAST:,} tokens must be computed"
SAMPLE_SEED = 0


@dataclass
class Run:
    """Settings that all workloads share.

    Attributes:
        lineup: the contenders.
        threads: number of processor cores, and of threads of each contender.
        real: checkpoint of the real model; None where no workload needs it.
        folder: folder for models, logs and scratch files.
        measure: measures the limits of the machine. It is called right before and right after every case.
        say: called with progress lines.
    """

    lineup: Sequence[Entry]
    threads: int
    real: Path | None
    folder: Path
    measure: Callable[[], Limits]
    say: Callable[[str], None]
    scratch: Path = field(init=False)

    def __post_init__(self) -> None:
        self.scratch = self.folder / "scratch"
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir(parents=True)

    def workload(self, workload: Workload) -> dict:
        """Runs one workload with every contender; returns its part of the record."""
        started = time.perf_counter()
        name = workload.name.replace(" ", "-").lower()
        checkpoint = self.real
        if workload.config is not None:
            checkpoint = random_checkpoint(self.folder / "checkpoints" / name, workload.config, self._tokenizer)
        models = Models(checkpoint, self.folder / "models" / name)
        with contextlib.ExitStack() as stack:
            course = Course(self, workload, models, stack)
            course.open()
            made = time.perf_counter() - started
            course.compare()
            record = {
                "contenders": course.contenders,
                "decode": [course.decode(case) for case in workload.decodes],
                "prefill": [course.prefill(length) for length in workload.prefills],
                "capacity": course.capacities(),
                "bare products": course.bare_products(workload.decodes[0]),
            }
        record["roofline"] = self._roofline(workload, models, record)
        record["exports"] = models.made
        record["seconds"] = {"models and opening": round(made, 1), "all": round(time.perf_counter() - started, 1)}
        return record

    @property
    def _tokenizer(self) -> Path | None:
        return self.real if self.real and (self.real / "tokenizer.json").is_file() else None

    def _roofline(self, workload: Workload, models: Models, record: dict) -> list[dict]:
        """Compares our step of every decode case with the machine's limits, whole and by component."""
        bundle = Bundle.open(models.path("bundle"))
        rows = []
        for case, timed in zip(workload.decodes, record["decode"], strict=True):
            ours = timed["results"][OURS]
            if "median_ms" not in ours:
                continue
            components = component_times(bundle, case.batch, case.past_len, case.capacity, self.threads)
            config, unit = bundle.manifest.config, bundle.manifest.unit
            limits = Limits(**timed["limits"])
            limit = compare_with_limits(config, unit, case.batch, 1, case.past_len, limits, components)
            rows.append({"case": case.name, "step_ms": ours["median_ms"], **limit})
        return rows


@dataclass
class Course:
    """The contenders of one workload.

    Attributes:
        contenders: name → status ("ran", "missing", "failed" or "disagrees"), reason, and its first answer.
        live: name → process of each contender that still takes part.
    """

    run: Run
    workload: Workload
    models: Models
    stack: contextlib.ExitStack
    contenders: dict[str, dict] = field(default_factory=dict)
    live: dict[str, Process] = field(default_factory=dict)

    @functools.cached_property
    def config(self) -> ModelConfig:
        return open_checkpoint(self.models.checkpoint).config

    def open(self) -> None:
        """Makes every contender's files and opens it; records the reason where that fails.

        Raises:
            ContenderFailed: the reference or our own contender cannot be opened.
        """
        for entry in self.run.lineup:
            if (entry.gpu and not visible_gpus()) or (entry.weights != "fp32" and not self.workload.rounded):
                continue
            log = self.run.folder / "logs" / f"{self.workload.name}-{entry.name}.log".replace(" ", "-")
            log.parent.mkdir(parents=True, exist_ok=True)
            try:
                process = Process(entry, self.models.path(entry.model), self.run.threads, log)
            except (PeerMissing, ContenderFailed) as reason:
                self._out(entry.name, "missing" if isinstance(reason, PeerMissing) else "failed", str(reason))
                continue
            self.stack.callback(process.close)
            self.live[entry.name] = process
            self.contenders[entry.name] = {"status": "ran", "weights": entry.weights, **process.opened}
        if not {REFERENCE, OURS} <= set(self.live):
            raise ContenderFailed(
                f"{self.workload.name}: got {self.contenders}, expected the reference and ours to run"
            )

    def _out(self, name: str, status: str, reason: str) -> None:
        self.contenders[name] = self.contenders.get(name, {}) | {"status": status, "reason": reason}
        if name in self.live:
            self.live.pop(name).close()
        self.run.say(f"{self.workload.name}: {name} {status}: {reason}")

    def compare(self) -> None:
        """Compares everyone's logits for the reference's greedy tokens; a contender that disagrees is dropped."""
        prompts, count = self._prompts(), self.workload.tokens
        path = self.run.scratch / "agreement.npz"
        self.live[REFERENCE].ask("decode", prompts=prompts, count=count, to=path)
        with np.load(path) as saved:
            tokens, reference = saved["tokens"].tolist(), saved["logits"]
        for name, process in list(self.live.items()):
            try:
                process.ask("decode", prompts=prompts, count=count, to=path, forced=tokens)
            except ContenderFailed as reason:
                self._out(name, "failed", str(reason))
                continue
            with np.load(path) as saved:
                logits = saved["logits"].reshape(-1, reference.shape[-1])
            verdict = judge(process.entry, reference.reshape(-1, reference.shape[-1]), logits)
            self.contenders[name] |= {"agreement": asdict(verdict)}
            if verdict.complaint:
                self._out(name, "disagrees", verdict.complaint)

    def _prompts(self) -> list[list[int]]:
        if self.workload.config is None:
            tokenizer = load_tokenizer(self.models.checkpoint / "tokenizer.json")
            return [tokenizer.encode(prompt).ids for prompt in real_prompts()[: self.workload.prompts]]
        generator = np.random.default_rng(SAMPLE_SEED)
        return generator.integers(0, self.config.vocab_size, (self.workload.prompts, 12)).tolist()

    # --- timing --------------------------------------------------------------------------------------------------

    def decode(self, case: Decode) -> dict:
        """Compares the first step of every contender that can run this case, then times their steps."""
        self.run.say(f"{self.workload.name}: {case.name}")
        results: dict[str, dict] = {}
        started = self._start_all(case, results)
        self.run.say(f"  in turn: {', '.join(started)}")
        before = self.run.measure()
        for process in started.values():
            process.ask("memory", forget_peak=True)
        lanes = [Lane(name, process, "steps", {"key": case.name}) for name, process in started.items()]
        results |= race(lanes, self.workload.rounds, self.workload.steps, self.run.say)
        limits = before.best(self.run.measure())
        for name, process in started.items():
            if "median_ms" in results[name]:
                results[name]["memory"] = process.ask("memory")
                process.ask("drop", key=case.name)
                must_read = bytes_read(self.config, process.entry.weights, case.batch, case.past_len)
                if must_read is not None:
                    at_limit_ms = must_read / limits.bandwidth * 1e3
                    results[name] |= {"at_limit_ms": at_limit_ms, "share": at_limit_ms / results[name]["median_ms"]}
        ledger = Ledger.of(self.config)
        sizes = {
            "weights_bytes": ledger.model_parameters * 4,
            "cache_bytes": ledger.cache_bytes_per_token("fp32") * case.batch * case.capacity,
        }
        return {
            "case": asdict(case),
            "name": case.name,
            "sizes": sizes,
            "limits": limits.to_dict(),
            "results": results,
        }

    def _start_all(self, case: Decode, results: dict[str, dict]) -> dict[str, Process]:
        """Brings contenders to the case's past length. The reason for each failure goes into `results`."""
        tokens, past = self._tokens(case), self._past(case)
        started: dict[str, Process] = {}
        reference: np.ndarray | None = None
        for name, process in self.live.items():
            to = self.run.scratch / "first-step.npy"
            limit = process.opened["largest_batch"]
            if limit is not None and case.batch > limit:
                results[name] = {"not_timed": f"it decodes given tokens for at most {limit} sequences"}
                continue
            if not process.opened["can_fill"] and case.past_len * case.batch > COMPUTED_PAST:
                results[name] = {"not_timed": CAN_FILL_REASON}
                continue
            try:
                self._start(process, case, case.name, tokens, past, to)
            except ContenderFailed as reason:
                results[name] = {"not_timed": str(reason)}
                continue
            logits = np.load(to)
            reference = logits if reference is None else reference  # the reference is the first in the lineup
            verdict = judge(process.entry, reference, logits)
            if verdict.complaint and process.entry.weights == "fp32":  # floors need more positions
                results[name] = {"not_timed": f"disagrees: {verdict.complaint}"}
                process.ask("drop", key=case.name)
                continue
            started[name] = process
        return started

    @staticmethod
    def _start(process: Process, case: Decode, key: str, tokens: Path, past: Path | None, to: Path) -> None:
        """Starts the sequences of a case under `key` and saves the logits of their next token to `to`."""
        lengths = {"capacity": case.capacity, "past_len": case.past_len}
        process.ask("start", key=key, tokens=tokens, to=to, past=past, **lengths)

    def _tokens(self, case: Decode) -> Path:
        """Saves int64 [B, N]: the same past for all sequences, then each sequence's own tokens for the timed steps."""
        n_steps = 2 + self.workload.rounds * (self.workload.steps + WARM_STEPS)
        generator = np.random.default_rng(SAMPLE_SEED)
        shared = generator.integers(0, self.config.vocab_size, case.past_len)
        own = generator.integers(0, self.config.vocab_size, (case.batch, n_steps))
        path = self.run.scratch / "tokens.npy"
        np.save(path, np.concatenate([np.broadcast_to(shared, (case.batch, case.past_len)), own], axis=1))
        return path

    def _past(self, case: Decode) -> Path | None:
        """Returns the eager keys and values of the longest past, as a file; None where pasts are computed."""
        if not self.workload.filled or "eager" not in self.live:
            return None
        path = self.run.scratch / f"past-{self.workload.name}.npz".replace(" ", "-")
        if not path.is_file():
            longest = max([*(decode.past_len for decode in self.workload.decodes), self.workload.sweep_len])
            tokens = self.run.scratch / "past-tokens.npy"
            np.save(tokens, np.random.default_rng(SAMPLE_SEED).integers(0, self.config.vocab_size, longest))
            self.live["eager"].ask("save_past", tokens=tokens, to=path)
        return path

    def prefill(self, length: int) -> dict:
        """Times whole prompts in empty sequences."""
        self.run.say(f"{self.workload.name}: prefill {length:,}")
        tokens = self.run.scratch / "prompt.npy"
        np.save(tokens, np.random.default_rng(SAMPLE_SEED).integers(0, self.config.vocab_size, (1, length)))
        arguments = {"capacity": length + 1, "tokens": tokens}
        lanes = [Lane(name, process, "prefill", arguments) for name, process in self.live.items()]
        before = self.run.measure()
        results = race(lanes, self.workload.prefill_rounds, None, self.run.say)
        limits = before.best(self.run.measure())
        unit = Unit("model", n_layers=self.config.n_layers)
        flops = sum(cost.flops for cost in step_costs(self.config, unit, Step(1, length, 0, "fp32")))
        at_limit_ms = flops / limits.flop_rate * 1e3
        for result in results.values():
            if "median_ms" in result:
                result |= {"at_limit_ms": at_limit_ms, "share": at_limit_ms / result["median_ms"]}
        return {
            "name": f"prefill {length:,}",
            "length": length,
            "limits": limits.to_dict(),
            "results": results,
        }

    def capacities(self) -> list[dict]:
        """Times our step at one past length with caches of several capacities, in one process."""
        if not self.workload.capacities:
            return []
        self.run.say(f"{self.workload.name}: our step at several cache capacities")
        process, lanes = self.live[OURS], []
        for capacity in self.workload.capacities:
            case = Decode(self.workload.sweep_len, 1, capacity)
            key, to = f"C={capacity:,}", self.run.scratch / "first-step.npy"
            self._start(process, case, key, self._tokens(case), self._past(case), to)
            lanes.append(Lane(key, process, "steps", {"key": key}))
        results = race(lanes, self.workload.rounds, self.workload.steps, self.run.say)
        for lane in lanes:
            process.ask("drop", key=lane.label)
        return [{"capacity": capacity, **results[f"C={capacity:,}"]} for capacity in self.workload.capacities]

    def bare_products(self, case: Decode) -> dict:
        """Times our step and its matrix products alone, in turn, in one process."""
        self.run.say(f"{self.workload.name}: our step and its bare matrix products")
        process, to = self.live[OURS], self.run.scratch / "first-step.npy"
        self._start(process, case, "bare", self._tokens(case), self._past(case), to)
        arguments = {"key": "bare"}
        lanes = [Lane("step", process, "steps", arguments), Lane("products", process, "bare_steps", arguments)]
        results = race(lanes, self.workload.rounds, self.workload.steps, self.run.say)
        process.ask("drop", key="bare")
        return {"case": case.name, **results}
