"""Slots under random traffic: in any order of operations each sequence gets the logits of its own tokens."""

from __future__ import annotations

import functools
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, settings, stateful
from hypothesis import strategies as st

from exporter.bundle.bundle import Bundle
from exporter.common.errors import InputError, NumericalError
from exporter.export import ExportRequest, export_bundle
from exporter.model.weights import RandomWeights
from exporter.spec.catalogue import ModelConfig
from exporter.spec.unit import Unit
from runtime import DecodeSession
from runtime.policy.launches import unpadded_launches
from runtime.state import SlotState
from tests.support.slot_sessions import DeviceLost, cache_bits, every_backend, fill, near, recompute, row_of, unchanged

pytestmark = pytest.mark.slow

SMALL = ModelConfig(
    hidden_size=32,
    n_layers=2,
    n_heads=2,
    n_kv_heads=1,
    head_dim=16,
    intermediate_size=48,
    vocab_size=31,
    context_length=16,
)


@pytest.fixture(scope="module")
def small_bundle(tmp_path_factory) -> Bundle:
    folder = tmp_path_factory.mktemp("small") / "bundle"
    export_bundle(
        ExportRequest(SMALL, Unit.parse("model", SMALL), RandomWeights(SMALL, 0), "fp32"), folder, validated=False
    )
    return Bundle.open(folder)


class Serving(stateful.RuleBasedStateMachine):
    """Random traffic on one session. The expected logits come from each sequence's tokens, computed alone.

    Beyond its length an active row is always zero, so a step that fails must leave every byte as it was, as one refused
    does.

    Attributes:
        expected: tokens → logits of the last.
        done: result of a rule → how often it occurred.
        tokens: slot → the tokens it was given.
        given: slot numbers given since the last reset.
        exported: exported states, and the tokens of each.
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
    def lengths_are_those_of_the_tokens_and_the_rest_is_zero(self) -> None:
        assert dict(self.session.lengths) == {slot: len(held) for slot, held in self.tokens.items()}
        for slot, held in self.tokens.items():
            assert not any(
                tensor[:, len(held) :].any()
                for tensor in self.session._cache.read(row_of(self.session, slot), self.CAPACITY)
            )

    # joining and leaving

    def has_sequences(self) -> bool:
        return bool(self.tokens)

    def is_full(self) -> bool:
        return len(self.tokens) == self.ROWS

    def draw_slot(self, data) -> int:
        return data.draw(st.sampled_from(sorted(self.tokens)), "slot")

    def draw_join(self, data):
        """A way to add a sequence: its name, the call and the tokens that the new slot will hold."""
        name = data.draw(
            st.sampled_from(["acquire", "fork", "import"] if self.tokens else ["acquire", "import"]), "way to join"
        )
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
    def leave_data_in_free_rows(self, value) -> None:
        taken = {row_of(self.session, slot) for slot in self.tokens}
        for row in set(range(self.ROWS)) - taken:
            fill(self.session, row, value)
        self.done["data in free rows"] += 1

    # stepping

    def room(self) -> dict[int, int]:
        return {slot: self.CAPACITY - len(held) for slot, held in self.tokens.items() if len(held) < self.CAPACITY}

    def draw_step(self, data) -> dict[int, list[int]]:
        """Tokens for some of the slots that have room, often one each."""
        room = self.room()
        slots = data.draw(st.lists(st.sampled_from(sorted(room)), min_size=1, unique=True), "slots")
        widths = {
            slot: data.draw(st.just(1) | st.integers(1, min(6, room[slot])), f"width of {slot}") for slot in slots
        }
        return {
            slot: data.draw(st.lists(st.integers(0, 30), min_size=width, max_size=width), f"slot {slot}")
            for slot, width in widths.items()
        }

    def advance(self, step: dict[int, list[int]]) -> None:
        """Runs a step that succeeds, and checks its logits and that the other rows do not change."""
        before = cache_bits(self.session)
        logits = self.session.step(step)
        taking_part = [row_of(self.session, slot) for slot in step]
        np.testing.assert_array_equal(
            np.delete(cache_bits(self.session), taking_part, 0), np.delete(before, taking_part, 0)
        )
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
        """Launch number k fails, and the session is as before the step."""
        step, run, launches = self.draw_step(data), self.session._stepper.run, []
        self.session._state.fill_gaps(self.session._state.slots, step)
        rows = {row_of(self.session, slot): len(new) for slot, new in step.items()}
        k = data.draw(st.sampled_from(range(len(unpadded_launches(rows)))[::-1]), "launch that fails")

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
        possible = {
            "over_capacity",
            "stale_slot",
            *(["bad_token"] if self.room() else []),
            *(["all_taken"] if self.is_full() else []),
        }
        name = data.draw(st.sampled_from(sorted(possible)), "refusal")
        message, call = getattr(self, name)(data)
        with unchanged(self.session), pytest.raises(InputError, match=message):
            call()
        self.done[name] += 1


ENDS = {
    *(
        "acquire",
        "fork",
        "import",
        "export",
        "release",
        "reset",
        "data in free rows",
        "step",
        "over_capacity",
        "bad_token",
        "stale_slot",
        "all_taken",
    ),
    *(
        f"{launch} launch failed {fault}"
        for launch in ("first", "later")
        for fault in ("before its run", "after its run", "by its output")
    ),
}


@every_backend
def test_any_order_of_operations_gives_each_sequence_the_logits_of_its_tokens(small_bundle, open_backend):
    done: Counter = Counter()
    expected = functools.cache(functools.partial(recompute, small_bundle))

    def serving() -> Serving:
        return Serving(
            open_backend(small_bundle, max_batch=Serving.ROWS, cache_capacity=Serving.CAPACITY), expected, done
        )

    # derandomized, so that every rule is used in each run (one random run in six missed a rare end)
    many = settings(
        max_examples=100,
        stateful_step_count=50,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    stateful.run_state_machine_as_test(serving, settings=many)
    assert done.keys() == ENDS  # every rule was there to fail
    assert done.total() >= 2000
