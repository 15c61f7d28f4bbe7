"""Compares what a bundle stores with what it should store: its rotation tables, and its weights with their source.

Scenarios read few rows of the tables and of the embedding. A wrong row that none of them reads would pass.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from exporter.bundle.bundle import Bundle
from exporter.graph.weight_reader import GraphWeights
from exporter.model.weights import RoundedWeights, WeightSource
from exporter.spec.parameters import ROPE_TABLES
from exporter.spec.rope import rotation_table
from exporter.validation.comparison import Comparison

STORED = "stored values"  # name of these comparisons, where others have the name of a scenario
# Cosines of one angle differ by one rounding between machines, 6e-8 of values up to 1.
TABLE_ERROR = 1e-6
_RUN_VALUES = 2**22  # values of a weight that are compared at a time


def compare_stored(bundle: Bundle, weights: WeightSource | None) -> list[Comparison]:
    """Compares every stored value of a bundle, in all of its parts.

    Args:
        bundle: the bundle.
        weights: weights rounded like the bundle's own, from the source that it was made from. None compares the tables
            only.

    Returns:
        One comparison of the tables, where the bundle has them, and one of the weights, where their source is given. A
        comparison that fails has the name of the tensor that is furthest off.
    """
    manifest = bundle.manifest
    tables: dict[str, float] = {}
    errors: dict[str, float] = {}
    for part in bundle.parts:
        identity = (manifest.config, manifest.unit.first_layer, manifest.weights, manifest.weight_format)
        stored = GraphWeights(part.folder, *identity)
        for name in stored.names & set(ROPE_TABLES):
            tables[name] = max(tables.get(name, 0.0), _table_error(stored, name, manifest.max_positions, bundle))
        if weights is not None:
            for name in sorted(stored.names - set(ROPE_TABLES)):
                error = _weight_error(RoundedWeights(stored, manifest.dtype), weights, name, stored.shapes[name])
                errors[name] = max(errors.get(name, 0.0), error)
    return [*_comparison("rotation tables", tables, TABLE_ERROR), *_comparison("weights", errors, 0.0)]


def _comparison(what: str, errors: dict[str, float], allowed: float) -> Iterator[Comparison]:
    if errors:
        worst = max(errors, key=lambda name: errors[name])
        tensor = what if errors[worst] <= allowed else f"{what}, {worst}"
        yield Comparison(STORED, tensor, [], errors[worst], errors[worst], allowed)


def _table_error(stored: GraphWeights, name: str, max_positions: int, bundle: Bundle) -> float:
    expected = rotation_table(bundle.manifest.config, max_positions)[..., ROPE_TABLES.index(name)]
    got = stored.read(name).numpy()
    if got.shape != expected.shape or not np.isfinite(got).all():
        return float("inf")
    return float(np.abs(got - expected).max())


def _weight_error(stored: WeightSource, source: WeightSource, name: str, shape: tuple[int, ...]) -> float:
    """Returns the largest difference relative to the source's rms; 0 where all bits are equal."""
    rows = max(1, _RUN_VALUES // shape[-1]) if len(shape) == 2 else shape[0]
    largest, squares = 0.0, 0.0
    for start in range(0, shape[0], rows):
        run = {"rows": slice(start, start + rows)} if len(shape) == 2 else {}
        got, expected = stored.read(name, **run), source.read(name, **run)
        if torch.equal(got, expected):
            continue
        if got.shape != expected.shape or not torch.isfinite(got).all():
            return float("inf")
        largest = max(largest, float((got - expected).abs().max()))
        squares = max(squares, float(expected.square().mean()))
    return largest / (squares**0.5 or 1.0)
