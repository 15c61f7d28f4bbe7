"""Validation compares every stored value: rows of tables and weights that no scenario reads, too."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from benchmarks.campaigns.mutants.drafts import Draft, write_mutant
from exporter.bundle.bundle import Bundle
from exporter.export import ExportRequest, export_bundle
from exporter.model.weights import RandomWeights
from exporter.spec.unit import Unit
from exporter.spec.weight_formats import WeightFormat
from exporter.validation.bundle_validation import validate_bundle, why_failed
from exporter.validation.stored_values import STORED
from tests.conftest import MAX_POSITIONS, TINY


def with_changed(bundle: Bundle, folder, name: str, place: tuple, part: int = 0) -> Bundle:
    """Returns a copy of a bundle with one negated value of a stored tensor, and checksums that fit."""
    draft = Draft.read(bundle.parts[part])
    draft.array(name)[place] *= -1
    return write_mutant(bundle, folder, part, draft)


def failed(section: dict) -> list[tuple[str, str]]:
    return [(c["scenario"], c["tensor"]) for c in section["meaning"]["stored"] if not c["passed"]]


@pytest.mark.parametrize("table", ["rope.cos_table", "rope.sin_table"])
@pytest.mark.parametrize("by_layer", [False, True])
def test_a_wrong_row_of_a_rotation_table_fails_also_without_the_source(tiny_bundle, tmp_path, table, by_layer):
    bundle = tiny_bundle("stack", "fp16", "0:2", n_parts=2)
    assert validate_bundle(bundle, by_layer=by_layer)[0]["passed"]
    wrong = with_changed(bundle, tmp_path / "wrong", table, (100, 0), part=1)
    section, _ = validate_bundle(wrong, by_layer=by_layer)
    assert not section["passed"] and failed(section) == [(STORED, f"rotation tables, {table}")]
    assert table in why_failed(section)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_row_of_the_embedding_that_no_token_reads_is_compared_with_its_source(tmp_path, dtype):
    config = dataclasses.replace(TINY, vocab_size=3001, tie_word_embeddings=True)
    unit, weights = Unit.parse("model", config, "1"), RandomWeights(config, 0)
    bundle = export_bundle(ExportRequest(config, unit, weights, dtype, MAX_POSITIONS), tmp_path / "good")
    wrong = with_changed(bundle, tmp_path / "wrong", "embedding.weight", (2999, 5))
    assert (STORED, "weights, embedding.weight") in failed(validate_bundle(wrong, weights)[0])


@pytest.mark.parametrize("stored_as", ["int4", "uint8"])
def test_weights_in_integers_are_compared_with_the_source_as_it_is_rounded(tmp_path, stored_as):
    config = dataclasses.replace(TINY, tie_word_embeddings=True)
    unit, weights = Unit.parse("model", config, "1"), RandomWeights(config, 0)
    request = ExportRequest(config, unit, weights, "fp16", MAX_POSITIONS, weight_format=WeightFormat(stored_as))
    bundle = export_bundle(request, tmp_path / "good")
    for name in ("lm_head.weight", "blocks.0.mlp.down_proj.weight"):
        wrong = with_changed(bundle, tmp_path / "wrong", f"{name}.scales", (0, 1))
        assert (STORED, f"weights, {name}") in failed(validate_bundle(wrong, weights)[0])


def test_a_value_that_is_not_finite_is_the_furthest_off(tiny_bundle, tmp_path):
    bundle = tiny_bundle("block", "fp32")
    draft = Draft.read(bundle)
    draft.array("rope.sin_table")[90, 0] = np.nan
    section, _ = validate_bundle(write_mutant(bundle, tmp_path / "wrong", 0, draft))
    assert failed(section) == [(STORED, "rotation tables, rope.sin_table")]
