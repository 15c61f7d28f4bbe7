"""Measures the "measured" column of exporter/tolerances.py: eager against onnxruntime over ten seeds, and real weights.

python -m benchmarks.tolerances [CHECKPOINT]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from exporter.bundle import Bundle
from exporter.catalogue import CATALOGUE, ModelConfig
from exporter.contract import COMPONENTS, Unit
from exporter.export import ExportRequest, export_bundle, validate_bundle
from exporter.weights import RandomWeights

SEEDS = range(10)
TINY = ModelConfig(hidden_size=64, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=16, intermediate_size=96, vocab_size=101, context_length=128)


def cases(checkpoint: str | None):
    """(name, config, unit, weights by seed, dtypes) of every graph that is measured."""
    block8b = CATALOGUE["llama3-8b"]
    smollm2 = CATALOGUE["smollm2-135m"]
    for component in COMPONENTS:
        yield f"component:{component} (8B)", block8b, f"component:{component}", None
    for kind in ("block", "stack", "model"):
        yield f"{kind} (tiny)", TINY, kind, None
    yield "block (8B)", block8b, "block", None
    yield "stack of 30 (SmolLM2 geometry)", smollm2, "stack", None
    if checkpoint:
        from exporter.checkpoint.huggingface import open_huggingface

        opened = open_huggingface(checkpoint)
        yield "stack of 30 (SmolLM2 real)", opened.config, "stack", opened.weights
        yield "model (SmolLM2 real)", opened.config, "model", opened.weights


def main() -> None:
    """Prints, for each graph and dtype, the largest output and cache error over the seeds."""
    checkpoint = sys.argv[1] if len(sys.argv) > 1 else None
    for name, config, unit, weights in cases(checkpoint):
        for dtype in ("fp32", "fp16", "bf16"):
            worst = {"outputs": 0.0, "cache rows": 0.0}
            with tempfile.TemporaryDirectory() as scratch:
                source = weights or RandomWeights(config, 0)
                request = ExportRequest(config, Unit.parse(unit, config), source, dtype)
                export_bundle(request, Path(scratch) / "bundle", validated=False)
                bundle = Bundle.open(Path(scratch) / "bundle")
                for seed in SEEDS:
                    for comparison in validate_bundle(bundle, source, seed)[1]:
                        kind = comparison.tensor if comparison.tensor == "cache rows" else "outputs"
                        worst[kind] = max(worst[kind], comparison.max_error)
            print(f"{name:34} {dtype}  outputs {worst['outputs']:.2e}  cache rows {worst['cache rows']:.2e}", flush=True)


if __name__ == "__main__":
    main()
