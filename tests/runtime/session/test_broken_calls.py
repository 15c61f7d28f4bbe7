"""Calls that are interrupted, or fail, at every place: each happens as a whole or not at all."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from benchmarks.campaigns.faults import interrupt
from engines.library.cuda import CudaError
from exporter.bundle.bundle import Bundle
from runtime import DecodeSession
from runtime.policy.launches import unpadded_launches
from tests.conftest import TINY
from tests.support.doubles.cuda_double import CudaDouble
from tests.support.slot_sessions import (
    DeviceLost,
    every_backend,
    near,
    on_onnxruntime,
    on_the_tensorrt_double,
    recompute,
    tokens,
)

pytestmark = pytest.mark.slow

ROWS, CAPACITY = 4, 16
Tokens = tuple[int, ...]

# --- ways to break a call off ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def fail(session: DecodeSession, place: int, half: bool, for_good: bool) -> Iterator[None]:
    """Call number `place` of the cache or the stepper fails, at its start or half-way; later ones too if `for_good`."""
    cache, stepper, calls = session._cache, session._stepper, []

    def failing(name: str, call: Callable) -> Callable:
        def wrapper(*arguments):
            calls.append(name)
            if len(calls) - 1 < place or (len(calls) - 1 > place and not for_good):
                return call(*arguments)
            if half and name == "run":
                call(*arguments)
            elif half:
                arrays, cache.arrays = cache.arrays, cache.arrays[:2]
                try:
                    call(arguments[0], arguments[1][:2]) if name == "write" else call(*arguments)
                finally:
                    cache.arrays = arrays
            raise DeviceLost(name)

        return wrapper

    with pytest.MonkeyPatch.context() as patch:
        for name in ("zero", "copy", "read", "write"):
            patch.setattr(cache, name, failing(name, getattr(cache, name)))
        patch.setattr(stepper, "run", failing("run", stepper.run))
        yield


@contextlib.contextmanager
def fail_in_cuda(session: DecodeSession, place: int, for_good: bool) -> Iterator[None]:
    """CUDA call number `place` fails; later ones too if `for_good`."""
    cuda, calls = session._stepper._cuda, []

    def failing(name: str, call: Callable) -> Callable:
        def wrapper(*arguments):
            calls.append(name)
            if len(calls) - 1 == place or (len(calls) - 1 > place and for_good):
                raise CudaError(name)
            return call(*arguments)

        return wrapper

    with pytest.MonkeyPatch.context() as patch:
        for name in ("upload", "download", "zero", "copy", "synchronize", "launch"):
            patch.setattr(cuda, name, failing(name, getattr(CudaDouble, name).__get__(cuda)))
        yield


# --- the calls, and what must be true after them -----------------------------------------------------------------


def start(session: DecodeSession) -> dict[int, Tokens]:
    """Three sequences of 3, 4 and 5 tokens in rows 0, 1 and 2 of 4. A fourth has left its tokens in row 3."""
    session.reset()
    held = {session.acquire(): tuple(tokens(3 + seed, seed).tolist()) for seed in range(3)}
    left = session.acquire()
    session.step({**held, left: [1, 2, 3]})
    session.release(left)
    return held


CALLS = {  # session, slots → the call; and by slot what may be held after it, "new" for the slot that it makes
    "acquire": (lambda s, slots: s.acquire(), lambda held, slots: held | {"new": ()}),
    "fork": (lambda s, slots: s.fork(slots[1]), lambda held, slots: held | {"new": held[slots[1]]}),
    "import_slot": (lambda s, slots: s.import_slot(s.exported), lambda held, slots: held | {"new": held[slots[2]]}),
    "release": (lambda s, slots: s.release(slots[0]), lambda held, slots: {slot: held[slot] for slot in slots[1:]}),
    "release of two": (
        lambda s, slots: [s.release(slots[0]), s.release(slots[1])],
        lambda held, slots: {slots[2]: held[slots[2]]},
    ),
    "step": (
        lambda s, slots: s.step({slots[0]: [7, 8], slots[1]: [9], slots[2]: [10]}),
        lambda held, slots: {
            slots[0]: (*held[slots[0]], 7, 8),
            slots[1]: (*held[slots[1]], 9),
            slots[2]: (*held[slots[2]], 10),
        },
    ),
    "reset": (lambda s, slots: s.reset(), lambda held, slots: {}),
}


def held_now(session: DecodeSession, held: dict[int, Tokens], after: dict) -> dict[int, Tokens]:
    """The tokens of each slot, by its length: those before or after the call, the same for all slots of a step."""
    lengths, now = dict(session.lengths), {}
    for slot, length in lengths.items():
        candidates = [held.get(slot), after.get(slot, after.get("new") if slot not in held else None)]
        now[slot] = next(tokens for tokens in candidates if tokens is not None and len(tokens) == length)
    grown = {len(now[slot]) > len(held[slot]) for slot in now if slot in held and slot in after}
    assert len(grown) <= 1, "a step counts for all of its sequences or for none"
    return now


def check_no_token_is_wrong(bundle: Bundle, session: DecodeSession, now: dict[int, Tokens], expected) -> None:
    for slot in now:
        session.export_slot(slot)
        held = session._state.slots.held(slot)
        assert not any(tensor[:, held.length :].any() for tensor in session._cache.read(held.row, CAPACITY)), (
            "the cache is not zero beyond the length"
        )
    while len(session.lengths) < ROWS:  # no row is lost
        now = now | {session.acquire(): ()}
    logits = session.step({slot: [3] for slot in now})
    for slot, held in now.items():
        near(logits[slot], expected((*held, 3)), atol=2e-5)


def break_off_everywhere(
    bundle: Bundle, session: DecodeSession, name: str, breaking: Callable, error: type[BaseException]
) -> int:
    """Breaks the call off at place 0, 1, 2, … until the call succeeds; returns how many places there are."""
    call, then = CALLS[name]
    expected = functools.cache(functools.partial(recompute, bundle))
    held = start(session)
    session.exported = session.export_slot(list(held)[2])
    for place in range(2000):
        held = start(session)
        slots = list(held)
        try:
            with breaking(session, place):
                call(session, slots)
        except error:
            check_no_token_is_wrong(bundle, session, held_now(session, held, then(held, slots)), expected)
        else:
            assert sorted(dict(session.lengths).values()) == sorted(
                len(tokens) for tokens in then(held, slots).values()
            )
            return place
    raise AssertionError("the call never succeeds")


@every_backend
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_anywhere_in_a_call_leaves_no_wrong_token(tiny_bundle, open_backend, name):
    bundle = tiny_bundle("model")
    with open_backend(bundle, max_batch=ROWS, cache_capacity=CAPACITY) as session:
        assert break_off_everywhere(bundle, session, name, lambda _, place: interrupt(place), KeyboardInterrupt) >= 5


@pytest.mark.parametrize("half", [False, True], ids=["before", "half-way"])
@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("name", CALLS)
def test_a_backend_that_fails_anywhere_in_a_call_leaves_no_wrong_token(tiny_bundle, name, for_good, half):
    bundle, breaking = tiny_bundle("model"), functools.partial(fail, half=half, for_good=for_good)
    with on_onnxruntime(bundle, max_batch=ROWS, cache_capacity=CAPACITY) as session:
        assert break_off_everywhere(bundle, session, name, breaking, DeviceLost) >= (
            0 if name.startswith("release") else 1
        )


@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("name", CALLS)
def test_a_cuda_call_that_fails_anywhere_leaves_no_wrong_token(tiny_bundle, name, for_good):
    bundle, breaking = tiny_bundle("model"), functools.partial(fail_in_cuda, for_good=for_good)
    with on_the_tensorrt_double(bundle, max_batch=ROWS, cache_capacity=CAPACITY) as session:
        assert break_off_everywhere(bundle, session, name, breaking, CudaError) >= (
            0 if name.startswith("release") else 2
        )


@every_backend
@pytest.mark.parametrize("step", [[[7, 8], [9, 10]], [[7], [9]]], ids=["prefill", "decode"])
def test_an_interrupt_anywhere_in_a_step_with_rows_leaves_no_wrong_token(tiny_bundle, open_backend, step):
    bundle = tiny_bundle("model")
    prompts, step = tokens(6, 5).reshape(2, 3), np.array(step)
    expected = {}
    with open_backend(bundle, max_batch=2, cache_capacity=CAPACITY) as session:
        for held in (prompts, np.concatenate([prompts, step], axis=1)):
            expected[held.shape[1]] = np.stack([recompute(bundle, [*row, 3]) for row in held])
        for place in range(2000):
            session.reset()
            session.prefill(prompts)
            try:
                with interrupt(place):
                    session.prefill(step) if step.shape[1] > 1 else session.decode(step[:, 0])
            except KeyboardInterrupt:
                lengths = set(session.lengths.tolist())
                assert len(lengths) == 1
                near(session.decode(np.array([3, 3])), expected[lengths.pop()], atol=2e-5)
            else:
                assert place >= 20 and session.lengths.tolist() == [3 + step.shape[1]] * 2
                return


def test_inf_left_by_a_step_that_could_not_be_cleaned_up_is_gone_before_the_next(tiny_bundle):
    """A lost device leaves inf in the rows of the step, and nothing can be zeroed until it is back."""
    bundle = tiny_bundle("model")
    with on_onnxruntime(bundle, max_batch=2, cache_capacity=CAPACITY) as session:
        session.prefill(tokens(6).reshape(2, 3))

        def poison_and_die(feeds, cache, first_row):
            for array in cache.arrays:
                array[first_row:, :, 3:8] = np.inf
            raise DeviceLost

        def dead(*_):
            raise DeviceLost

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session._stepper, "run", poison_and_die)
            patch.setattr(session._cache, "zero", dead)
            with pytest.raises(DeviceLost):
                session.prefill(tokens(10, 1).reshape(2, 5))
            with pytest.raises(DeviceLost):  # the step must not run over the inf
                session.decode(np.array([1, 1]))
        near(session.decode(np.array([1, 1])), [recompute(bundle, [*row, 1]) for row in tokens(6).reshape(2, 3)])
        assert TINY.n_layers == 3 and not any(array[:, :, 4:].any() for array in session._cache.arrays)


def test_what_an_interrupt_dropped_does_not_clean_up_in_the_middle_of_another_call(tiny_bundle):
    """A suspended generator may be collected in any thread, at any time. The next call cleans what it recorded."""
    with on_onnxruntime(tiny_bundle("model", "fp32")) as session:
        session.step({session.acquire(): tokens(4)})
        dropped = session._state.cleaned_where_it_fails(unpadded_launches({0: 3}), {0: 4})
        dropped.__enter__()
        noted = dict(session._state.unclean)
        del dropped
        gc.collect()
        assert session._state.unclean == noted and noted
