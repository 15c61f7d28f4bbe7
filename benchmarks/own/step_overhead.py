"""Measures the Python time of a decode step on the TensorRT backend, without a GPU: CUDA and the engine do nothing.

python -m benchmarks.own.step_overhead [--before FILE]     writes benchmarks/records/step_overhead.json

It also counts graphs: how many steps are replays, and how many captures there are, while sequences join and leave.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.machine.description import machine, stamp
from engines.library.cuda import Cuda
from engines.network.build_options import BuildOptions
from engines.running.tensorrt_stepper import TensorRTStepper
from exporter.spec.catalogue import CATALOGUE
from exporter.spec.feeds import step_feeds
from exporter.spec.tensors import BATCH, CAPACITY, SEQUENCE, TOTAL, Contract, graph_contract
from exporter.spec.unit import Unit

RECORD = Path(__file__).parents[1] / "records" / "step_overhead.json"
MODEL, CACHE_CAPACITY, MAX_BATCH, MAX_SEQ_LEN, STEPS = "llama3-8b", 8192, 32, 512, 2_000
MEMORY_BYTES = 1 << 28  # of one context, about that of a prefill of 512 tokens


class IdleCuda(Cuda):
    """CUDA calls that return at once. `captures` and `launches` count graphs."""

    def __init__(self) -> None:
        self.stream = self.device = 0
        self.captures = self.launches = self.allocated_bytes = 0

    def use_device(self) -> None: ...
    def free(self, address: int) -> None: ...
    def upload(self, address: int, array: np.ndarray) -> None: ...
    def download(self, array: np.ndarray, address: int) -> None: ...
    def zero(self, address: int, pitch: int, width: int, height: int) -> None: ...
    def copy(self, destination: int, source: int, pitch: int, width: int, height: int) -> None: ...
    def synchronize(self) -> None: ...
    def destroy_graph(self, graph: Any) -> None: ...
    def close(self) -> None: ...

    def allocate(self, n_bytes: int) -> int:
        self.allocated_bytes += n_bytes
        return self.allocated_bytes << 8

    def capture(self, work: Any) -> Any:
        self.captures += 1
        return object()

    def launch(self, graph: Any) -> None:
        self.launches += 1

    def free_bytes(self) -> int:
        return 1 << 40


class IdleContext:
    """An execution context that accepts everything."""

    def __init__(self, contract: Contract) -> None:
        self._outputs = {spec.name: spec for spec in contract.outputs}
        self._batch = 0

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        return True

    def set_device_memory(self, memory: int, size: int) -> None: ...

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._batch = shape[0]
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        return True

    def infer_shapes(self) -> list[str]:
        return []

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self._outputs[name].shape({BATCH: self._batch, SEQUENCE: 1})

    def execute_async_v3(self, stream: int) -> bool:
        return True


class IdleEngine:
    """An engine of a contract, with a decode and a prefill profile. `own_memory` counts contexts that allocate."""

    device_memory_size_v2 = MEMORY_BYTES

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self._specs = {spec.name: spec for spec in (*contract.inputs, *contract.outputs)}
        self.num_io_tensors, self.num_optimization_profiles, self.own_memory = len(self._specs), 2, 0

    def get_tensor_name(self, index: int) -> str:
        return list(self._specs)[index]

    def get_tensor_mode(self, name: str) -> str:
        return "INPUT" if any(spec.name == name for spec in self._contract.inputs) else "OUTPUT"

    def get_tensor_dtype(self, name: str) -> SimpleNamespace:
        names = {"fp16": "HALF", "fp32": "FLOAT", "int64": "INT64"}
        return SimpleNamespace(name=names[self._specs[name].dtype])

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        most = {BATCH: MAX_BATCH, SEQUENCE: (1, MAX_SEQ_LEN)[profile], TOTAL: CACHE_CAPACITY, CAPACITY: CACHE_CAPACITY}
        least = {BATCH: 1, SEQUENCE: 1, TOTAL: 1, CAPACITY: CACHE_CAPACITY}
        return [self._specs[name].shape(sizes) for sizes in (least, most, most)]

    def create_execution_context(self, strategy: str = "STATIC") -> IdleContext:
        self.own_memory += MEMORY_BYTES * (strategy == "STATIC")
        return IdleContext(self._contract)


def idle_stepper() -> tuple[TensorRTStepper, IdleEngine, IdleCuda]:
    """Returns a stepper of the whole model over an engine and CUDA calls that do nothing."""
    config = CATALOGUE[MODEL]
    contract = graph_contract(config, Unit.parse("model", config), "fp16")
    engine, cuda = IdleEngine(contract), IdleCuda()

    class Logger:
        ERROR, WARNING = 1, 2

    runtime = SimpleNamespace(deserialize_cuda_engine=lambda data: engine)
    trt = SimpleNamespace(
        ILogger=Logger,
        Runtime=lambda logger: runtime,
        TensorIOMode=SimpleNamespace(INPUT="INPUT", OUTPUT="OUTPUT"),
        ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED="USER_MANAGED"),
    )
    record: Any = SimpleNamespace(
        backend="tensorrt",
        version="10.15",
        file="model.engine",
        options=BuildOptions().to_dict(),
        decode_capacity=lambda: CACHE_CAPACITY,
    )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / record.file).write_bytes(b"engine")
        bundle: Any = SimpleNamespace(manifest=SimpleNamespace(contract=contract), folder=Path(folder))
        return TensorRTStepper(bundle, record, trt, cuda), engine, cuda


def step_us(batch: int, past_len: int) -> float:
    """Returns the median µs of the stepper's part of a decode step that is repeated."""
    stepper, _, _ = idle_stepper()
    cache, ids = stepper.new_cache(batch, CACHE_CAPACITY), np.zeros((batch, 1), np.int64)
    feeds = step_feeds("input_ids", ids, np.full(batch, past_len), np.ones(batch, np.int64))
    times = []
    for _ in range(STEPS):
        started = time.perf_counter()
        stepper.run(feeds, cache)
        times.append(time.perf_counter() - started)
    return round(statistics.median(times) * 1e6, 1)


