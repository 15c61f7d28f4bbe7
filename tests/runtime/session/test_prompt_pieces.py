"""A prompt that is longer than the largest step runs in pieces, for rows and slots, with the result of one step."""

from __future__ import annotations

import numpy as np
import pytest

from exporter.common.errors import NumericalError
from tests.support.device_tensors import from_device, on_device
from tests.support.doubles.cuda_double import CudaDouble
from tests.support.row_sessions import BACKENDS, cache_of, open_session, state, tokens, unchanged

ATOL = 1e-5  # float32 sums in another order; measured 1e-6


def sessions(bundle, backend, largest=3, **options):
    """Two sessions on a backend: one whose largest step has `largest` tokens, and one that takes any step."""
    pieces, whole = (open_session(bundle, backend, cache_capacity=32, **options) for _ in range(2))
    pieces._stepper.max_seq_len = largest
    return pieces, whole


def inputs(bundle, batch, width, seed=0):
    if bundle.manifest.unit.kind == "model":
        return tokens(batch, width, seed)
    shape = (batch, width, bundle.manifest.config.hidden_size)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("unit", ["model", "block"])
def test_rows_in_pieces_equal_one_step(tiny_bundle, backend, unit):
    bundle = tiny_bundle(unit)
    pieces, whole = sessions(bundle, backend)
    with pieces, whole:
        for lengths, width in ([8, 2, 5], 8), ([1, 4, 7], 7), ([1, 1, 1], 1):
            x = inputs(bundle, 3, width, width)
            got, expected = (session.prefill(x, lengths) for session in (pieces, whole))
            np.testing.assert_allclose(got, expected, atol=ATOL)
            assert pieces.lengths.tolist() == whole.lengths.tolist()
        held = [int(n) for n in whole.lengths]
        for a, b in zip(cache_of(pieces), cache_of(whole), strict=True):
            for row, length in enumerate(held):
                np.testing.assert_allclose(a[row, :, :length], b[row, :, :length], atol=ATOL)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("unit", ["model", "block"])
def test_slots_in_pieces_equal_one_step(tiny_bundle, backend, unit):
    bundle = tiny_bundle(unit)
    pieces, whole = sessions(bundle, backend)
    with pieces, whole:
        for session in (pieces, whole):
            session.taken = [session.acquire() for _ in range(3)]
        for widths in ([7, 7, 1], [1, 3, 9]):
            x = [inputs(bundle, 1, width, width)[0] for width in widths]
            got, expected = (s.step(dict(zip(s.taken, x, strict=True))) for s in (pieces, whole))
            for a, b in zip(got.values(), expected.values(), strict=True):
                assert a.shape == b.shape
                np.testing.assert_allclose(a, b, atol=ATOL)
        assert list(pieces.lengths.values()) == list(whole.lengths.values()) == [8, 10, 10]


def test_every_run_takes_at_most_the_largest_step(tiny_bundle, monkeypatch):
    pieces, _ = sessions(tiny_bundle("model"), "onnxruntime")
    with pieces:
        widths, run = [], pieces._stepper.run

        def noted(feeds, *rest):
            widths.append(feeds["position_ids"].shape[1])
            return run(feeds, *rest)

        monkeypatch.setattr(pieces._stepper, "run", noted)
        pieces.prefill(tokens(2, 8), [8, 4])
    assert widths == [3, 3, 2]


def test_a_piece_that_fails_takes_the_whole_step_back(tiny_bundle, monkeypatch):
    pieces, _ = sessions(tiny_bundle("model"), "onnxruntime")
    with pieces:
        pieces.prefill(tokens(2, 4))
        before, run, calls = state(pieces), pieces._stepper.run, []

        def third_fails(feeds, *rest):
            calls.append(1)
            outputs = run(feeds, *rest)
            return {name: np.full_like(x, np.nan) for name, x in outputs.items()} if len(calls) == 3 else outputs

        monkeypatch.setattr(pieces._stepper, "run", third_fails)
        with pytest.raises(NumericalError):
            pieces.prefill(tokens(2, 8), [8, 7])
        unchanged(pieces, before)


@pytest.mark.parametrize("unit", ["model", "block"])
def test_pieces_of_device_tensors_stay_on_the_device(tiny_bundle, unit):
    bundle = tiny_bundle(unit)
    pieces, whole = sessions(bundle, "tensorrt")
    with pieces, whole:
        cuda: CudaDouble = pieces._stepper._cuda
        x = inputs(bundle, 2, 8)
        got = from_device(cuda, pieces.prefill(on_device(cuda, x)))
        np.testing.assert_allclose(got, whole.prefill(x), atol=ATOL)
        pieces.reset()
        slot = pieces.acquire()
        out = pieces.step({slot: on_device(cuda, x[0])})[slot]
        whole.reset()
        other = whole.acquire()
        np.testing.assert_allclose(from_device(cuda, out), whole.step({other: x[0]})[other], atol=ATOL)
