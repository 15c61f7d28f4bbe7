"""Sessions with rows: a full cache, ragged rows, steps that fail. Each step happens as a whole or not at all."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from exporter.bundle.bundle import Bundle
from exporter.common.errors import InputError, NumericalError
from exporter.export import ExportRequest, export_bundle
from exporter.model.weights import RandomWeights
from exporter.spec.unit import Unit
from tests.conftest import MAX_POSITIONS, ROOT, TINY
from tests.support.planted_faults import doctored, scale_weight
from tests.support.row_sessions import BACKENDS, cache_of, open_session, state, tokens, unchanged


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("first", "then"), [(8, None), (7, 1)])
def test_a_cache_of_eight_holds_eight(tiny_bundle, backend, first, then):
    with open_session(tiny_bundle("model"), backend, cache_capacity=8) as session:
        session.prefill(tokens(1, first))
        if then:
            session.prefill(tokens(1, then))
        assert session.lengths.tolist() == [8] and session.cache_capacity == 8


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("first", "then"), [(7, 2), (8, 1)])
def test_one_token_too_many_is_refused_before_any_write(tiny_bundle, backend, first, then):
    with open_session(tiny_bundle("model"), backend, cache_capacity=8) as session:
        session.prefill(tokens(1, first))
        before = state(session)
        with pytest.raises(
            InputError,
            match=rf"sequence 0 holds {first} of 8 tokens and was asked for {then} more; nothing was written",
        ):
            session.prefill(tokens(1, then))
        unchanged(session, before)
        if first < 8:
            session.decode(np.array([1]))
            assert session.lengths.tolist() == [8]


@pytest.fixture(scope="module")
def long_bundle(tmp_path_factory) -> Bundle:
    config = dataclasses.replace(TINY, context_length=1024, n_layers=1)
    folder = tmp_path_factory.mktemp("long") / "bundle"
    export_bundle(
        ExportRequest(config, Unit.parse("model", config), RandomWeights(config, 0), "fp32", 1024),
        folder,
        validated=False,
    )
    return Bundle.open(folder)


@pytest.mark.parametrize("backend", BACKENDS)
def test_capacity_is_not_length(long_bundle, backend):
    outputs = []
    for capacity in (16, 64, 1024):
        with open_session(long_bundle, backend, cache_capacity=capacity) as session:
            session.prefill(tokens(2, 9))
            outputs.append(session.decode(np.array([1, 2])))
    for output in outputs[1:]:
        if backend == "tensorrt":  # its mask is padded up to a bucket, which changes the order of sums
            np.testing.assert_allclose(output, outputs[0], atol=1e-5)
        else:
            np.testing.assert_array_equal(output, outputs[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_position_beyond_the_table_is_the_same_refusal_on_every_backend_before_the_step(tiny_bundle, backend):
    with open_session(
        tiny_bundle("model"), backend, cache_capacity=MAX_POSITIONS
    ) as session:  # no cache is larger than the table
        session.prefill(tokens(1, MAX_POSITIONS))
        before, runs = state(session), []
        session._stepper.run = lambda *arguments: runs.append(arguments)
        with pytest.raises(
            InputError, match="sequence 0 holds 64 of 64 tokens and was asked for 1 more; nothing was written"
        ):
            session.decode(np.array([1]))
        assert not runs
        unchanged(session, before)


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_a_cache_larger_than_the_table_is_refused(tiny_bundle, backend):
    with pytest.raises(
        InputError,
        match=f"cache_capacity: got {MAX_POSITIONS + 1}, .*at most {MAX_POSITIONS}, the positions this graph",
    ):
        open_session(tiny_bundle("model"), backend, cache_capacity=MAX_POSITIONS + 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("unit", ["model", "block"])
def test_ragged_rows_near_capacity_are_split_and_write_nothing_past_their_end(tiny_bundle, backend, unit):
    def draw(width, seed):
        if unit == "model":
            return tokens(2, width, seed)
        return np.random.default_rng(seed).standard_normal((2, width, TINY.hidden_size)).astype(np.float32)

    with open_session(tiny_bundle(unit), backend, cache_capacity=64) as session:
        session.prefill(draw(60, 1), [60, 1])
        session._state.row_lengths[1] = 0  # as if the second sequence were new: write indices 60 and 0
        rest = draw(5, 2)
        out = session.prefill(rest, [1, 5])
        assert session.lengths.tolist() == [61, 5]
        assert all(not array[0, :, 61:].any() for array in cache_of(session))
    with open_session(tiny_bundle(unit), backend, cache_capacity=64) as session:
        alone = session.prefill(rest[1:])
        np.testing.assert_allclose(out[1], alone[0], atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_that_fails_midway_leaves_lengths_and_rows_and_zeroes_what_it_wrote(tiny_bundle, backend, monkeypatch):
    with open_session(tiny_bundle("model"), backend, cache_capacity=64) as session:
        session.prefill(tokens(2, 60, 1), [60, 3])
        before = state(session)
        run, calls = session._stepper.run, []

        def fail_second(*args):
            calls.append(args)
            result = run(*args)
            if len(calls) == 2:
                raise RuntimeError("device lost")
            return result

        monkeypatch.setattr(session._stepper, "run", fail_second)
        with pytest.raises(RuntimeError, match="device lost"):
            session.prefill(tokens(2, 5, 2), [2, 5])
        assert len(calls) == 2
        for array in cache_of(session):
            assert not array[0, :, 60:].any() and not array[1, :, 3:8].any()
        lengths, arrays = before
        assert session.lengths.tolist() == lengths
        for array, old in zip(cache_of(session), arrays, strict=True):
            np.testing.assert_array_equal(array[0, :, :60], old[0, :, :60])
            np.testing.assert_array_equal(array[1, :, :3], old[1, :, :3])
        monkeypatch.undo()
        session.decode(np.array([1, 2]))
        assert session.lengths.tolist() == [61, 4]


def test_outputs_that_are_not_finite_raise_and_leave_the_session_as_it_was(tiny_bundle):
    with open_session(tiny_bundle("block", "fp16"), cache_capacity=64) as session:
        good = np.ones((2, 3, TINY.hidden_size), np.float16)
        session.prefill(good)
        rows = [array[:, :, :3].copy() for array in session._cache.arrays]
        bad = good.copy()
        bad[1, 2, 5] = np.inf
        with pytest.raises(NumericalError, match="inf or NaN in sequence 1;"):
            session.prefill(bad)
        assert session.lengths.tolist() == [3, 3]
        for array, old in zip(session._cache.arrays, rows, strict=True):
            np.testing.assert_array_equal(array[:, :, :3], old)
            assert not array[:, :, 3:].any()
        session.prefill(good)


def test_an_overflow_in_half_precision_is_reported_and_never_returned_as_logits(tiny_bundle, tmp_path):
    """silu(gate) · up beyond 65,504 is inf in down_proj, then NaN. The interpreter computes in fp16 as a GPU does."""
    bundle = doctored(tiny_bundle("model", "fp16"), tmp_path / "bundle")
    for name in ("gate_proj", "up_proj"):
        scale_weight(bundle, f"blocks.1.mlp.{name}.weight", 1e4)
    with open_session(bundle, "interpreter", cache_capacity=16) as session:
        before = state(session)
        with pytest.raises(
            NumericalError, match=r"logits: inf or NaN in sequence 0, sequence 1; .*engines compare .* --audit"
        ):
            session.prefill(tokens(2, 3))
        unchanged(session, before)


def test_data_in_padding_change_no_output(tiny_bundle):
    x = np.random.default_rng(0).standard_normal((2, 4, TINY.hidden_size)).astype(np.float32)
    poisoned = x.copy()
    poisoned[0, 2:] = np.nan
    with open_session(tiny_bundle("block")) as session:
        clean = session.prefill(x, [2, 4])
        session.reset()
        np.testing.assert_array_equal(session.prefill(poisoned, [2, 4]), clean)
        assert not clean[0, 2:].any()


def test_the_batch_is_fixed_until_reset(tiny_bundle):
    with open_session(tiny_bundle("model")) as session:
        session.prefill(tokens(2, 3))
        with pytest.raises(InputError, match="got 3 rows, expected 2"):
            session.decode(np.array([1, 2, 3]))
        session.reset()
        assert session.lengths.tolist() == []
        session.decode(np.array([1, 2, 3]))  # a first step of one token on an empty cache
        assert session.lengths.tolist() == [1, 1, 1]


def test_a_model_with_all_logits_returns_each_rows_last(tiny_bundle):
    results = []
    for logits in ("last", "all"):
        with open_session(tiny_bundle("model", logits=logits)) as session:
            results.append(session.prefill(tokens(3, 5), [1, 5, 3]))
    np.testing.assert_allclose(*results, atol=1e-5)


def test_the_default_capacity_is_the_exports_positions_when_those_are_fewer(tiny_bundle):
    with open_session(tiny_bundle("model")) as session:
        assert session.cache_capacity == MAX_POSITIONS


def test_use_after_close_is_an_error(tiny_bundle):
    session = open_session(tiny_bundle("model"))
    session.close()
    session.close()
    for use in (lambda: session.prefill(tokens(1, 1)), session.reset, lambda: session.decode(np.array([1]))):
        with pytest.raises(InputError, match="closed"):
            use()


def test_two_sessions_on_one_bundle_are_independent(tiny_bundle):
    with open_session(tiny_bundle("model")) as a, open_session(tiny_bundle("model")) as b:
        a.prefill(tokens(1, 5, 1))
        out = b.prefill(tokens(1, 5, 2))
        a.reset()
        assert b.lengths.tolist() == [5]
        np.testing.assert_allclose(a.prefill(tokens(1, 5, 2)), out, atol=1e-6)


def test_threads_that_share_a_session_take_turns(tiny_bundle):
    with open_session(tiny_bundle("model"), cache_capacity=64) as session:
        session.prefill(tokens(1, 1))
        threads = [
            threading.Thread(target=lambda: [session.decode(np.array([3])) for _ in range(10)]) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert session.lengths.tolist() == [41]


IN_PLACE = """
import ctypes, mmap, sys
import numpy as np
from exporter.bundle.bundle import Bundle
from exporter.spec.feeds import step_feeds
from exporter.steppers.onnxruntime_stepper import OnnxruntimeStepper

