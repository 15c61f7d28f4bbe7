"""Sampling: the distribution that each setting draws from, under a seed; and the logarithms of probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from exporter.common.errors import InputError
from runtime.text.sampling import Sampler, TokenHistory, TokenLogprobs

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
    *({"seed": value} for value in (-1, 1.5, "7", True)),
    *({"min_p": value} for value in (0, 1.5, float("nan"), "0.5", True)),
    *({"repetition_penalty": value} for value in (0, -1, float("inf"), "1", None, True)),
    *({name: value} for name in ("presence_penalty", "frequency_penalty") for value in (-2.1, 2.1, float("nan"), None)),
    *({"logit_bias": value} for value in (None, [1], {"1": 1}, {-1: 1}, {1: float("inf")}, {1: "2"}, {True: 1})),
]


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=str)
def test_bad_sampling_options_are_refused(options):
    with pytest.raises(InputError, match=f"^{next(iter(options))}: got "):
        Sampler(**options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"min_p": 0.1}, "min_p"),
        ({"top_k": 5, "top_p": 0.9, "min_p": 0.1}, "top_k, top_p and min_p"),
        ({"top_k": 5}, "top_k"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5, "top_p": 0.9}, "top_k and top_p"),
    ],
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


def test_a_sampler_takes_numbers_of_every_type():
    logits = np.random.default_rng(0).standard_normal(50).astype(np.float32)
    odd = Sampler(np.float32(0.5), torch.tensor(7), np.float64(0.75), np.int64(3))
    assert [odd(logits) for _ in range(9)] == [s(logits) for s in [Sampler(0.5, 7, 0.75, 3)] for _ in range(9)]
    for wrong in ({"top_k": np.True_}, {"seed": np.float64(3)}, {"temperature": np.True_}):
        with pytest.raises(InputError, match="got"):
            Sampler(**wrong)


# --- against transformers --------------------------------------------------------------------------------------------


class Recorder:
    """Takes the place of a sampler's random generator and notes the distribution that it draws from."""

    def choice(self, tokens, p):
        self.distribution = dict(zip(map(int, tokens), p, strict=True))
        return tokens[0]


def distribution(logits: np.ndarray, history: TokenHistory | None = None, **options) -> np.ndarray:
    sampler, recorder = Sampler(**{"temperature": 1.0, **options}), Recorder()
    sampler._rng = recorder
    sampler(logits, history)
    return np.array([recorder.distribution.get(token, 0.0) for token in range(len(logits))])


def transformers_distribution(logits: np.ndarray, prompt: list[int], processors) -> np.ndarray:
    scores, ids = torch.tensor(logits[None]), torch.tensor([prompt])
    for processor in processors:
        scores = processor(ids, scores)
    return scores.double().softmax(-1)[0].numpy()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"temperature": 0.7}, [("TemperatureLogitsWarper", 0.7)]),
        ({"min_p": 0.2}, [("MinPLogitsWarper", 0.2)]),
        ({"repetition_penalty": 1.3}, [("RepetitionPenaltyLogitsProcessor", 1.3)]),
        ({"repetition_penalty": 0.8}, [("RepetitionPenaltyLogitsProcessor", 0.8)]),
        (
            {"repetition_penalty": 1.3, "temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.1},
            [
                ("RepetitionPenaltyLogitsProcessor", 1.3),
                ("TemperatureLogitsWarper", 1.5),
                ("TopKLogitsWarper", 20),
                ("TopPLogitsWarper", 0.9),
                ("MinPLogitsWarper", 0.1),
            ],
        ),
        ({"logit_bias": {3: 2.0, 5: -100.0}}, [("SequenceBiasLogitsProcessor", {(3,): 2.0, (5,): -100.0})]),
    ],
    ids=["temperature", "min_p", "repetition above 1", "repetition below 1", "all", "bias"],
)
def test_the_distribution_is_that_of_transformers(seed, options, names):
    import transformers

    rng = np.random.default_rng(seed)
    logits, prompt = (rng.standard_normal(50) * 3).astype(np.float32), rng.integers(0, 50, 12).tolist()
    expected = transformers_distribution(logits, prompt, [getattr(transformers, name)(value) for name, value in names])
    got = distribution(logits, TokenHistory.after(prompt), **options)
    np.testing.assert_allclose(got, expected, atol=1e-6)  # float32 scores there
    assert ((got > 0) == (expected > 0)).all()


def test_presence_and_frequency_count_the_new_tokens_only():
    """The definition in OpenAI's API: logit − count · frequency − (count > 0) · presence."""
    history = TokenHistory.after([0, 1, 1])
    for token in (2, 2, 3):
        history.add(token)
    logits = np.zeros(5, np.float32)
    got = distribution(logits, history, presence_penalty=0.5, frequency_penalty=0.25)
    expected = np.exp([0, 0, -0.5 - 0.5, -0.5 - 0.25, 0])
    np.testing.assert_allclose(got, expected / expected.sum(), rtol=1e-6)
    assert not logits.any(), "the caller's logits stay as they are"


def test_penalties_and_bias_decide_greedy_text_too():
    history = TokenHistory.after([0])
    assert Sampler()(LOGITS, history) == 0
    assert Sampler(repetition_penalty=5.0)(LOGITS, history) == 1
    assert Sampler(logit_bias={3: 10})(LOGITS) == 3
    history.add(1)
    assert Sampler(repetition_penalty=5.0, presence_penalty=2.0)(LOGITS, history) == 2


def test_a_bias_of_a_token_that_the_model_lacks_is_refused():
    with pytest.raises(InputError, match="logit_bias: got token 4, expected 0 to 3"):
        Sampler(logit_bias={4: 1.0})(LOGITS)


def test_without_a_seed_a_new_one_is_drawn_and_can_be_read():
    seeds = {Sampler(temperature=1.0, seed=None).seed for _ in range(20)}
    assert len(seeds) == 20 and draws(seeds.pop()) != draws(seeds.pop())
    sampler = Sampler(temperature=1.0, seed=None)
    assert [sampler(LOGITS) for _ in range(30)] == draws(sampler.seed)


def test_logprobs_are_the_models_own():
    found = TokenLogprobs.of(LOGITS + 7, token=3, n_top=2)
    assert found.logprob == pytest.approx(np.log(0.05), abs=1e-6)
    assert [token for token, _ in found.top] == [0, 1]
    np.testing.assert_allclose([value for _, value in found.top], np.log([0.5, 0.3]), atol=1e-6)
    assert TokenLogprobs.of(LOGITS, 0, 0).top == ()
