"""When a generation stops, and that several on one session know nothing of each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from exporter.common.errors import InputError
from runtime import DecodeSession
from runtime.text.generation import Generation
from runtime.text.sampling import Sampler


def generate(session, prompt, **options) -> tuple[list[int], str]:
    generation = Generation(session, prompt, **({"max_new_tokens": 5, "sampler": Sampler()} | options))
    return list(generation), generation.stopped_by


def test_generation_stops_at_the_asked_number(tiny_bundle):
    with DecodeSession.open(tiny_bundle("model").folder) as session:
        tokens, stopped_by = generate(session, [1, 2, 3])
        assert len(tokens) == 5 and stopped_by == "max_new_tokens"


@pytest.mark.parametrize("kind", [np.array, torch.tensor, tuple, iter])
def test_a_prompt_is_taken_from_every_kind_of_sequence(tiny_bundle, kind):
    with DecodeSession.open(tiny_bundle("model").folder) as session:
        expected = generate(session, [1, 2, 3])
        session.reset()
        if kind is iter:  # it can be read once only
            with pytest.raises(InputError, match="expected token ids"):
                generate(session, kind([1, 2, 3]))
            return
        assert generate(session, kind([1, 2, 3]), max_new_tokens=np.int64(5)) == expected


def test_generation_stops_at_any_end_token_and_leaves_it_out(tiny_bundle):
    import dataclasses

    with DecodeSession.open(tiny_bundle("model").folder) as session:
        tokens, _ = generate(session, [1, 2, 3], sampler=Sampler(temperature=3.0))
        session.reset()
        stop = next(i for i in range(1, 5) if tokens[i] not in tokens[:i])
        session.manifest = dataclasses.replace(session.manifest, end_token_ids=(100_000, tokens[stop]))
        again, stopped_by = generate(session, [1, 2, 3], sampler=Sampler(temperature=3.0))
        assert again == tokens[:stop] and stopped_by == "end token"


def test_generation_stops_when_the_cache_is_full(tiny_bundle):
    with DecodeSession.open(tiny_bundle("model").folder, cache_capacity=8) as session:
        tokens, stopped_by = generate(session, [1] * 6, max_new_tokens=50)
        assert (
            len(tokens) == 3 and stopped_by == "cache_capacity"
        )  # two decoded into the cache, the last one only drawn


def test_a_second_generation_on_a_session_knows_nothing_of_the_first(tiny_bundle):
    folder = tiny_bundle("model").folder
    with DecodeSession.open(folder) as session:
        alone = generate(session, [4, 5])
    with DecodeSession.open(folder, max_batch=1) as session:
        generate(session, [1, 2, 3])
        assert generate(session, [4, 5]) == alone
        for _ in Generation(session, [1, 2, 3], 5, Sampler()):
            break  # an iteration that is left early gives its slot back too
        assert generate(session, [4, 5]) == alone and session.lengths == {}


def test_two_generations_on_a_session_at_the_same_time_do_not_mix(tiny_bundle):
    folder, sampler = tiny_bundle("model").folder, Sampler(temperature=2.0, seed=3)
    with DecodeSession.open(folder) as session:
        alone = [generate(session, prompt, sampler=sampler)[0] for prompt in ([1, 2, 3], [4, 5])]
        both = [Generation(session, prompt, 5, sampler) for prompt in ([1, 2, 3], [4, 5])]
        pairs = list(zip(*both, strict=True))
    assert [list(tokens) for tokens in zip(*pairs, strict=True)] == alone


def test_a_generation_is_iterated_once(tiny_bundle):
    with DecodeSession.open(tiny_bundle("model").folder) as session:
        generation = Generation(session, [1, 2, 3], 5, Sampler())
        for _ in generation:
            break
        with pytest.raises(InputError, match="iterated already; keep its tokens in a list, or make another one"):
            list(generation)


def test_a_generation_is_refused_where_the_session_has_another_use(tiny_bundle):
    with DecodeSession.open(tiny_bundle("model").folder, max_batch=1) as session:
        session.prefill(np.array([[1, 2, 3]]))
        with pytest.raises(InputError, match=r"used with rows; call reset\(\)"):
            generate(session, [1])
        session.reset()
        session.acquire()
        with pytest.raises(InputError, match="all 1 are taken"):
            generate(session, [1])


def test_a_generation_outlives_neither_reset_nor_close(tiny_bundle):
    session = DecodeSession.open(tiny_bundle("model").folder)
    tokens = iter(Generation(session, [1, 2, 3], 5, Sampler()))
    next(tokens)
    session.reset()
    with pytest.raises(InputError, match="got 0, expected one of the active slots"):
        next(tokens)
    tokens = iter(Generation(session, [1, 2, 3], 5, Sampler()))
    next(tokens)
    session.close()
    with pytest.raises(InputError, match="it is closed"):
        next(tokens)


def test_bad_generation_requests_are_refused(tiny_bundle):
    with DecodeSession.open(tiny_bundle("model").folder, cache_capacity=8) as session:
        for prompt, options, message in (
            ([1] * 9, {}, "9 tokens and the cache holds 8"),
            ([], {}, "no tokens"),
            ([1], {"max_new_tokens": 0}, "at least 1"),
            ([1], {"max_new_tokens": 2.5}, "max_new_tokens: got 2.5"),
            ([1], {"max_new_tokens": "2"}, "max_new_tokens: got '2'"),
            (5, {}, "prompt: got 5, expected token ids"),
            (None, {}, "prompt: got None, expected token ids"),
            ([1.5, 2], {}, r"prompt: got \[1.5, 2\], expected token ids"),
            ("abc", {}, "prompt: got 'abc', expected token ids"),
            ([[1, 2]], {}, r"prompt: got \[\[1, 2\]\], expected token ids"),
            (np.ma.masked_equal([1, 2], 2), {}, "prompt: got an array with masked elements"),
            ([1], {"max_new_tokens": np.True_}, "max_new_tokens: got True"),
            ([1, 101], {}, "got 101 in slot 0 at 1, expected 0 to 100"),
        ):
            with pytest.raises(InputError, match=message):
                generate(session, prompt, **options)
    with DecodeSession.open(tiny_bundle("block").folder) as session, pytest.raises(InputError, match="whole model"):
        generate(session, [1])
