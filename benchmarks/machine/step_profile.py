"""Profiles one decode step with onnxruntime's own profiler: time by operator and by component."""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
from rich.table import Table

from exporter.bundle.bundle import Bundle
from exporter.spec.feeds import step_feeds
from exporter.spec.limits import check_cache_capacity
from exporter.steppers.onnxruntime_stepper import OnnxruntimeStepper

STEPS, WARM_STEPS = 20, 5
ATTENTION_PARTS = {
    "keys",
    "values",
    "heads",
    "present_key",
    "present_value",
    "mask",
}  # nodes that move and read the cache


@dataclass(frozen=True)
class Kernel:
    """One run of one node: its name in the graph, its operator and its time."""

    node: str
    operator: str
    microseconds: float


class ProfiledStepper(OnnxruntimeStepper):
    """A stepper whose session writes a profile when it is closed."""

    def __init__(self, bundle: Bundle, folder: Path, threads: int) -> None:
        super().__init__(str(bundle.graph_path), bundle.manifest.contract, bundle.manifest.dtype)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads
        options.enable_profiling = True
        options.profile_file_prefix = str(folder / "profile")
        self._session = onnxruntime.InferenceSession(
            str(bundle.graph_path), options, providers=["CPUExecutionProvider"]
        )

    def profile(self) -> Path:
        """Ends profiling; returns the profile's file."""
        return Path(self._session.end_profiling())


def profile_steps(bundle: Bundle, batch: int, past_len: int, capacity: int, threads: int) -> list[list[Kernel]]:
    """Returns the kernels of each of STEPS decode steps at one past length, with a cache of zeros."""
    manifest = bundle.manifest
    rows = check_cache_capacity(capacity, manifest.config, manifest.dtype, manifest.max_positions)
    first = manifest.contract.step_inputs[0].name
    shape = (batch, 1) if first == "input_ids" else (batch, 1, manifest.config.hidden_size)
    x = np.zeros(shape, np.int64 if first == "input_ids" else manifest.contract.step_inputs[0].dtype)
    feeds = step_feeds(first, x, np.full(batch, past_len), np.ones(batch, np.int64))
    with tempfile.TemporaryDirectory() as scratch:
        stepper = ProfiledStepper(bundle, Path(scratch), threads)
        cache = stepper.new_cache(batch, rows)
        for _ in range(WARM_STEPS + STEPS):
            stepper.run(feeds, cache)
        steps = read_profile(json.loads(stepper.profile().read_text(encoding="utf-8")))
        stepper.close()
    return steps[WARM_STEPS:]


def read_profile(events: Iterable[dict]) -> list[list[Kernel]]:
    """Returns the kernels of every run in a profile, in order. A node's event belongs to the run around it."""
    events = [event for event in events if event.get("ph") == "X"]
    runs = sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event["name"] == "model_run")
    steps: list[list[Kernel]] = [[] for _ in runs]
    for event in sorted(events, key=lambda event: event["ts"]):
        if event["cat"] != "Node" or not event["name"].endswith("_kernel_time"):
            continue
        step = next(index for index, (start, end) in enumerate(runs) if start <= event["ts"] <= end)
        steps[step].append(Kernel(event["name"].removesuffix("_kernel_time"), event["args"]["op_name"], event["dur"]))
    return steps


def component_of(node: str) -> str:
    """Returns the ledger's component of a node: its name without the block's number; attention's own parts are one."""
    match = re.match(r"blocks\.\d+\.([\w.]+)", node)
    name = match[1] if match else re.split(r"[./]", node)[0]
    if name in ATTENTION_PARTS or (name.startswith("attention.") and name.split(".")[1] in ATTENTION_PARTS):
        return "attention.heads"
    return "lm_head" if name == "logits" else name


def component_times(bundle: Bundle, batch: int, past_len: int, capacity: int, threads: int) -> dict[str, float]:
    """Returns component → median milliseconds of a step."""
    steps = profile_steps(bundle, batch, past_len, capacity, threads)
    return median_times(steps, lambda kernel: component_of(kernel.node))


def median_times(steps: list[list[Kernel]], group: Callable[[Kernel], str]) -> dict[str, float]:
    """Returns group → milliseconds of its kernels in a step, as median over steps, longest first."""
    totals = []
    for kernels in steps:
        total: dict[str, float] = defaultdict(float)
        for kernel in kernels:
            total[group(kernel)] += kernel.microseconds / 1e3
        totals.append(total)
    names = {name for total in totals for name in total}
    medians = {name: float(np.median([total.get(name, 0.0) for total in totals])) for name in names}
    return dict(sorted(medians.items(), key=lambda item: -item[1]))


def tables(bundle: Bundle, batch: int, past_len: int, capacity: int, threads: int) -> tuple[list[Table], dict]:
    """Returns the profile by operator and by component, as tables and as data."""
    steps = profile_steps(bundle, batch, past_len, capacity, threads)
    data = {
        "operator": median_times(steps, lambda kernel: kernel.operator),
        "component": median_times(steps, lambda kernel: component_of(kernel.node)),
    }
    shown = []
    for kind, times in data.items():
        whole = sum(times.values())
        table = Table(kind, title=f"one decode step, P = {past_len:,}, batch {batch}, by {kind}", title_justify="left")
        table.add_column("ms", justify="right")
        table.add_column("share", justify="right")
        for name, ms in times.items():
            table.add_row(name, f"{ms:.3f}", f"{ms / whole:.1%}")
        table.add_section()
        table.add_row("all kernels", f"{whole:.3f}", "")
        shown.append(table)
    return shown, data
