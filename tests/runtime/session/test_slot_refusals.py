"""Calls with slots that are refused, and steps that fail: the message names the slot, and nothing changes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from exporter.bundle.bundle import Bundle
from exporter.common.errors import InputError, NumericalError
from exporter.export import ExportRequest, export_bundle
from exporter.model.weights import RandomWeights
from exporter.spec.catalogue import RopeScaling
from exporter.spec.unit import Unit
from runtime.state import SlotState
from tests.conftest import MAX_POSITIONS, TINY
from tests.support.slot_sessions import (
    DeviceLost,
    every_backend,
    hidden_states,
    near,
    on_onnxruntime,
    recompute,
    tokens,
    unchanged,
)

# --- refused ---------------------------------------------------------------------------------------------------------

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
    "a list": (lambda s: s.step([1, 2]), "step: got list, expected a mapping"),
    "a number for all": (lambda s: s.step(1), "step: got int, expected a mapping"),
    "nothing": (lambda s: s.step(None), "step: got NoneType, expected a mapping"),
    "a slot by True": (lambda s: s.step({True: [1]}), "slot: got True, expected one of"),
    "a slot by numpy's True": (lambda s: s.step({np.True_: [1]}), "slot: got True, expected one of"),
    "a slot by a float": (lambda s: s.step({np.float64(0): [1]}), "slot: got 0.0, expected one of"),
    "one slot twice": (
        lambda s: s.step({torch.tensor(0): [1], torch.tensor(0): [2]}),
        r"step: got slots \[0, 0\], expected each of them once",
    ),
    "masked": (lambda s: s.step({0: np.ma.masked_equal([1, 2], 2)}), "input: got an array with masked elements"),
    "no array at all": (lambda s: s.step({0: [1], 1: None}), "slot 1: got object"),
    "words": (lambda s: s.step({0: [1], 1: "abc"}), "slot 1: got <U3"),
    "over capacity": (
        lambda s: s.step({0: [1], 1: tokens(2), 3: [1]}),
        "slot 1 holds 15 of 16 tokens and was asked for 2 more; nothing was written",
    ),
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
            {"acquire": session.acquire, "fork": lambda: session.fork(0), "import": lambda: session.import_slot(state)}[
                take
            ]()
        session.release(0)
        assert session.acquire() == 2


def changed(state: SlotState, change) -> SlotState:
    """The state with its second tensor changed."""
    first, second, *rest = state.tensors
    return dataclasses.replace(state, tensors=(first, change(second.copy()), *rest))


def with_last(value: float):
    def change(tensor: np.ndarray) -> np.ndarray:
        tensor[-1, -1, -1] = value
        return tensor

    return change


BAD_STATES = {
    "another dtype": (
        lambda state: changed(state, lambda tensor: tensor.astype(np.float16)),
        "slot state: got 6 tensors",
    ),
    "other heads": (lambda state: changed(state, lambda tensor: tensor[:1]), "slot state: got 6 tensors"),
    "another head_dim": (lambda state: changed(state, lambda tensor: tensor[..., :8]), "slot state: got 6 tensors"),
    "a missing token": (lambda state: changed(state, lambda tensor: tensor[:, 1:]), "slot state: got 6 tensors"),
    "a missing layer": (lambda state: SlotState(state.length, state.tensors[:4]), "got 4 tensors .* expected 6"),
    "another length": (lambda state: SlotState(state.length + 1, state.tensors), "slot state: got 6 tensors"),
    "inf": (lambda state: changed(state, with_last(np.inf)), "inf or NaN"),
    "no state": (lambda state: None, "slot state: got None, expected what export_slot returned"),
    "a tuple": (
        lambda state: (state.length, state.tensors),
        r"slot state: got \(5, .*expected what export_slot returned",
    ),
    "a length in words": (lambda state: SlotState("5", state.tensors), "expected what export_slot returned"),
    "a length below 0": (lambda state: SlotState(-1, state.tensors), "expected what export_slot returned"),
    "lists for tensors": (
        lambda state: SlotState(5, tuple(tensor.tolist() for tensor in state.tensors)),
        r"got 6 tensors \['list'\]",
    ),
    "one tensor": (lambda state: SlotState(5, state.tensors[0]), "got 1 tensors .* expected 6"),
    "None for tensors": (lambda state: SlotState(5, None), r"got 1 tensors \['NoneType'\], expected 6"),
    "NaN": (lambda state: changed(state, with_last(np.nan)), "inf or NaN"),
    "no origin": (
        lambda state: SlotState(state.length, state.tensors),
        "got origin None, expected the cache_origin of the session that computed it",
    ),
    "an origin in words": (
        lambda state: dataclasses.replace(state, origin="the same bundle"),
        "got origin 'the same bundle', expected the cache_origin",
    ),
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


SCALING = RopeScaling(8.0, 1.0, 4.0, 64)
OTHER_BUNDLES = {  # what differs → its config, seed, positions and layers
    "weights": (TINY, 1, MAX_POSITIONS, "0:2"),
    "layers": (TINY, 0, MAX_POSITIONS, "1:3"),
    "max_positions": (TINY, 0, 32, "0:2"),
    "rope_theta": (dataclasses.replace(TINY, rope_theta=5e5), 0, MAX_POSITIONS, "0:2"),
    "rope_scaling": (dataclasses.replace(TINY, rope_scaling=SCALING), 0, MAX_POSITIONS, "0:2"),
    "norm_eps": (dataclasses.replace(TINY, norm_eps=1e-3), 0, MAX_POSITIONS, "0:2"),
}


@pytest.mark.parametrize("what", OTHER_BUNDLES)
def test_a_state_of_another_bundle_of_equal_tensors_is_refused_and_the_message_says_what_differs(
    tiny_bundle, tmp_path, what
):
    config, seed, max_positions, layers = OTHER_BUNDLES[what]
    request = ExportRequest(
        config, Unit.parse("stack", config, layers), RandomWeights(config, seed), "fp32", max_positions
    )
    export_bundle(request, tmp_path / "other", validated=False)
    options = {"cache_capacity": 16}
    with on_onnxruntime(Bundle.open(tmp_path / "other"), **options) as other:
        other.step({other.acquire(): hidden_states(5)})
        state = other.export_slot(0)
    with on_onnxruntime(tiny_bundle("stack", layers="0:2"), **options) as session:
        session.step({session.acquire(): hidden_states(5)})
        assert [tensor.shape for tensor in session.export_slot(0).tensors] == [tensor.shape for tensor in state.tensors]
        with unchanged(session), pytest.raises(InputError, match=f"another bundle .*{what}: got "):
            session.import_slot(state)


def test_an_export_of_the_same_weights_takes_the_state(tiny_bundle, tmp_path):
    request = ExportRequest(TINY, Unit.parse("stack", TINY, "0:2"), RandomWeights(TINY, 0), "fp32", MAX_POSITIONS)
    export_bundle(request, tmp_path / "again", validated=False)
    with on_onnxruntime(Bundle.open(tmp_path / "again")) as again:
        again.step({again.acquire(): hidden_states(5)})
        state = again.export_slot(0)
    with on_onnxruntime(tiny_bundle("stack", layers="0:2")) as session:
        slot = session.import_slot(state)
        assert session.lengths == {slot: 5}


# --- steps that fail -------------------------------------------------------------------------------------------------


@every_backend
def test_a_failure_in_the_second_launch_leaves_all_as_it_was_and_zeroes_what_was_written(
    tiny_bundle, open_backend, monkeypatch
):
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