def graph_memory(n_graphs: int = 32) -> dict:
    """Returns the bytes that contexts reserve with a number of graphs."""
    stepper, engine, _ = idle_stepper()
    cache = stepper.new_cache(n_graphs, CACHE_CAPACITY)
    feeds = step_feeds("input_ids", np.zeros((1, 1), np.int64), np.zeros(1, np.int64), np.ones(1, np.int64))
    for row in (*range(n_graphs), *range(n_graphs)):
        stepper.run(feeds, cache, row)
    shared = MEMORY_BYTES * (engine.own_memory == 0)
    return {"graphs": stepper.graph_count, "bytes_of_one": MEMORY_BYTES, "reserved_bytes": engine.own_memory + shared}


def joins(n_steps: int = 4_000, seed: int = 0) -> dict:
    """Returns captures and replays while sequences join and leave at random: batches of 1 to 32, lengths to 8,191."""
    stepper, _, cuda = idle_stepper()
    cache, rng = stepper.new_cache(MAX_BATCH, CACHE_CAPACITY), random.Random(seed)
    lengths = [rng.randrange(16, 2048) for _ in range(16)]
    for _ in range(n_steps):
        if rng.random() < 0.05 and len(lengths) < MAX_BATCH:
            lengths.append(rng.randrange(16, 2048))
        if rng.random() < 0.05 and len(lengths) > 1:
            lengths[rng.randrange(len(lengths))] = lengths[-1]
            lengths.pop()
        past = np.array(lengths)
        ids = np.zeros((len(lengths), 1), np.int64)
        stepper.run(step_feeds("input_ids", ids, past, np.ones(len(lengths), np.int64)), cache)
        lengths = [min(length + 1, CACHE_CAPACITY - 1) for length in lengths]
    return {"steps": n_steps, "captures": cuda.captures, "replays": cuda.launches, "graphs": stepper.graph_count}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.own.step_overhead", description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, metavar="FILE", help="record of an earlier commit, kept in the new one")
    before = parser.parse_args().before
    record = {
        **stamp(),
        "machine": machine(),
        "model": f"{MODEL}, fp16, cache capacity {CACHE_CAPACITY:,}; CUDA and the engine do nothing",
        "step_us": {f"batch {b}, P = {p}": step_us(b, p) for b, p in ((1, 100), (8, 1000), (32, 1000), (32, 8000))},
        "graph_memory": graph_memory(),
        "joins": joins(),
    }
    if before is not None:
        earlier = json.loads(before.read_text())
        record["before"] = {key: earlier[key] for key in ("commit", "step_us", "graph_memory", "joins")}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
