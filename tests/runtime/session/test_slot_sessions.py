"""Slots of a session: sequences join, fork and leave, and no sequence changes the output of another."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading

import numpy as np
import pytest
import torch

from exporter.common.errors import InputError
from runtime import DecodeSession
from runtime.state import SlotState
from tests.conftest import TINY
from tests.support.slot_sessions import (
    CLOSE,
    cache_bits,
    every_backend,
    fill,
    hidden_states,
    near,
    on_onnxruntime,
    recompute,
    row_of,
    tokens,
    unchanged,
)


def count_launches(session: DecodeSession, monkeypatch) -> list[tuple[int, tuple[int, ...]]]:
    """Records (first row, shape of the first input) of each run from now on."""
    launches, run = [], session._stepper.run

    def noting(feeds, cache, first_row):
        launches.append((first_row, next(iter(feeds.values())).shape))
        return run(feeds, cache, first_row)

    monkeypatch.setattr(session._stepper, "run", noting)
    return launches


# --- each sequence by itself -----------------------------------------------------------------------------------------


@every_backend
def test_each_slot_gets_the_logits_of_its_own_tokens(tiny_bundle, open_backend):
    bundle = tiny_bundle("model")
    with open_backend(bundle, cache_capacity=32) as session:
        slots = [session.acquire() for _ in range(3)]
        held = {slot: tokens(4 + 3 * slot, slot) for slot in slots}
        logits = session.step(held)
        for seed in (10, 20):
            step = {slot: tokens(1, seed + slot) for slot in slots}
            held = {slot: np.concatenate([held[slot], step[slot]]) for slot in slots}
            logits = session.step(step)
        assert session.lengths == {slot: 6 + 3 * slot for slot in slots}
        for slot in slots:
            assert logits[slot].shape == (TINY.vocab_size,) and logits[slot].dtype == np.float32
            near(logits[slot], recompute(bundle, held[slot]))


@every_backend
def test_each_slot_of_a_block_gets_its_own_hidden_states(tiny_bundle, open_backend):
    bundle = tiny_bundle("block")
    with open_backend(bundle) as session:
        a, b = session.acquire(), session.acquire()
        x = {a: hidden_states(5, 1), b: hidden_states(3, 2)}
        first = session.step({a: x[a][:4], b: x[b][:2]})
        then = session.step({a: x[a][4:], b: x[b][2:]})
        for slot in (a, b):
            near(np.concatenate([first[slot], then[slot]]), recompute(bundle, x[slot]))


@every_backend
def test_a_newcomers_prefill_runs_beside_the_decode_of_the_others(tiny_bundle, open_backend, monkeypatch):
    bundle = tiny_bundle("model")
    with open_backend(bundle) as session:
        a, b = session.acquire(), session.acquire()
        session.step({a: tokens(4, 1), b: tokens(6, 2)})
        newcomer = session.acquire()
        launches = count_launches(session, monkeypatch)
        logits = session.step({newcomer: tokens(5, 3), b: [7], a: [8]})
        assert launches == [(0, (2, 1)), (2, (1, 5))]
        near(logits[a], recompute(bundle, [*tokens(4, 1), 8]))
        near(logits[b], recompute(bundle, [*tokens(6, 2), 7]))
        near(logits[newcomer], recompute(bundle, tokens(5, 3)))


@pytest.mark.parametrize("kind", [np.int64, np.uint8, torch.tensor])
def test_slots_are_taken_from_whole_numbers_of_every_type(tiny_bundle, kind):
    with (
        on_onnxruntime(tiny_bundle("model"), cache_capacity=16) as session,
        on_onnxruntime(tiny_bundle("model"), cache_capacity=16) as other,
    ):
        for one, number in ((session, kind), (other, int)):
            slot = number(one.acquire())
            one.outputs = one.step({slot: tokens(3)})
            fork = number(one.fork(slot))
            one.state = one.export_slot(fork)
            one.imported = one.import_slot(dataclasses.replace(one.state, length=number(one.state.length)))
            one.release(slot)
            one.outputs |= one.step({fork: tokens(2), number(one.imported): tokens(1)})
        assert session.lengths == other.lengths == {1: 5, 2: 4}
        assert {type(number) for pair in session.lengths.items() for number in pair} == {int}
        assert list(session.outputs) == list(other.outputs) == [0, 1, 2]
        for slot, output in other.outputs.items():
            np.testing.assert_array_equal(session.outputs[slot], output)


def test_a_state_with_masked_tensors_is_refused(tiny_bundle):
    with on_onnxruntime(tiny_bundle("model"), cache_capacity=16) as session:
        slot = session.acquire()
        session.step({slot: tokens(3)})
        state = session.export_slot(slot)
        masked = SlotState(state.length, tuple(np.ma.masked_array(tensor) for tensor in state.tensors))
        with unchanged(session), pytest.raises(InputError, match=r"slot state: got .* \['MaskedArray'\]"):
            session.import_slot(masked)


@every_backend
def test_a_fork_and_its_source_go_separate_ways(tiny_bundle, open_backend):
    bundle = tiny_bundle("model")
    with open_backend(bundle) as session:
        source = session.acquire()
        session.step({source: tokens(6)})
        fork = session.fork(source)
        assert session.lengths == {source: 6, fork: 6}
        logits = session.step({source: [1, 2], fork: [3]})
        near(logits[source], recompute(bundle, [*tokens(6), 1, 2]))
        near(logits[fork], recompute(bundle, [*tokens(6), 3]))
        session.release(source)
        near(session.step({fork: [4]})[fork], recompute(bundle, [*tokens(6), 3, 4]))


@every_backend
def test_an_exported_slot_goes_on_in_another_session_of_another_capacity(tiny_bundle, open_backend):
    bundle = tiny_bundle("model")
    with open_backend(bundle, cache_capacity=16) as session:
        session.acquire()
        slot = session.acquire()
        session.step({slot: tokens(6)})
        state = session.export_slot(slot)
    assert state.length == 6 and [tensor.shape for tensor in state.tensors] == [(2, 6, 16)] * 6
    with open_backend(bundle, cache_capacity=32) as session:
        slot = session.import_slot(state)
        assert session.lengths == {slot: 6}
        near(session.step({slot: [3]})[slot], recompute(bundle, [*tokens(6), 3]))


@every_backend
def test_an_empty_slot_can_be_forked_exported_and_imported(tiny_bundle, open_backend):
    bundle = tiny_bundle("model")
    with open_backend(bundle) as session:
        slot = session.acquire()
        fork, imported = session.fork(slot), session.import_slot(session.export_slot(slot))
        assert session.lengths == {slot: 0, fork: 0, imported: 0}
        logits = session.step({fork: [1, 2], imported: [3]})
        near(logits[fork], recompute(bundle, [1, 2]))
        near(logits[imported], recompute(bundle, [3]))


@every_backend
def test_an_exported_state_is_a_copy(tiny_bundle, open_backend):
    with open_backend(tiny_bundle("model")) as session:
        slot = session.acquire()
        session.step({slot: tokens(6)})
        state = session.export_slot(slot)
        with unchanged(session):
            for tensor in state.tensors:
                tensor[:] = 1e4
        session.import_slot(state)
        with unchanged(session):
            for tensor in state.tensors:
                tensor[:] = 0


@every_backend
def test_threads_that_come_and_go_at_once_each_get_their_own_logits(tiny_bundle, open_backend):
    bundle, errors = tiny_bundle("model"), []

    def serve(session: DecodeSession, seed: int) -> None:
        slot = session.acquire()
        for stop in range(1, 9):
            logits = session.step({slot: tokens(8, seed)[stop - 1 : stop]})[slot]
        session.release(slot)
        errors.append(np.abs(logits - recompute(bundle, tokens(8, seed))).max())

    with open_backend(bundle) as session:
        threads = [threading.Thread(target=serve, args=(session, seed)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert session.lengths == {}
    assert len(errors) == 4 and max(errors) < CLOSE


# --- no effect on others ---------------------------------------------------------------------------------------------


@every_backend
def test_rows_that_take_no_part_are_untouched_to_their_very_end(tiny_bundle, open_backend):
    with open_backend(tiny_bundle("model"), max_batch=5, cache_capacity=16) as session:
        slots = [session.acquire() for _ in range(4)]
        session.step({slot: tokens(3 + slot, slot) for slot in slots})
        for slot in (0, 2):
            fill(session, row_of(session, slot), 7.0, start=3 + slot)
        fill(session, 4, np.nan)
        before = cache_bits(session)
        session.step({1: tokens(5, 9), 3: [1]})
        for row in (0, 2, 4):
            np.testing.assert_array_equal(cache_bits(session)[row], before[row])
        assert session.lengths == {0: 3, 1: 9, 2: 5, 3: 7}


@every_backend
def test_a_step_writes_nothing_beyond_the_new_end_of_a_sequence(tiny_bundle, open_backend):
    with open_backend(tiny_bundle("model"), cache_capacity=16) as session:
        slots = [session.acquire() for _ in range(3)]
        session.step({slot: tokens(4, slot) for slot in slots})
        for slot in slots:
            fill(session, slot, 7.0, start=4)
        session.step({0: tokens(2), 1: [1], 2: [2]})
        for slot, length in session.lengths.items():
            for tensor in session._cache.read(slot, 16):
                assert (tensor[:, length:] == 7).all() and not (tensor[:, :length] == 7).all(axis=2).any()


@every_backend
@pytest.mark.parametrize("left", [np.inf, np.nan])
@pytest.mark.parametrize("take", ["acquire", "fork", "import"])
def test_what_a_released_slot_left_never_reaches_a_later_sequence(tiny_bundle, open_backend, left, take):
    bundle = tiny_bundle("model")
    with open_backend(bundle, cache_capacity=16) as session:
        keeper, leaver = session.acquire(), session.acquire()
        session.step({keeper: tokens(3), leaver: tokens(9, 1)})
        fill(session, row_of(session, leaver), left)
        session.release(leaver)
        prefix = [] if take == "acquire" else tokens(3).tolist()
        later = {
            "acquire": session.acquire,
            "fork": lambda: session.fork(keeper),
            "import": lambda: session.import_slot(session.export_slot(keeper)),
        }[take]()
        assert row_of(session, later) == 1
        near(session.step({later: [5, 6]})[later], recompute(bundle, [*prefix, 5, 6]))
        assert not any(tensor[:, len(prefix) + 2 :].any() for tensor in session._cache.read(1, 16))


@every_backend
def test_a_sequence_that_moves_into_a_gap_takes_nothing_over_from_it(tiny_bundle, open_backend):
    bundle = tiny_bundle("model")
    with open_backend(bundle, cache_capacity=16) as session:
        keeper, leaver, mover = session.acquire(), session.acquire(), session.acquire()
        session.step({keeper: tokens(2), leaver: tokens(9, 1), mover: tokens(3)})
        fill(session, row_of(session, leaver), np.nan)
        session.release(leaver)
        assert row_of(session, mover) == 2 and session.lengths == {keeper: 2, mover: 3}
        outputs = session.step({keeper: [6], mover: [5]})
        assert row_of(session, mover) == 1
        assert not any(tensor[:, 4:].any() for tensor in session._cache.read(1, 16))
        near(outputs[mover], recompute(bundle, [*tokens(3), 5]))
        near(outputs[keeper], recompute(bundle, [*tokens(2), 6]))


@every_backend
def test_leaving_and_joining_moves_nothing(tiny_bundle, open_backend, monkeypatch):
    """A move copies a whole sequence. It is made when a step needs it, and the next sequence often takes the gap."""
    with open_backend(tiny_bundle("model"), cache_capacity=16) as session:
        slots = [session.acquire() for _ in range(3)]
        session.step({slot: tokens(3, slot) for slot in slots})
        copies, copy = [], session._cache.copy
        monkeypatch.setattr(session._cache, "copy", lambda *args: (copies.append(args), copy(*args)))
        session.release(slots[1])
        session.step({slots[2]: [1]})
        newcomer = session.acquire()
        session.step({slots[0]: [1], newcomer: [1], slots[2]: [1]})
        assert row_of(session, newcomer) == 1 and copies == []
        session.release(newcomer)
        session.step({slots[0]: [1], slots[2]: [1]})
        assert copies == [(2, 1, 5)]


@every_backend
def test_zeroing_a_row_costs_what_was_written_to_it(tiny_bundle, open_backend, monkeypatch):
    with open_backend(tiny_bundle("model"), max_batch=2, cache_capacity=32) as session:
        zeroed, zero = [], session._cache.zero
        monkeypatch.setattr(session._cache, "zero", lambda *args: (zeroed.append(args), zero(*args)))
        slot = session.acquire()
        assert zeroed == []
        session.step({slot: tokens(7)})
        session.step({slot: tokens(2)})
        session.release(slot)
        other = session.fork(session.acquire())
        assert zeroed == [(0, 0, 9)]
        session.step({other: tokens(4)})
        session.reset()
        assert (1, 0, 4) in zeroed and not cache_bits(session).any()


def decode_in_company(session: DecodeSession, x: np.ndarray, neighbour_width: int) -> np.ndarray:
    """Logits of x: 4 tokens, then one a step. Another sequence leaves, and a third joins in its row."""
    first, slot = session.acquire(), session.acquire()
    session.step({first: tokens(9, 1)})
    outputs = []
    for start, stop in itertools.pairwise((0, *range(4, len(x) + 1))):
        if start == 6:
            session.release(first)
        if start == 8:
            newcomer = session.acquire()
        company = {newcomer: tokens(neighbour_width, stop)} if start >= 8 else {}
        outputs.append(session.step(company | {slot: x[start:stop]})[slot])
    return np.stack(outputs)


def decode_alone(session: DecodeSession, x: np.ndarray) -> np.ndarray:
    slot = session.acquire()
    return np.stack(
        [session.step({slot: x[start:stop]})[slot] for start, stop in itertools.pairwise((0, *range(4, len(x) + 1)))]
    )


@every_backend
@pytest.mark.parametrize("neighbour_width", [1, 2])
def test_joining_and_leaving_changes_no_other_sequences_output(tiny_bundle, open_backend, neighbour_width):
    outputs = []
    for decode in (decode_alone, functools.partial(decode_in_company, neighbour_width=neighbour_width)):
        with open_backend(tiny_bundle("model"), cache_capacity=32) as session:
            outputs.append(decode(session, tokens(14)))
    near(*outputs)
    if open_backend is on_onnxruntime and neighbour_width == 2:  # the newcomer runs apart, so the shapes are the same
        np.testing.assert_array_equal(*outputs)


@every_backend
def test_who_the_neighbours_are_changes_nothing(tiny_bundle, open_backend):
    outputs = []
    for seed in (1, 2):
        with open_backend(tiny_bundle("model"), cache_capacity=32) as session:
            slots = [session.acquire() for _ in range(3)]
            session.step({slot: tokens(5, 0 if slot == 1 else seed) for slot in slots})
            if seed == 2:  # the last one makes room for another with as many tokens
                session.release(2)
                slots[2] = session.acquire()
                session.step({slots[2]: tokens(5, 7)})
            steps = [{slot: tokens(1, step if slot == 1 else 100 * seed + step) for slot in slots} for step in range(6)]
            outputs.append(np.stack([session.step(step)[1] for step in steps]))
    if open_backend is on_onnxruntime:
        np.testing.assert_array_equal(*outputs)
    near(*outputs)
