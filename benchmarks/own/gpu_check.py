"""Checks everything that needs a GPU (`make gpu-check`): prints one table and writes build/gpu-check.json.

It needs no network. It uses the installed packages (torch with CUDA, onnxruntime's CUDA provider, tensorrt or
tensorrt-rtx) and skips checks of packages that are not installed, by name. It exits with 1 where a check failed, or
where a GPU is visible and no check passed; else with 0.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import onnxruntime
from rich.table import Table

from benchmarks.machine.description import machine, stamp
from engines.building.build import BuildRequest, build_bundle
from engines.building.publishing import EngineRecord
from engines.building.refit import refit_bundle
from engines.comparison.control import judge_by_control
from engines.library.backend import INSTALL, MODULES, choose_backend
from engines.library.cuda import Cuda, RuntimeCuda
from engines.library.gpu import visible_gpus
from engines.network.build_options import BuildOptions
from engines.running.tensorrt_stepper import TensorRTStepper, open_tensorrt
from exporter.bundle.bundle import Bundle
from exporter.common import terminal
from exporter.common.errors import CheckFailed, InputError
from exporter.costs.ledger import Ledger
from exporter.export import ExportRequest, export_bundle
from exporter.model.weights import RandomWeights
from exporter.spec.catalogue import CATALOGUE, ModelConfig
from exporter.spec.feeds import step_feeds
from exporter.spec.unit import Unit
from exporter.steppers.eager_stepper import EagerStepper
from exporter.steppers.onnxruntime_stepper import OnnxruntimeStepper
from exporter.steppers.protocol import Stepper
from exporter.validation.comparison import compare
from exporter.validation.recording import record_run
from exporter.validation.reference_weights import reference_weights
from exporter.validation.tolerances import tolerance

FOLDER = Path("build/gpu-check")
RECORD = Path("build/gpu-check.json")
SMALL = ModelConfig(
    hidden_size=256,
    n_layers=2,
    n_heads=8,
    n_kv_heads=2,
    head_dim=32,
    intermediate_size=512,
    vocab_size=997,
    context_length=128,
)
BATCHES, PAST_LENS, CAPACITY, PREFILL = (1, 8, 32), (1000, 8000), 8192, 512


class Skipped(Exception):
    """What this check is about is not installed, or there is no GPU; the message says what is missing."""


@dataclass
class Row:
    """One line of the table: state is "passed", "FAILED" or "skipped"."""

    name: str
    state: str
    detail: str


def run_row(name: str, check: Callable[[], str]) -> Row:
    """Runs one check. Only `Skipped` skips it; what is installed and does not start is a failure."""
    try:
        return Row(name, "passed", check())
    except Skipped as reason:
        return Row(name, "skipped", str(reason))
    except Exception as error:  # the other checks must still run
        return Row(name, "FAILED", f"{type(error).__name__}: {error}")


def exported(name: str, config: ModelConfig, max_positions: int) -> Bundle:
    """Exports a bundle in fp16 once: the whole model for SMALL, a block for another config. The weights are random."""
    folder = FOLDER / name
    if not (folder / "manifest.json").is_file():
        unit = Unit.parse("model" if config is SMALL else "block", config)
        request = ExportRequest(config, unit, RandomWeights(config, 0), "fp16", max_positions)
        export_bundle(request, folder, validated=False)
    return Bundle.open(folder)


def parity(bundle: Bundle, stepper: Stepper) -> str:
    """Compares all scenarios of the unit with float32 eager over the same weights, as an export does."""
    manifest = bundle.manifest
    unit = manifest.unit
    weights = reference_weights(bundle)

    def recorded(s: Stepper):
        return record_run(manifest.spec, s)

    reference = recorded(EagerStepper.from_weights(manifest.spec.in_dtype("fp32"), weights))
    comparisons = compare(reference, recorded(stepper), tolerance(("eager", "onnxruntime"), unit, manifest.dtype))
    if not all(c.passed for c in comparisons):
        comparisons = judge_by_control(comparisons, reference, recorded(EagerStepper.from_bundle(bundle)))
    worst = max(comparisons, key=lambda c: c.max_error / c.allowed)
    if not all(c.passed for c in comparisons):
        raise CheckFailed(
            f"{worst.scenario}: {worst.tensor} differs by {worst.max_error:.2e} of rms, {worst.allowed:.0e} allowed"
        )
    error = f"worst {worst.max_error:.1e} of rms in {worst.scenario}, {worst.allowed:.0e} allowed"
    return f"{len(comparisons)} comparisons, {error}"


def on_gpu(check: Callable[[], str]) -> Callable[[], str]:
    """Returns the check; it is skipped at once where no GPU is visible."""

    def guarded() -> str:
        if not visible_gpus():
            raise Skipped("no GPU is visible")
        return check()

    return guarded


def installed(name: str, check: Callable[[], str]) -> Callable[[], str]:
    """Returns the check of a TensorRT package; it is skipped where the package is not installed."""

    def guarded() -> str:
        if importlib.util.find_spec(MODULES[name]) is None:
            raise Skipped(f"{name} is not installed; run {INSTALL[name]}")
        return check()

    return guarded


@dataclass
class Engines:
    """Checks of one TensorRT package; each builds an engine and runs it."""

    backend_name: str

    def open(
        self, bundle: Bundle, cuda_graphs: bool = True, **limits: int
    ) -> tuple[TensorRTStepper, EngineRecord, Cuda]:
        built = build_bundle(bundle, choose_backend(self.backend_name), BuildRequest(**limits))
        cuda = RuntimeCuda()
        return open_tensorrt(bundle, built, cuda, cuda_graphs), built, cuda

    def parity(self) -> str:
        bundle = exported("small", SMALL, 64)
        stepper, _, _ = self.open(bundle, max_batch=4, max_seq_len=32, cache_capacity=32)
        return parity(bundle, stepper)

    def graphs(self) -> str:
        bundle, outputs = exported("small", SMALL, 64), []
        for cuda_graphs in (True, False):
            stepper, _, _ = self.open(bundle, cuda_graphs, max_batch=4, max_seq_len=32, cache_capacity=64)
            cache = stepper.new_cache(2, 64)
            x, got = np.array([[1, 2, 3], [4, 5, 6]]), []
            for past_len in (0, *range(3, 40)):
                feeds = step_feeds("input_ids", x, np.full(2, past_len), np.full(2, x.shape[1]))
                x = stepper.run(feeds, cache)["logits"].argmax(-1)[:, None]
                got.append(x)
            outputs.append(np.concatenate(got, 1))
            if stepper.cuda_graphs != cuda_graphs:
                raise CheckFailed("a capture failed, and CUDA graphs went off")
            stepper.close()
        if not np.array_equal(*outputs):
            raise CheckFailed("CUDA graphs on and off give different tokens")
        return "38 tokens of 2 sequences equal with CUDA graphs on and off"

    def aliases(self) -> str:
        bundle = exported("small", SMALL, 64)
        stepper, _, _ = self.open(bundle, max_batch=4, max_seq_len=32, cache_capacity=64)
        cache = stepper.new_cache(4, 64)
        feeds = step_feeds("input_ids", np.array([[1, 2, 3]]), np.zeros(1, np.int64), np.array([3]))
        stepper.run(feeds, cache, 1)
        written = [array.any(axis=(0, 2)).nonzero()[0].tolist() for array in cache.read(1, 64)]
        untouched = all(not array.any() for row in (0, 2, 3) for array in cache.read(row, 64))
        if any(rows != [0, 1, 2] for rows in written) or not untouched:
            raise CheckFailed(
                f"one step of 3 tokens into cache row 1 wrote {written[0]}, other rows untouched: {untouched}"
            )
        return (
            f"{len(written)} cache tensors are written in place at rows 0–2 of one sequence, the others are untouched"
        )

    def refit(self) -> str:
        bundle, backend = exported("refit", SMALL, 64), choose_backend(self.backend_name)
        built = build_bundle(bundle, backend, BuildRequest(4, 32, 32, options=BuildOptions(strip_plan=True)))
        stepper = open_tensorrt(bundle, refit_bundle(bundle, backend, built), RuntimeCuda())
        return f"stripped engine of {built.size_bytes:,} bytes refitted; {parity(bundle, stepper)}"

    def speed(self) -> str:
        bundle = exported("llama3-8b", CATALOGUE["llama3-8b"], CAPACITY)
        stepper, built, cuda = self.open(bundle, max_batch=max(BATCHES), max_seq_len=PREFILL, cache_capacity=CAPACITY)
        bandwidth = copy_bandwidth(cuda)
        figures = list(decode_figures(bundle, stepper, bandwidth))
        self.figures = {
            "copy_bytes_s": bandwidth,
            "build_seconds": built.build_seconds,
            "decode": figures,
            "prefill": prefill_figure(bundle, stepper),
        }
        first = figures[0]
        return (
            f"8B block, batch 1, P = {first['past_len']}: {first['median_ms']:.3f} ms, "
            f"{first['bytes_s'] / 1e9:.0f} GB/s, "
            f"{first['of_copy_bandwidth']:.0%} of copy bandwidth; "
            f"prefill {self.figures['prefill']['flops'] / 1e12:.1f} TFLOP/s"
        )


def copy_bandwidth(cuda: Cuda, n_bytes: int = 1 << 29) -> float:
    """Returns the bytes that copies of random data on the device read and write per second.

    Zeros take less power and look faster, by 13 % on some GPUs.
    """
    source, destination = cuda.allocate(n_bytes), cuda.allocate(n_bytes)
    content = np.random.default_rng(0).integers(0, 256, n_bytes, np.uint8)
    cuda.upload(source, content)
    cuda.copy(destination, source, n_bytes, n_bytes, 1)
    cuda.synchronize()
    started = time.perf_counter()
    for _ in range(10):
        cuda.copy(destination, source, n_bytes, n_bytes, 1)
    cuda.synchronize()
    seconds = time.perf_counter() - started
    cuda.free(source)
    cuda.free(destination)
    return 2 * n_bytes * 10 / seconds


def decode_figures(bundle: Bundle, stepper: Stepper, bandwidth: float) -> Iterator[dict]:
    """Yields the latency of one decode step of a block at each batch and past length, copies of inputs included.

    Hidden states and cache are random.
    """
    config = bundle.manifest.config
    ledger = Ledger.of(config)
    for batch in BATCHES:
        cache = stepper.new_cache(batch, CAPACITY)
        for row in range(batch):
            kv = [random_fp16((config.n_kv_heads, max(PAST_LENS), config.head_dim), seed) for seed in (row, row + 1)]
            cache.write(row, kv)
        for past_len in PAST_LENS:
            x = random_fp16((batch, 1, config.hidden_size))
            feeds = step_feeds("hidden_states", x, np.full(batch, past_len), np.ones(batch, np.int64))
            median_ms = median_time_ms(lambda feeds=feeds, cache=cache: stepper.run(feeds, cache), 50)
            rows = 2 * config.n_kv_heads * config.head_dim * 2 * (past_len + 1) * batch
            moved = ledger.block_parameters * 2 + rows
            bytes_s = moved / median_ms * 1e3
            yield {
                "batch": batch,
                "past_len": past_len,
                "median_ms": median_ms,
                "bytes_s": bytes_s,
                "of_copy_bandwidth": bytes_s / bandwidth,
            }
        cache.free()


def prefill_figure(bundle: Bundle, stepper: Stepper) -> dict:
    """Returns the rate of one prefill of PREFILL tokens, counting only the block's matrix products."""
    config = bundle.manifest.config
    cache = stepper.new_cache(1, CAPACITY)
    x = random_fp16((1, PREFILL, config.hidden_size))
    feeds = step_feeds("hidden_states", x, np.zeros(1, np.int64), np.array([PREFILL]))
    median_ms = median_time_ms(lambda: stepper.run(feeds, cache), 20)
    flops = 2 * Ledger.of(config).block_parameters * PREFILL / median_ms * 1e3
    return {"tokens": PREFILL, "median_ms": median_ms, "flops": flops}


