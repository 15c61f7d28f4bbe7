"""Sessions with slots for the tests, on every backend; the expected output of a sequence; access to the cache."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from exporter.bundle.bundle import Bundle
from exporter.spec.feeds import step_feeds
from exporter.steppers.eager_stepper import EagerStepper
from runtime import DecodeSession
from tests.conftest import TINY
from tests.support.doubles.cuda_double import double_session

CLOSE = 1e-5  # float32 sums in another order


class DeviceLost(RuntimeError):
    """Raised by the tests in the middle of a step."""


def on_eager(bundle: Bundle, **options) -> DecodeSession:
    return DecodeSession.open(bundle.folder, "eager", **options)


def on_onnxruntime(bundle: Bundle, **options) -> DecodeSession:
    return DecodeSession.open(bundle.folder, "onnxruntime", **options)


def on_the_tensorrt_double(bundle: Bundle, **options) -> DecodeSession:
    return double_session(bundle, **options)


BACKENDS = [on_eager, on_onnxruntime, on_the_tensorrt_double]  # bundle, max_batch=…, cache_capacity=… → session
every_backend = pytest.mark.parametrize("open_backend", BACKENDS, ids=lambda factory: factory.__name__)


def tokens(n_tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, TINY.vocab_size, n_tokens)


def hidden_states(n_tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n_tokens, TINY.hidden_size)).astype(np.float32)


@functools.cache
def reference(folder: Path) -> EagerStepper:
    return EagerStepper.from_bundle(Bundle.open(folder))


def recompute(bundle: Bundle, x) -> np.ndarray:
    """The eager output for one whole sequence over an empty cache: logits [V] or hidden states [T, E]."""
    stepper, x = reference(bundle.folder), np.asarray(x)
    feeds = step_feeds(stepper.contract.step_inputs[0].name, x[None], np.array([0]), np.array([len(x)]))
    return stepper.run(feeds, stepper.new_cache(1, len(x)))[stepper.contract.step_outputs[0].name][0]


def near(a, b, atol: float = CLOSE) -> None:
    np.testing.assert_allclose(a, b, atol=atol, rtol=0)


def cache_bits(session: DecodeSession) -> np.ndarray:
    """Every byte of the cache: uint8 [rows, bytes]."""
    rows = [session._cache.read(row, session.cache_capacity) for row in range(session.max_batch)]
    return np.stack([np.concatenate([tensor.reshape(-1).view(np.uint8) for tensor in row]) for row in rows])


@contextmanager
def unchanged(session: DecodeSession) -> Iterator[None]:
    """Checks that the body changes no length and no byte of the cache."""
    lengths, bits = dict(session.lengths), cache_bits(session)
    yield
    assert dict(session.lengths) == lengths
    np.testing.assert_array_equal(cache_bits(session), bits)


def fill(session: DecodeSession, row: int, value: float, start: int = 0) -> None:
    """Fills a cache row with one value from token `start`, as a step that wrote up to the capacity."""
    tensors = session._cache.read(row, session.cache_capacity)
    for tensor in tensors:
        tensor[:, start:] = value
    session._cache.write(row, tensors)
    session._state.ends[row] = session.cache_capacity


def row_of(session: DecodeSession, slot: int) -> int:
    return session._state.slots.held(slot).row
