"""Sessions with rows for the tests, on every backend, and their lengths and cache."""

from __future__ import annotations

import numpy as np

from engines.interpreter.stepper import InterpreterStepper
from exporter.bundle.bundle import Bundle
from runtime import DecodeSession
from tests.conftest import TINY
from tests.support.doubles.cuda_double import double_session

BACKENDS = ("eager", "onnxruntime", "interpreter", "tensorrt")  # TensorRT over the double


def open_session(bundle: Bundle, backend="onnxruntime", max_batch=4, cache_capacity=None, **options) -> DecodeSession:
    if backend == "tensorrt":
        return double_session(bundle, max_batch, cache_capacity)
    if backend == "interpreter":
        return DecodeSession(bundle, InterpreterStepper.from_bundle(bundle), max_batch, cache_capacity)
    return DecodeSession.open(
        bundle.folder, backend=backend, max_batch=max_batch, cache_capacity=cache_capacity, **options
    )


def tokens(batch: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, TINY.vocab_size, (batch, width))


def state(session) -> tuple:
    return session.lengths.tolist(), cache_of(session)


def cache_of(session) -> list[np.ndarray]:
    """A host copy of every cache tensor, [rows, K, C, D]."""
    rows = [session._cache.read(row, session.cache_capacity) for row in range(session.max_batch)]
    return [np.stack(tensors) for tensors in zip(*rows, strict=True)]


def unchanged(session, before) -> None:
    lengths, arrays = before
    assert session.lengths.tolist() == lengths
    for array, old in zip(cache_of(session), arrays, strict=True):
        np.testing.assert_array_equal(array, old)
