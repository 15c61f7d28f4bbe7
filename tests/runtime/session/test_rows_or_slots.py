"""A session is used with rows or with slots, until it is reset."""

from __future__ import annotations

import numpy as np
import pytest

from exporter.common.errors import InputError
from runtime import DecodeSession
from runtime.state import SlotState
from tests.support.slot_sessions import (
    cache_bits,
    every_backend,
    fill,
    near,
    on_onnxruntime,
    recompute,
    tokens,
    unchanged,
)

USES_OF_SLOTS = {
    "acquire": lambda session: session.acquire(),
    "release": lambda session: session.release(0),
    "fork": lambda session: session.fork(0),
    "export_slot": lambda session: session.export_slot(0),
    "import_slot": lambda session: session.import_slot(empty_state(session)),
    "step": lambda session: session.step({0: [1]}),
}


def empty_state(session: DecodeSession) -> SlotState:
    return SlotState(
        0,
        tuple(np.zeros((spec.axes[1], 0, spec.axes[3]), np.float32) for spec in session.manifest.contract.cache_specs),
        session.cache_origin,
    )


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
