"""Sampling under a seed, and when a generation stops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from exporter.common.errors import InputError
from runtime import DecodeSession
from runtime.text.generation import Generation
from runtime.text.sampling import Sampler

LOGITS = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))


def frequencies(sampler: Sampler, n: int = 4000) -> np.ndarray:
    return np.bincount([sampler(LOGITS) for _ in range(n)], minlength=4) / n


def test_no_options_means_greedy():
    assert Sampler().temperature == 0
    assert {Sampler()(LOGITS) for _ in range(5)} == {0}


def test_top_k_or_top_p_alone_means_temperature_one():
    assert Sampler(top_k=2).temperature == Sampler(top_p=0.5).temperature == 1.0


def test_temperature_one_draws_the_models_own_distribution():
    np.testing.assert_allclose(frequencies(Sampler(temperature=1.0)), [0.5, 0.3, 0.15, 0.05], atol=0.03)


def test_low_temperature_sharpens():
    assert frequencies(Sampler(temperature=0.25))[0] > 0.85


def test_top_k_keeps_k_tokens_and_renormalizes():
    np.testing.assert_allclose(frequencies(Sampler(top_k=2)), [0.625, 0.375, 0, 0], atol=0.03)


def test_top_p_keeps_the_fewest_tokens_that_reach_p():
    np.testing.assert_allclose(frequencies(Sampler(top_p=0.7)), [0.625, 0.375, 0, 0], atol=0.03)
    assert frequencies(Sampler(top_p=0.5))[0] == 1.0
    assert (frequencies(Sampler(top_p=1.0)) > 0).all()


def draws(seed: int) -> list[int]:
    sampler = Sampler(temperature=1.0, seed=seed)
    return [sampler(LOGITS) for _ in range(30)]


def test_the_same_seed_draws_the_same_tokens():
    assert draws(7) == draws(7) != draws(8)


BAD_OPTIONS = [
    *({"temperature": value} for value in (-1, float("nan"), float("inf"), "hot", True, [1])),
    *({"top_k": value} for value in (0, 1.5, "3", True)),
    *({"top_p": value} for value in (0, 1.5, float("nan"), "0.5", True)),
    *({"seed": value} for value in (-1, 1.5, "7", None, True)),
]


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=str)
def test_bad_sampling_options_are_refused(options):
    with pytest.raises(InputError, match=f"^{next(iter(options))}: got "):
        Sampler(**options)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"top_k": 5}, "top_k"), ({"top_p": 0.9}, "top_p"), ({"top_k": 5, "top_p": 0.9}, "top_k and top_p")],
)
def test_top_k_and_top_p_at_temperature_0_are_refused_with_the_way_out(options, named):
    with pytest.raises(
        InputError, match=f"with {named}, .*leave them out for greedy text, or give a temperature above 0"
    ):
        Sampler(temperature=0, **options)


def test_numpys_numbers_are_numbers():
    assert Sampler(temperature=np.float32(0.5), top_k=np.int64(2), top_p=np.float64(0.9), seed=np.int64(1))(LOGITS) in (
        0,
        1,
    )


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


def test_a_sampler_takes_numbers_of_every_type():
    logits = np.random.default_rng(0).standard_normal(50).astype(np.float32)
    odd = Sampler(np.float32(0.5), torch.tensor(7), np.float64(0.75), np.int64(3))
    assert [odd(logits) for _ in range(9)] == [s(logits) for s in [Sampler(0.5, 7, 0.75, 3)] for _ in range(9)]
    for wrong in ({"top_k": np.True_}, {"seed": np.float64(3)}, {"temperature": np.True_}):
        with pytest.raises(InputError, match="got"):
            Sampler(**wrong)


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
        ):
            with pytest.raises(InputError, match=message):
                generate(session, prompt, **options)
    with DecodeSession.open(tiny_bundle("block").folder) as session, pytest.raises(InputError, match="whole model"):
        generate(session, [1])
