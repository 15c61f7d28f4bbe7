"""Slots: sequences that join, fork and leave a running batch, and never notice one another. And the memory plan."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings, stateful
from hypothesis import strategies as st

from exporter.bundle import DATA_FILE, Bundle
from exporter.catalogue import ModelConfig
from exporter.contract import Unit
from exporter.errors import InputError, NumericalError
from exporter.export import ExportRequest, export_bundle
from exporter.feeds import step_feeds
from exporter.steppers.eager import EagerStepper
from exporter.weights import RandomWeights
from runtime import DecodeSession
from runtime.memory import MemoryPlan, plan_memory
from runtime.plan import Launch, check_fits, plan_padded, plan_unpadded
from runtime.session import SlotState
from runtime.slots import Move, SlotTable
from tests.conftest import TINY
from tests.cuda_double import double_session

SMALL = ModelConfig(hidden_size=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16, intermediate_size=48, vocab_size=31, context_length=16)
CLOSE = 1e-5  # float32 sums in another order
FREE = "runtime.backends.available_host_bytes"


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
    """The output for one whole sequence, by the eager definition over an empty cache: logits [V] or hidden states [T, E]."""
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
    """Lengths and every byte of the cache are the same after as before."""
    lengths, bits = dict(session.lengths), cache_bits(session)
    yield
    assert dict(session.lengths) == lengths
    np.testing.assert_array_equal(cache_bits(session), bits)


def fill(session: DecodeSession, row: int, value: float, start: int = 0) -> None:
    """Fills a cache row with one value, from token `start` on."""
    tensors = session._cache.read(row, session.cache_capacity)
    for tensor in tensors:
        tensor[:, start:] = value
    session._cache.write(row, tensors)


def row_of(session: DecodeSession, slot: int) -> int:
    return session._slots.row(slot)


def count_launches(session: DecodeSession, monkeypatch) -> list[tuple[int, tuple[int, ...]]]:
    """Notes (first row, shape of the first input) of each run from now on."""
    launches, run = [], session._stepper.run

    def noting(feeds, cache, first_row):
        launches.append((first_row, next(iter(feeds.values())).shape))
        return run(feeds, cache, first_row)

    monkeypatch.setattr(session._stepper, "run", noting)
    return launches


# --- the slot table ----------------------------------------------------------------------------------------------------


def table_of(*lengths: int, n_rows: int = 4) -> SlotTable:
    table = SlotTable(n_rows)
    for length in lengths:
        table.advance({table.acquire()[0]: length})
    return table


def test_a_new_slot_takes_the_next_row_and_holds_nothing():
    table = table_of(5)
    assert table.acquire() == (1, 1)
    assert table.lengths == {0: 5, 1: 0}


def test_releasing_a_slot_moves_the_last_row_into_its_gap():
    table = table_of(5, 6, 7)
    assert table.release(0) == Move(2, 0)
    assert (table.row(1), table.row(2)) == (1, 0)
    assert (table.length_of_row(0), table.length_of_row(1)) == (7, 6)


@pytest.mark.parametrize("n_slots", [1, 3])
def test_releasing_the_last_row_moves_nothing(n_slots):
    table = table_of(*range(n_slots))
    assert table.release(n_slots - 1) is None
    assert table.lengths == {slot: slot for slot in range(n_slots - 1)}


def test_numbers_are_never_used_twice():
    table, given = table_of(n_rows=2), []
    for _ in range(10):
        given.append(table.acquire()[0])
        table.release(given[-1])
    assert given == list(range(10))


@pytest.mark.parametrize("use", ["row", "length", "release"])
@pytest.mark.parametrize("slot", [1, 3, -1, "0", None])
def test_a_slot_that_is_not_active_is_refused_with_those_that_are(use, slot):
    table = table_of(5, 6, 7)
    table.release(1)
    with pytest.raises(InputError, match=re.escape(f"got {slot!r}, expected one of the active slots [0, 2]")):
        getattr(table, use)(slot)
    assert table.lengths == {0: 5, 2: 7}


def test_a_full_table_refuses_and_takes_one_again_after_a_release():
    table = table_of(1, 2, n_rows=2)
    with pytest.raises(InputError, match="all 2 are taken; release one"):
        table.acquire()
    assert table.lengths == {0: 1, 1: 2}
    table.release(0)
    assert table.acquire() == (2, 1)


def test_lengths_are_a_copy_in_the_order_of_acquisition():
    table = table_of(5, 6, 7)
    table.release(0)
    table.advance({2: 10, 1: 1})
    lengths = table.lengths
    assert list(lengths.items()) == [(1, 7), (2, 17)]
    lengths[1] = 99
    assert table.length(1) == 7


def test_active_rows_stay_neighbours_and_follow_every_move():
    rng, table = np.random.default_rng(0), SlotTable(5)
    written: dict[int, int] = {}  # row → slot whose data it holds, as a cache would that obeys the moves
    for _ in range(2000):
        if table.lengths and (len(table.lengths) == 5 or rng.random() < 0.5):
            slot = int(rng.choice(list(table.lengths)))
            row, move = table.row(slot), table.release(slot)
            if move is not None:
                assert move.destination == row
                written[move.destination] = written[move.source]
        else:
            slot, row = table.acquire()
            written[row] = slot
        active = list(table.lengths)
        assert sorted(table.row(slot) for slot in active) == list(range(len(active)))
        assert all(written[table.row(slot)] == slot for slot in active)


# --- plans -------------------------------------------------------------------------------------------------------------


def test_unpadded_runs_join_neighbours_with_equally_many_tokens_only():
    assert plan_unpadded({0: 1, 1: 1, 2: 1}) == [Launch(0, 3, 1)]
    assert plan_unpadded({0: 1, 1: 5, 2: 1}) == [Launch(0, 1, 1), Launch(1, 2, 5), Launch(2, 3, 1)]
    assert plan_unpadded({0: 1, 2: 1}) == [Launch(0, 1, 1), Launch(2, 3, 1)]
    assert plan_unpadded({3: 2, 1: 2, 2: 2, 0: 4}) == [Launch(0, 1, 4), Launch(1, 4, 2)]


def test_every_unpadded_plan_runs_each_row_once_at_its_own_width_in_as_few_runs_as_that_takes():
    rng = np.random.default_rng(0)
    for _ in range(500):
        rows = rng.choice(8, rng.integers(1, 9), replace=False).tolist()
        widths = {row: int(rng.integers(1, 4)) for row in rows}
        launches = plan_unpadded(widths)
        assert [row for launch in launches for row in launch.rows] == sorted(rows)
        assert all(widths[row] == launch.width for launch in launches for row in launch.rows)
        assert not any(a.stop == b.first and a.width == b.width for a, b in itertools.pairwise(launches))


def fewest_padded_runs(past_lens: list[int], seq_lens: list[int], capacity: int) -> int:
    """By trying every way to cut the rows into neighbours."""
    n_rows = len(past_lens)
    for n_cuts in range(n_rows):
        for cuts in itertools.combinations(range(1, n_rows), n_cuts):
            parts = [slice(*pair) for pair in itertools.pairwise((0, *cuts, n_rows))]
            if all(max(past_lens[part]) + max(seq_lens[part]) <= capacity for part in parts):
                return n_cuts + 1
    raise AssertionError("a row alone always fits")


def test_every_padded_plan_takes_as_few_runs_as_any_way_of_cutting():
    rng = np.random.default_rng(1)
    for _ in range(300):
        past_lens = rng.integers(0, 10, rng.integers(1, 6)).tolist()
        seq_lens = [int(rng.integers(1, 11 - past_len)) for past_len in past_lens]
        assert len(plan_padded(past_lens, seq_lens, 10)) == fewest_padded_runs(past_lens, seq_lens, 10)


def test_the_first_sequence_without_room_is_named_and_a_full_cache_is_room_enough():
    check_fits({"a": (0, 8), "b": (7, 1)}, 8)
    with pytest.raises(InputError, match=r"b holds 7 of 8 tokens and was asked for 2 more.* cache_capacity of at least 9"):
        check_fits({"a": (0, 8), "b": (7, 2), "c": (8, 1)}, 8)


# --- each sequence for itself ------------------------------------------------------------------------------------------


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


# --- and none for another ----------------------------------------------------------------------------------------------


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
        leaver, mover = session.acquire(), session.acquire()
        session.step({leaver: tokens(9, 1), mover: tokens(3)})
        fill(session, row_of(session, leaver), np.nan)
        session.release(leaver)
        assert row_of(session, mover) == 0 and session.lengths == {mover: 3}
        assert not any(tensor[:, 3:].any() for tensor in session._cache.read(0, 16))
        near(session.step({mover: [5]})[mover], recompute(bundle, [*tokens(3), 5]))


def decode_in_company(session: DecodeSession, x: np.ndarray, neighbour_width: int) -> np.ndarray:
    """Logits of x, 4 tokens and then one a step, while another moves it by leaving and a third joins with some tokens a step."""
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
    return np.stack([session.step({slot: x[start:stop]})[slot] for start, stop in itertools.pairwise((0, *range(4, len(x) + 1)))])


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


# --- rows or slots -----------------------------------------------------------------------------------------------------

USES_OF_SLOTS = {
    "acquire": lambda session: session.acquire(),
    "release": lambda session: session.release(0),
    "fork": lambda session: session.fork(0),
    "export_slot": lambda session: session.export_slot(0),
    "import_slot": lambda session: session.import_slot(empty_state(session)),
    "step": lambda session: session.step({0: [1]}),
}


def empty_state(session: DecodeSession) -> SlotState:
    return SlotState(0, tuple(np.zeros((spec.axes[1], 0, spec.axes[3]), np.float32) for spec in session.manifest.contract.cache_specs))


@pytest.mark.parametrize("use", USES_OF_SLOTS)
def test_a_session_used_with_rows_has_no_slots_until_reset(tiny_bundle, use):
    with on_onnxruntime(tiny_bundle("model")) as session:
        session.prefill(tokens(6).reshape(2, 3))
        bits = cache_bits(session)
        with pytest.raises(InputError, match="used with rows"):
            USES_OF_SLOTS[use](session)
        assert session.lengths.tolist() == [3, 3]
        np.testing.assert_array_equal(cache_bits(session), bits)
        session.reset()
        assert session.acquire() in session.lengths


@pytest.mark.parametrize("use", ["prefill", "decode"])
def test_a_session_used_with_slots_has_no_rows_until_reset(tiny_bundle, use):
    with on_onnxruntime(tiny_bundle("model")) as session:
        session.step({session.acquire(): tokens(3)})
        with unchanged(session), pytest.raises(InputError, match="used with slots"):
            getattr(session, use)(np.array([[1]]))
        session.reset()
        session.prefill(np.array([[1, 2]]))
        assert session.lengths.tolist() == [2]


@pytest.mark.parametrize("use", ["release", "fork", "export_slot", "step"])
def test_a_refused_first_use_chooses_neither_rows_nor_slots(tiny_bundle, use):
    with on_onnxruntime(tiny_bundle("model")) as session:
        with pytest.raises(InputError, match="active slots"):
            USES_OF_SLOTS[use](session)
        session.prefill(np.array([[1, 2]]))
        assert session.lengths.tolist() == [2]


@every_backend
def test_reset_forgets_every_slot_and_zeroes_the_cache(tiny_bundle, open_backend):
    bundle = tiny_bundle("model")
    with open_backend(bundle) as session:
        for _ in range(4):
            session.step({session.acquire(): tokens(5)})
        fill(session, 1, np.nan)
        session.reset()
        assert len(session.lengths) == 0 and not cache_bits(session).any()
        slots = [session.acquire() for _ in range(4)]
        near(session.step({slots[1]: tokens(4)})[slots[1]], recompute(bundle, tokens(4)))


def test_a_slot_from_before_a_reset_is_refused_after_it(tiny_bundle):
    with on_onnxruntime(tiny_bundle("model")) as session:
        stale = session.acquire()
        session.reset()
        session.acquire()
        with pytest.raises(InputError, match=f"got {stale}, expected one of the active slots"):
            session.step({stale: [1]})


@every_backend
@pytest.mark.parametrize("use", USES_OF_SLOTS)
def test_use_after_close_is_an_error(tiny_bundle, open_backend, use):
    session = open_backend(tiny_bundle("model"))
    session.step({session.acquire(): tokens(3)})
    session.close()
    with pytest.raises(InputError, match="closed"):
        USES_OF_SLOTS[use](session)


# --- refused -----------------------------------------------------------------------------------------------------------

REFUSED = {
    "no slots": (lambda s: s.step({}), "got no slots"),
    "unknown slot": (lambda s: s.step({0: [1], 9: [1]}), r"got 9, expected one of the active slots \[0, 1, 3\]"),
    "stale slot": (lambda s: s.step({0: [1], 2: [1]}), r"got 2, expected one of the active slots \[0, 1, 3\]"),
    "stale release": (lambda s: s.release(2), "got 2, expected one of"),
    "stale fork": (lambda s: s.fork(2), "got 2, expected one of"),
    "stale export": (lambda s: s.export_slot(2), "got 2, expected one of"),
    "floats": (lambda s: s.step({0: [1], 1: [1.0]}), "slot 1.*float64"),
    "booleans": (lambda s: s.step({0: [1], 1: [True]}), "slot 1.*bool"),
    "a batch": (lambda s: s.step({0: [1], 1: [[1]]}), r"slot 1.*\[1, 1\], expected integers \[T\]"),
    "a number": (lambda s: s.step({0: [1], 1: 1}), r"slot 1.*expected integers \[T\]"),
    "no tokens": (lambda s: s.step({0: [1], 1: np.zeros(0, int)}), "slot 1"),
    "token too large": (lambda s: s.step({0: [1], 1: [1, 2, 101]}), "got 101 in slot 1 at 2, expected 0 to 100"),
    "token below 0": (lambda s: s.step({0: [1], 1: [-1]}), "got -1 in slot 1 at 0"),
    "over capacity": (lambda s: s.step({0: [1], 1: tokens(2), 3: [1]}), "slot 1 holds 15 of 16 tokens and was asked for 2 more; nothing was written"),
}


@every_backend
@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_call_names_its_slot_and_touches_nothing_nor_the_others_in_it(tiny_bundle, open_backend, case):
    call, message = REFUSED[case]
    with open_backend(tiny_bundle("model"), cache_capacity=16) as session:
        for slot in range(4):
            session.step({session.acquire(): tokens(15 if slot == 1 else 3, slot)})
        session.release(2)
        with unchanged(session), pytest.raises(InputError, match=message):
            call(session)
        session.step({0: [1], 1: [1], 3: [1]})
        assert session.lengths == {0: 4, 1: 16, 3: 4}


@every_backend
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((2, 64), np.float16), "slot 1.*got float16 .*expected fp32"),
        (np.zeros((2, 63), np.float32), r"slot 1.*63\], expected fp32"),
        (np.zeros((1, 2, 64), np.float32), r"slot 1.*\[1, 2, 64\], expected fp32 \[T, 64\]"),
        (np.zeros((0, 64), np.float32), "slot 1"),
        (np.array([1, 2]), r"slot 1.*int64 \[2\], expected fp32 \[T, 64\]"),
    ],
)
def test_hidden_states_of_a_wrong_dtype_or_shape_are_refused_by_slot(tiny_bundle, open_backend, x, message):
    with open_backend(tiny_bundle("block")) as session:
        a, b = session.acquire(), session.acquire()
        session.step({a: hidden_states(2), b: hidden_states(3)})
        with unchanged(session), pytest.raises(InputError, match=message):
            session.step({a: hidden_states(1), b: x})


@every_backend
@pytest.mark.parametrize("take", ["acquire", "fork", "import"])
def test_a_full_session_refuses_another_sequence(tiny_bundle, open_backend, take):
    with open_backend(tiny_bundle("model"), max_batch=2) as session:
        session.step({session.acquire(): tokens(3), session.acquire(): tokens(4)})
        state = session.export_slot(0)
        with unchanged(session), pytest.raises(InputError, match="all 2 are taken"):
            {"acquire": session.acquire, "fork": lambda: session.fork(0), "import": lambda: session.import_slot(state)}[take]()
        session.release(0)
        assert session.acquire() == 2


def changed(state: SlotState, change) -> SlotState:
    """The state with its second tensor changed."""
    first, second, *rest = state.tensors
    return SlotState(state.length, (first, change(second.copy()), *rest))


def with_last(value: float):
    def change(tensor: np.ndarray) -> np.ndarray:
        tensor[-1, -1, -1] = value
        return tensor

    return change


BAD_STATES = {
    "another dtype": (lambda state: changed(state, lambda tensor: tensor.astype(np.float16)), "slot state: got 6 tensors"),
    "other heads": (lambda state: changed(state, lambda tensor: tensor[:1]), "slot state: got 6 tensors"),
    "another head_dim": (lambda state: changed(state, lambda tensor: tensor[..., :8]), "slot state: got 6 tensors"),
    "a missing token": (lambda state: changed(state, lambda tensor: tensor[:, 1:]), "slot state: got 6 tensors"),
    "a missing layer": (lambda state: SlotState(state.length, state.tensors[:4]), "got 4 tensors .* expected 6"),
    "another length": (lambda state: SlotState(state.length + 1, state.tensors), "slot state: got 6 tensors"),
    "inf": (lambda state: changed(state, with_last(np.inf)), "inf or NaN"),
    "NaN": (lambda state: changed(state, with_last(np.nan)), "inf or NaN"),
}


@every_backend
@pytest.mark.parametrize("case", BAD_STATES)
def test_a_state_that_this_bundle_cannot_have_is_refused(tiny_bundle, open_backend, case):
    spoil, message = BAD_STATES[case]
    with open_backend(tiny_bundle("model")) as session:
        session.step({session.acquire(): tokens(5)})
        state = session.export_slot(0)
        with unchanged(session), pytest.raises(InputError, match=message):
            session.import_slot(spoil(state))
        assert session.import_slot(state) == 1


@every_backend
def test_a_state_longer_than_the_capacity_is_refused(tiny_bundle, open_backend):
    with open_backend(tiny_bundle("model"), cache_capacity=32) as session:
        session.step({session.acquire(): tokens(17)})
        state = session.export_slot(0)
    with open_backend(tiny_bundle("model"), cache_capacity=16) as session:
        session.step({session.acquire(): tokens(3)})
        with unchanged(session), pytest.raises(InputError, match="holds 0 of 16 tokens and was asked for 17 more"):
            session.import_slot(state)


# --- steps that fail ---------------------------------------------------------------------------------------------------


class DeviceLost(RuntimeError):
    """What the tests raise in the middle of a step."""


@every_backend
def test_a_failure_in_the_second_launch_leaves_all_as_it_was_and_zeroes_what_was_written(tiny_bundle, open_backend, monkeypatch):
    bundle = tiny_bundle("model")
    with open_backend(bundle, cache_capacity=16) as session:
        slots = [session.acquire() for _ in range(3)]
        session.step({slot: tokens(4 + slot, slot) for slot in slots})
        run, written = session._stepper.run, []

        def fail_second(feeds, cache, first_row):
            outputs = run(feeds, cache, first_row)
            written.append(cache.read(first_row, 16)[0][:, 4 + first_row :].any())
            if len(written) == 2:
                raise DeviceLost
            return outputs

        monkeypatch.setattr(session._stepper, "run", fail_second)
        with unchanged(session), pytest.raises(DeviceLost):  # unchanged: beyond their ends the rows were zero
            session.step({0: tokens(3, 9), 1: [1], 2: tokens(2, 9)})
        assert written == [True, True]
        monkeypatch.undo()
        logits = session.step({0: [1], 1: [2], 2: [3]})
        for slot in slots:
            near(logits[slot], recompute(bundle, [*tokens(4 + slot, slot), slot + 1]))


@every_backend
def test_an_output_that_is_not_finite_names_its_slot_and_leaves_all_as_it_was(tiny_bundle, open_backend):
    with open_backend(tiny_bundle("block"), cache_capacity=16) as session:
        a, b, c = (session.acquire() for _ in range(3))
        session.step({a: hidden_states(2), b: hidden_states(3), c: hidden_states(1)})
        bad = hidden_states(1)
        bad[0, 5] = np.inf
        with unchanged(session), pytest.raises(NumericalError, match=f"inf or NaN in slot {b};"):
            session.step({a: hidden_states(2), b: bad, c: hidden_states(1)})
        session.step({a: hidden_states(1), b: hidden_states(1)})


# --- any order of everything -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_bundle(tmp_path_factory) -> Bundle:
    folder = tmp_path_factory.mktemp("small") / "bundle"
    export_bundle(ExportRequest(SMALL, Unit.parse("model", SMALL), RandomWeights(SMALL, 0), "fp32"), folder, validated=False)
    return Bundle.open(folder)


class Serving(stateful.RuleBasedStateMachine):
    """Random traffic on one session, against each sequence's tokens computed again from nothing.

    Beyond its length an active row is always zero, so a step that fails must leave every byte as it was, as one refused does.

    Attributes:
        expected: tokens → logits of the last.
        done: how often a rule ended in what.
        tokens: slot → the tokens it was given.
        given: slot numbers given since the last reset.
        exported: states and the tokens they are of.
    """

    ROWS, CAPACITY = 4, 16

    def __init__(self, session: DecodeSession, expected, done: Counter) -> None:
        super().__init__()
        self.session, self.expected, self.done = session, expected, done
        self.tokens: dict[int, tuple[int, ...]] = {}
        self.given: set[int] = set()
        self.exported: list[tuple[SlotState, tuple[int, ...]]] = [(session.export_slot(session.acquire()), ())]
        session.reset()

    def teardown(self) -> None:
        self.session.close()

    @stateful.invariant()
    def lengths_are_those_of_the_tokens_and_nothing_lies_beyond(self) -> None:
        assert dict(self.session.lengths) == {slot: len(held) for slot, held in self.tokens.items()}
        for slot, held in self.tokens.items():
            assert not any(tensor[:, len(held) :].any() for tensor in self.session._cache.read(row_of(self.session, slot), self.CAPACITY))

    # joining and leaving

    def has_sequences(self) -> bool:
        return bool(self.tokens)

    def is_full(self) -> bool:
        return len(self.tokens) == self.ROWS

    def draw_slot(self, data) -> int:
        return data.draw(st.sampled_from(sorted(self.tokens)), "slot")

    def draw_join(self, data):
        """A way to add a sequence: its name, the call and the tokens that the new slot will hold."""
        name = data.draw(st.sampled_from(["acquire", "fork", "import"] if self.tokens else ["acquire", "import"]), "way to join")
        if name == "acquire":
            return name, self.session.acquire, ()
        if name == "fork":
            source = self.draw_slot(data)
            return name, functools.partial(self.session.fork, source), self.tokens[source]
        state, held = data.draw(st.sampled_from(self.exported), "state")
        return name, functools.partial(self.session.import_slot, state), held

    @stateful.precondition(lambda self: not self.is_full())
    @stateful.rule(data=st.data())
    def join(self, data) -> None:
        name, call, held = self.draw_join(data)
        slot = call()
        assert slot not in self.given
        self.given.add(slot)
        self.tokens[slot] = held
        self.done[name] += 1

    @stateful.precondition(lambda self: self.tokens and len(self.exported) < 8)
    @stateful.rule(data=st.data())
    def export_slot(self, data) -> None:
        slot = self.draw_slot(data)
        with unchanged(self.session):
            self.exported.append((self.session.export_slot(slot), self.tokens[slot]))
        self.done["export"] += 1

    @stateful.precondition(has_sequences)
    @stateful.rule(data=st.data(), everyone=st.integers(0, 9).map(lambda number: number == 9))
    def leave(self, data, everyone) -> None:
        if everyone:
            self.session.reset()
            assert not cache_bits(self.session).any()
            self.tokens, self.given = {}, set()
        else:
            slot = self.draw_slot(data)
            self.session.release(slot)
            del self.tokens[slot]
        self.done["reset" if everyone else "release"] += 1

    @stateful.precondition(lambda self: self.tokens and not self.is_full())
    @stateful.rule(value=st.sampled_from([np.nan, np.inf, 1e4]))
    def leave_rubbish_in_free_rows(self, value) -> None:
        for row in range(len(self.tokens), self.ROWS):
            fill(self.session, row, value)
        self.done["rubbish"] += 1

    # stepping

    def room(self) -> dict[int, int]:
        return {slot: self.CAPACITY - len(held) for slot, held in self.tokens.items() if len(held) < self.CAPACITY}

    def draw_step(self, data) -> dict[int, list[int]]:
        """Tokens for some of the slots that have room, often one each."""
        room = self.room()
        slots = data.draw(st.lists(st.sampled_from(sorted(room)), min_size=1, unique=True), "slots")
        widths = {slot: data.draw(st.just(1) | st.integers(1, min(6, room[slot])), f"width of {slot}") for slot in slots}
        return {slot: data.draw(st.lists(st.integers(0, 30), min_size=width, max_size=width), f"slot {slot}") for slot, width in widths.items()}

    def advance(self, step: dict[int, list[int]]) -> None:
        """A step that succeeds: logits are right, and rows that take no part are left alone."""
        before = cache_bits(self.session)
        logits = self.session.step(step)
        taking_part = [row_of(self.session, slot) for slot in step]
        np.testing.assert_array_equal(np.delete(cache_bits(self.session), taking_part, 0), np.delete(before, taking_part, 0))
        assert logits.keys() == step.keys()
        for slot, new in step.items():
            self.tokens[slot] += tuple(new)
            near(logits[slot], self.expected(self.tokens[slot]), atol=1e-4)
        self.done["step"] += 1

    @stateful.precondition(room)
    @stateful.rule(data=st.data())
    def step(self, data) -> None:
        self.advance(self.draw_step(data))

    @stateful.precondition(room)
    @stateful.rule(data=st.data(), fault=st.sampled_from(["before its run", "after its run", "by its output"]))
    def step_that_fails(self, data, fault) -> None:
        """Launch number k fails, whatever came before it."""
        step, run, launches = self.draw_step(data), self.session._stepper.run, []
        rows = {row_of(self.session, slot): len(new) for slot, new in step.items()}
        k = data.draw(st.sampled_from(range(len(plan_unpadded(rows)))[::-1]), "launch that fails")

        def failing(*args):
            launches.append(args)
            if len(launches) <= k:
                return run(*args)
            if fault == "before its run":
                raise DeviceLost
            outputs = run(*args)
            if fault == "after its run":
                raise DeviceLost
            return {name: np.full_like(output, np.nan) for name, output in outputs.items()}

        with pytest.MonkeyPatch.context() as patch, unchanged(self.session):
            patch.setattr(self.session._stepper, "run", failing)
            with pytest.raises(NumericalError if fault == "by its output" else DeviceLost):
                self.session.step(step)
        assert len(launches) == k + 1
        self.done[f"{'later' if k else 'first'} launch failed {fault}"] += 1

    # refusals: the message and the call

    def over_capacity(self, data):
        slot = self.draw_slot(data)
        step = self.draw_step(data) if self.room() else {}
        step[slot] = [1] * (self.CAPACITY - len(self.tokens[slot]) + data.draw(st.integers(1, 3), "tokens too many"))
        return f"slot {slot} holds {len(self.tokens[slot])} of 16 tokens", lambda: self.session.step(step)

    def bad_token(self, data):
        step = self.draw_step(data)
        slot = data.draw(st.sampled_from(sorted(step)), "slot")
        step[slot][-1] = bad = data.draw(st.sampled_from([-1, 31, 2**40]), "token")
        return f"got {bad} in slot {slot} at {len(step[slot]) - 1}", lambda: self.session.step(step)

    def stale_slot(self, data):
        stale = data.draw(st.sampled_from(sorted(self.given - self.tokens.keys()) or [99]), "stale slot")
        use = data.draw(st.sampled_from(["step", "release", "fork", "export_slot"]), "use")
        argument = (self.draw_step(data) if self.room() else {}) | {stale: [1]} if use == "step" else stale
        return f"got {stale}, expected one of the active slots", functools.partial(getattr(self.session, use), argument)

    def all_taken(self, data):
        return "all 4 are taken", self.draw_join(data)[1]

    @stateful.precondition(has_sequences)
    @stateful.rule(data=st.data())
    def refused(self, data) -> None:
        possible = {"over_capacity", "stale_slot", *(["bad_token"] if self.room() else []), *(["all_taken"] if self.is_full() else [])}
        name = data.draw(st.sampled_from(sorted(possible)), "refusal")
        message, call = getattr(self, name)(data)
        with unchanged(self.session), pytest.raises(InputError, match=message):
            call()
        self.done[name] += 1


ENDS = {
    *("acquire", "fork", "import", "export", "release", "reset", "rubbish", "step", "over_capacity", "bad_token", "stale_slot", "all_taken"),
    *(f"{launch} launch failed {fault}" for launch in ("first", "later") for fault in ("before its run", "after its run", "by its output")),
}


@every_backend
def test_any_order_of_operations_gives_each_sequence_the_logits_of_its_tokens(small_bundle, open_backend):
    done: Counter = Counter()
    expected = functools.cache(functools.partial(recompute, small_bundle))

    def serving() -> Serving:
        return Serving(open_backend(small_bundle, max_batch=Serving.ROWS, cache_capacity=Serving.CAPACITY), expected, done)

    many = settings(max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))
    stateful.run_state_machine_as_test(serving, settings=many)
    assert done.keys() == ENDS  # every rule was there to fail
    assert done.total() >= 2000


# --- the memory plan ---------------------------------------------------------------------------------------------------


def manifest_with(bundle: Bundle, weights_bytes: int):
    return dataclasses.replace(bundle.manifest, files=bundle.manifest.files | {DATA_FILE: {"size_bytes": weights_bytes}})


def test_the_plan_of_a_tiny_model_is_what_it_comes_to_by_hand(tiny_bundle):
    """3 layers × 2 (key, value) × 2 heads × 16 × 4 bytes a token; 64 tokens × (2·64 + 3·96) × 4 bytes and 4 × 101 logits."""
    plan = plan_memory(manifest_with(tiny_bundle("model"), 1000), "eager", 4, 64)
    assert plan == MemoryPlan(1000, 768, 64 * 416 * 4 + 4 * 101 * 4, 4, 64)
    assert plan.cache_bytes == 196_608
    assert plan.total_bytes == 1000 + 196_608 + 108_112


def test_a_block_caches_one_layer_and_makes_no_logits(tiny_bundle):
    plan = plan_memory(manifest_with(tiny_bundle("block"), 1000), "eager", 100, 64)
    assert (plan.cache_bytes_per_token, plan.activations_bytes) == (256, 100 * 416 * 4)


def test_a_long_cache_is_not_taken_for_a_long_step(tiny_bundle):
    manifest = tiny_bundle("block").manifest
    assert plan_memory(manifest, "eager", 1, 4096).activations_bytes == plan_memory(manifest, "eager", 1, 512).activations_bytes


@pytest.mark.parametrize(("dtype", "backend", "copies"), [("fp16", "onnxruntime", 3), ("fp32", "onnxruntime", 2), ("fp32", "eager", 1)])
def test_the_copies_of_the_weights_that_a_backend_makes_are_counted(tiny_bundle, dtype, backend, copies):
    assert plan_memory(manifest_with(tiny_bundle("block", dtype), 1000), backend, 1, 64).weights_bytes == copies * 1000


def test_the_cache_that_is_planned_is_the_cache_that_is_allocated(tiny_bundle):
    for unit, dtype in (("model", "fp32"), ("block", "fp16"), ("stack", "fp16")):
        with on_onnxruntime(tiny_bundle(unit, dtype), max_batch=3, cache_capacity=16) as session:
            assert session.memory.cache_bytes == cache_bits(session).size


def test_a_plan_that_just_fits_is_let_through():
    plan = MemoryPlan(1000, 10, 500, 4, 8)
    plan.check(1820)
    with pytest.raises(InputError, match="nothing was allocated"):
        plan.check(1819)


def proposal(error: pytest.ExceptionInfo) -> tuple[int, int]:
    """(cache capacity for the batch that was asked for, batch for the capacity that was asked for) that a refusal proposes."""
    match = re.search(r"would fit with cache_capacity (\d+), or (\d+) sequences with", str(error.value))
    return int(match[1]), int(match[2])


def test_a_session_that_does_not_fit_is_refused_before_anything_is_allocated(tiny_bundle, monkeypatch):
    bundle = tiny_bundle("model")
    opened = []
    monkeypatch.setattr("exporter.steppers.onnxruntime_stepper.OnnxruntimeStepper.from_bundle", lambda *args: opened.append(args))
    monkeypatch.setattr(FREE, lambda: plan_memory(bundle.manifest, "onnxruntime", 4, 64).total_bytes - 1)
    with pytest.raises(InputError, match=r"memory: the session needs .* GiB is free; nothing was allocated; 4 sequences would fit"):
        on_onnxruntime(bundle, max_batch=4, cache_capacity=64)
    assert opened == []


SHORTAGES = [(100, 0.5), (100, 0.63), (100, 0.83), (100, 0.97), (4, 0.5), (4, 0.8), (2, 0.3)]  # sequences of 64; the share of the cache that is free


@pytest.mark.parametrize(("batch", "share"), SHORTAGES)
def test_what_a_refusal_proposes_fits(tiny_bundle, monkeypatch, batch, share):
    bundle = tiny_bundle("model")
    plan = plan_memory(bundle.manifest, "onnxruntime", batch, 64)
    free = plan.total_bytes - plan.cache_bytes + int(plan.cache_bytes * share)
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
    plan = plan_memory(manifest, "onnxruntime", batch, 64)
    free = plan.total_bytes - plan.cache_bytes + int(plan.cache_bytes * share)
    fits = [capacity for capacity in range(2, 65, 2) if plan_memory(manifest, "onnxruntime", batch, capacity).total_bytes <= free]
    batches = [n for n in range(1, batch + 1) if plan_memory(manifest, "onnxruntime", n, 64).total_bytes <= free]
    with pytest.raises(InputError, match="would fit") as refusal:
        plan.check(free)
    assert proposal(refusal) == (max(fits, default=0), max(batches, default=0))
