"""Measures the errors that the tolerances are derived from: between backends over seeds, and of each operation.

python -m benchmarks.own.measured_errors --checkpoint DIR    writes exporter/validation/measured_errors.json
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import exporter
from engines.comparison.audit import audit
from engines.comparison.compare import Comparer, CompareRequest
from exporter.bundle.bundle import Bundle
from exporter.checkpoint.formats import open_checkpoint
from exporter.export import ExportRequest, export_bundle
from exporter.model.weights import RandomWeights, WeightSource
from exporter.spec.catalogue import CATALOGUE, ModelConfig
from exporter.spec.dtypes import DTYPES
from exporter.spec.unit import COMPONENTS, Unit
from exporter.validation.comparison import compare
from exporter.validation.reference_weights import reference_weights
from exporter.validation.scenarios import RunLimits
from exporter.validation.tolerances import MEASURED_FILE, Tolerance, operation_kind

BACKENDS = ("eager", "onnxruntime", "interpreter")
TINY = ModelConfig(
    hidden_size=64,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    vocab_size=101,
    context_length=128,
)


@dataclass(frozen=True)
class Case:
    """One graph to measure. Graphs with real weights have a table of their own."""

    name: str
    config: ModelConfig
    unit: str
    weights: WeightSource
    seeds: int
    real: bool = False


def cases(checkpoint: str) -> Iterator[Case]:
    """Yields all cases: components and a block of 8B geometry, a stack of 30 layers, a tiny and the real model."""
    for kind in ("block", "stack", "model"):
        yield Case(f"tiny {kind}", TINY, kind, RandomWeights(TINY, 0), 10)
    block8b, smollm2 = CATALOGUE["llama3-8b"], CATALOGUE["smollm2-135m"]
    for component in COMPONENTS:
        yield Case(f"{component} (8B)", block8b, f"component:{component}", RandomWeights(block8b, 0), 3)
    yield Case("block (8B)", block8b, "block", RandomWeights(block8b, 0), 2)
    yield Case("stack of 30 (SmolLM2 geometry)", smollm2, "stack", RandomWeights(smollm2, 0), 2)
    opened = open_checkpoint(checkpoint, None)
    yield Case("model (SmolLM2 real)", opened.config, "model", opened.weights, 2, real=True)


def measure(case: Case, dtype: str, tables: dict) -> None:
    """Adds one case's largest errors to the tables."""
    outputs = tables["real_weights" if case.real else "outputs"]
    with tempfile.TemporaryDirectory() as scratch:
        request = ExportRequest(case.config, Unit.parse(case.unit, case.config), case.weights, dtype)
        bundle = export_bundle(request, Path(scratch) / "bundle", validated=False)
        rounded = reference_weights(bundle)
        for seed in range(case.seeds):
            compared = CompareRequest(BACKENDS, seed=seed)
            comparer = Comparer(bundle, compared, lambda line: None, rounded, RunLimits(), Path(scratch))
            recordings = {}
            for name in BACKENDS:
                with comparer.open(name) as stepper:
                    recordings[name] = comparer.record_run(stepper)
            for a, b in combinations(BACKENDS, 2):
                table = outputs.setdefault(f"{a}-{b}", {}).setdefault(request.unit.kind, {}).setdefault(dtype, {})
                for c in compare(recordings[a], recordings[b], Tolerance(0.0, {}, "")):
                    table[c.scenario] = max(table.get(c.scenario, 0.0), round_up(c.max_error))
            if request.unit.has_cache and (seed < 2 or case.config is TINY):
                measure_operations(bundle, comparer, tables["operations"])
    worst = {stage: max(table[request.unit.kind][dtype].values()) for stage, table in outputs.items()}
    print(f"{case.name:34} {dtype}", " ".join(f"{stage} {error:.1e}" for stage, error in worst.items()), flush=True)


def measure_operations(bundle: Bundle, comparer: Comparer, tables: dict) -> None:
    """Adds the largest local error of every kind of operation."""
    reference = comparer.reference()
    for name in ("onnxruntime", "interpreter"):
        observer = comparer.observer(name, reference)
        kinds = tables.setdefault(name, {}).setdefault(bundle.manifest.dtype, {})
        for operation in audit(reference, observer).operations:
            entry = kinds.setdefault(operation_kind(operation.name), {"error": 0.0, "differing": 0.0})
            entry["error"] = max(entry["error"], round_up(operation.local))
            if not math.isnan(operation.differing):
                entry["differing"] = max(entry["differing"], round_up(operation.differing))
        observer.close()


def round_up(value: float) -> float:
    """Rounds up to two significant digits; further digits are noise."""
    return float(f"{value * 1.005:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.own.measured_errors", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="folder of the real weights to measure")
    checkpoint = parser.parse_args().checkpoint
    tables: dict = {"outputs": {}, "operations": {}, "real_weights": {}}
    for case in cases(checkpoint):
        for dtype in DTYPES:
            measure(case, dtype, tables)
    path = Path(exporter.__file__).parent / "validation" / MEASURED_FILE
    path.write_text(json.dumps(tables, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
