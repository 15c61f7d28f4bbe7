"""The memory estimate: what a session needs, and what a refusal proposes."""

from __future__ import annotations

import dataclasses
import re

import pytest

from exporter.bundle.bundle import Bundle
from exporter.bundle.manifest import DATA_FILE
from exporter.common.errors import InputError
from runtime.policy.memory_estimate import MemoryEstimate, estimate_memory
from tests.support.slot_sessions import cache_bits, on_onnxruntime

FREE = "runtime.backends.available_host_bytes"


def manifest_with(bundle: Bundle, weights_bytes: int):
    return dataclasses.replace(
        bundle.manifest, files=bundle.manifest.files | {DATA_FILE: {"size_bytes": weights_bytes}}
    )


def test_the_estimate_of_a_tiny_model_equals_the_one_by_hand(tiny_bundle):
    """A token: 3 layers × 2 (key, value) × 2 heads × 16 × 4 bytes. A step: 64 × (2·64 + 3·96) × 4 bytes and logits."""
    estimate = estimate_memory(manifest_with(tiny_bundle("model"), 1000), "eager", 4, 64)
    assert estimate == MemoryEstimate(1000, 768, 64 * 416 * 4 + 4 * 101 * 4, 4, 64)
    assert estimate.cache_bytes == 196_608
    assert estimate.total_bytes == 1000 + 196_608 + 108_112


def test_a_block_caches_one_layer_and_makes_no_logits(tiny_bundle):
    estimate = estimate_memory(manifest_with(tiny_bundle("block"), 1000), "eager", 100, 64)
    assert (estimate.cache_bytes_per_token, estimate.activations_bytes) == (256, 100 * 416 * 4)


def test_a_long_cache_is_not_taken_for_a_long_step(tiny_bundle):
    manifest = tiny_bundle("block").manifest
    assert (
        estimate_memory(manifest, "eager", 1, 4096).activations_bytes
        == estimate_memory(manifest, "eager", 1, 512).activations_bytes
    )


@pytest.mark.parametrize(
    ("dtype", "backend", "copies"), [("fp16", "onnxruntime", 3), ("fp32", "onnxruntime", 2), ("fp32", "eager", 1)]
)
def test_the_copies_of_the_weights_that_a_backend_makes_are_counted(tiny_bundle, dtype, backend, copies):
    assert (
        estimate_memory(manifest_with(tiny_bundle("block", dtype), 1000), backend, 1, 64).weights_bytes == copies * 1000
    )


def test_the_cache_is_as_large_as_its_estimate(tiny_bundle):
    for unit, dtype in (("model", "fp32"), ("block", "fp16"), ("stack", "fp16")):
        with on_onnxruntime(tiny_bundle(unit, dtype), max_batch=3, cache_capacity=16) as session:
            assert session.memory.cache_bytes == cache_bits(session).size


def test_an_estimate_that_just_fits_is_accepted():
    estimate = MemoryEstimate(1000, 10, 500, 4, 8)
    estimate.check(1820)
    with pytest.raises(InputError, match="nothing was allocated"):
        estimate.check(1819)


def proposal(error: pytest.ExceptionInfo) -> tuple[int, int]:
    """What a refusal proposes: a cache capacity for the wanted batch, and a batch for the wanted capacity."""
    match = re.search(r"would fit with cache_capacity (\d+), or (\d+) sequences with", str(error.value))
    return int(match[1]), int(match[2])


def test_a_session_that_does_not_fit_is_refused_before_anything_is_allocated(tiny_bundle, monkeypatch):
    bundle = tiny_bundle("model")
    opened = []
    monkeypatch.setattr(
        "exporter.steppers.onnxruntime_stepper.OnnxruntimeStepper.from_bundle", lambda *args: opened.append(args)
    )
    monkeypatch.setattr(FREE, lambda: estimate_memory(bundle.manifest, "onnxruntime", 4, 64).total_bytes - 1)
    with pytest.raises(
        InputError, match=r"memory: the session needs .* GiB is free; nothing was allocated; 4 sequences would fit"
    ):
        on_onnxruntime(bundle, max_batch=4, cache_capacity=64)
    assert opened == []


SHORTAGES = [
    (100, 0.5),
    (100, 0.63),
    (100, 0.83),
    (100, 0.97),
    (4, 0.5),
    (4, 0.8),
    (2, 0.3),
]  # sequences of 64; the share of the cache that is free


@pytest.mark.parametrize(("batch", "share"), SHORTAGES)
def test_what_a_refusal_proposes_fits(tiny_bundle, monkeypatch, batch, share):
    bundle = tiny_bundle("model")
    estimate = estimate_memory(bundle.manifest, "onnxruntime", batch, 64)
    free = estimate.total_bytes - estimate.cache_bytes + int(estimate.cache_bytes * share)
    monkeypatch.setattr(FREE, lambda: free)
    with pytest.raises(InputError, match="would fit") as refusal:
        on_onnxruntime(bundle, max_batch=batch, cache_capacity=64)
    capacity, n_sequences = proposal(refusal)
    if capacity:
        on_onnxruntime(bundle, max_batch=batch, cache_capacity=capacity).close()
    if n_sequences:
        on_onnxruntime(bundle, max_batch=n_sequences, cache_capacity=64).close()
    assert capacity or n_sequences


@pytest.mark.parametrize(("batch", "share"), SHORTAGES)
def test_what_a_refusal_proposes_is_the_largest_that_fits(tiny_bundle, batch, share):
    manifest = tiny_bundle("model").manifest
    estimate = estimate_memory(manifest, "onnxruntime", batch, 64)
    free = estimate.total_bytes - estimate.cache_bytes + int(estimate.cache_bytes * share)
    fits = [
        capacity
        for capacity in range(2, 65, 2)
        if estimate_memory(manifest, "onnxruntime", batch, capacity).total_bytes <= free
    ]
    batches = [n for n in range(1, batch + 1) if estimate_memory(manifest, "onnxruntime", n, 64).total_bytes <= free]
    with pytest.raises(InputError, match="would fit") as refusal:
        estimate.check(free)
    assert proposal(refusal) == (max(fits, default=0), max(batches, default=0))
