"""Fixtures of all tests: a tiny geometry, bundles that are exported once, and a small real model."""

from __future__ import annotations

from pathlib import Path

import pytest

from exporter.bundle.bundle import Bundle
from exporter.export import ExportRequest, export_bundle
from exporter.model.weights import RandomWeights
from exporter.spec.catalogue import ModelConfig
from exporter.spec.unit import Unit

ROOT = Path(__file__).parent.parent
MAX_POSITIONS = 64
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuses names of tests that hold an address: workers that run side by side would not agree on them."""
    unstable = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if unstable:
        raise pytest.UsageError(f"names of tests: got {unstable[0]}, expected no address; give its value a repr")


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory):
    """Returns a function that exports a unit of the tiny model, once per set of arguments, and opens the bundle."""
    exported: dict[tuple, Bundle] = {}

    def export(
        unit: str = "block",
        dtype: str = "fp32",
        layers: str | None = None,
        logits: str | None = None,
        n_parts: int = 1,
        cache: str = "in_place",
    ) -> Bundle:
        parsed = Unit.parse(unit, TINY, layers, logits, cache)
        key = (parsed, dtype, n_parts)
        if key not in exported:
            request = ExportRequest(TINY, parsed, RandomWeights(TINY, 0), dtype, MAX_POSITIONS, n_parts=n_parts)
            folder = tmp_path_factory.mktemp("bundles") / "bundle"
            export_bundle(request, folder, validated=False)
            exported[key] = Bundle.open(folder)
        return exported[key]

    return export


@pytest.fixture(scope="session")
def smollm2_checkpoint() -> Path:
    """The checkpoint folder of the real model, fetched at the first use."""
    from exporter.checkpoint.smollm2 import import_smollm2

    return import_smollm2(ROOT / "build" / "checkpoints" / "smollm2-135m")


@pytest.fixture(scope="session")
def smollm2_bundle(smollm2_checkpoint, tmp_path_factory):
    """The whole real model, exported and validated once per dtype."""
    from exporter.checkpoint.huggingface import open_huggingface

    exported: dict[str, Bundle] = {}

    def export(dtype: str) -> Bundle:
        if dtype not in exported:
            opened = open_huggingface(smollm2_checkpoint)
            unit = Unit.parse("model", opened.config)
            model = {"end_token_ids": opened.end_token_ids, "tokenizer_files": opened.tokenizer_files}
            request = ExportRequest(opened.config, unit, opened.weights, dtype, **model)
            exported[dtype] = export_bundle(request, tmp_path_factory.mktemp("smollm2") / dtype)
        return exported[dtype]

    return export