def random_fp16(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Returns random hidden states, keys or values."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(np.float16)


def median_time_ms(step: Callable[[], object], repeats: int) -> float:
    """Returns the median wall time of a step, after five warm-up steps."""
    times = []
    for _ in range(repeats + 5):
        started = time.perf_counter()
        step()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times[5:])


def onnxruntime_cuda() -> str:
    """Compares onnxruntime's CUDA provider with eager."""
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        raise Skipped(f"onnxruntime {onnxruntime.__version__} is built without CUDA; install onnxruntime-gpu")
    bundle = exported("small", SMALL, 64)
    return parity(bundle, OnnxruntimeStepper.from_bundle(bundle, "CUDAExecutionProvider"))


def torch_cuda() -> str:
    """Times the eager 8B block on the GPU, to compare decode latency with."""
    import torch

    if torch.version.cuda is None:
        raise Skipped(f"torch {torch.__version__} is built without CUDA")
    bundle = exported("llama3-8b", CATALOGUE["llama3-8b"], CAPACITY)
    config, past_len = bundle.manifest.config, PAST_LENS[0]
    with torch.device("cuda"), torch.inference_mode():
        module = EagerStepper.from_bundle(bundle).module.to("cuda")
        past = [torch.randn(1, config.n_kv_heads, CAPACITY, config.head_dim, dtype=torch.float16) for _ in range(2)]
        position, mask = torch.tensor([past_len]), torch.ones(1, past_len + 1, dtype=torch.int64)
        x = torch.randn(1, 1, config.hidden_size, dtype=torch.float16)

        def step() -> None:
            module(x, position[:, None], position, mask, *past)
            torch.cuda.synchronize()

        return f"eager 8B block, batch 1, P = {past_len}: {median_time_ms(step, 30):.3f} ms"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs every check, prints the table and writes the record."""
    prog, description = "python -m benchmarks.own.gpu_check", __doc__.splitlines()[0]
    argparse.ArgumentParser(prog=prog, description=description).parse_args(arguments)
    rows, figures = run_checks()
    title = ", ".join(gpu.name for gpu in visible_gpus()) or "no GPU is visible"
    table = Table("check", "result", "detail", title=title, title_justify="left")
    for row in rows:
        table.add_row(row.name, row.state, row.detail)
    terminal.stderr.print(table)
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    record = {**stamp(), "machine": machine(), "rows": [asdict(row) for row in rows], "figures": figures}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    terminal.say(f"record: {RECORD}")
    failed = any(row.state == "FAILED" for row in rows)
    nothing_ran = bool(visible_gpus()) and not any(row.state == "passed" for row in rows)
    if nothing_ran:
        terminal.say("error: a GPU is visible and no check passed; install what the table names")
    return int(failed or nothing_ran)


def run_checks() -> tuple[list[Row], dict]:
    """Runs every check; returns its rows and the measured figures of each TensorRT package."""
    suites = {name: Engines(name) for name in MODULES}
    checks: dict[str, Callable[[], str]] = {
        "torch on CUDA": torch_cuda,
        "onnxruntime on CUDA: parity": onnxruntime_cuda,
    }
    for name, suite in suites.items():
        checks |= {
            f"{name}: parity": installed(name, suite.parity),
            f"{name}: cache aliases": installed(name, suite.aliases),
            f"{name}: CUDA graphs": installed(name, suite.graphs),
            f"{name}: strip and refit": installed(name, suite.refit),
            f"{name}: speed": installed(name, suite.speed),
        }
    rows = [run_row(name, on_gpu(check)) for name, check in checks.items()]
    return rows, {name: suite.figures for name, suite in suites.items() if hasattr(suite, "figures")}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        terminal.say(f"error: {error}")
        sys.exit(2)