PAGE, HEAD = 4096, 1024 * 16 * 4  # bytes of a page, and of one head's 1,024 rows
stepper = OnnxruntimeStepper.from_bundle(Bundle.open(sys.argv[1]))
cache = stepper.new_cache(1, 1024)
for i, array in enumerate(cache.arrays):
    cache.arrays[i] = np.frombuffer(mmap.mmap(-1, array.nbytes), array.dtype).reshape(array.shape)
    for head in range(2):
        rest = cache.arrays[i].ctypes.data + head * HEAD + PAGE
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(rest), ctypes.c_size_t(HEAD - PAGE), mmap.PROT_READ) == 0
past_len = int(sys.argv[2])
stepper.run(step_feeds("hidden_states", np.ones((1, 2, 64), np.float32), np.array([past_len]), np.array([2])), cache)
print(sorted(set(np.concatenate([array.any(axis=(0, 1, 3)).nonzero()[0] for array in cache.arrays]).tolist())))
"""


def test_onnxruntime_writes_the_cache_in_place(tiny_bundle):
    """Only the first page of each head is writable: a step that copied the cache, even onto itself, would crash."""

    def run(past_len: int) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", IN_PLACE, str(tiny_bundle("block").folder), str(past_len)]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)

    assert run(past_len=4).stdout.strip() == "[4, 5]"
    assert run(past_len=64).returncode == -signal.SIGSEGV  # the first row of the second page: the protection is real
