"""One text while it is generated, without any session: scripted logits in, tokens and text out."""

from __future__ import annotations

import numpy as np
import pytest

from exporter.common.errors import InputError
from runtime.text.sampling import Sampler
from runtime.text.sequence import GeneratedSequence
from runtime.text.stopping import StopRules

END = 0


class Letters:
    """A tokenizer whose tokens are the letters of ASCII."""

    def decode(self, tokens):
        return "".join(map(chr, tokens))


def logits(token: int) -> np.ndarray:
    return np.eye(128, dtype=np.float32)[token]


def run(text: str, tokenizer=Letters(), end=(END,), room: int = 1000, n_logprobs=None, **rules):  # noqa: B008
    """Feeds the tokens of a text, then the end token, until the sequence ends. Returns the sequence and its pieces."""
    rules = StopRules(**{"max_new_tokens": 50, **rules})
    sequence, pieces = GeneratedSequence([ord("?")], Sampler(), rules, end, tokenizer, n_logprobs), []
    for count, token in enumerate([*map(ord, text), END], 1):
        pieces.append(sequence.take(logits(token), has_room=count < room))
        if sequence.stopped_by:
            break
    assert "".join(piece.text for piece in pieces) == sequence.text
    assert [piece.token for piece in pieces if piece.token is not None] == sequence.tokens
    return sequence, pieces


@pytest.mark.parametrize(
    ("rules", "text", "n_tokens", "stopped_by"),
    [
        ({}, "one two", 7, "end token"),
        ({"max_new_tokens": 3}, "one", 3, "max_new_tokens"),
        ({"room": 4}, "one ", 4, "cache_capacity"),
        ({"stop": ["tw"]}, "one ", 6, "stop string"),
        ({"stop": ["two"]}, "one ", 7, "stop string"),
        ({"stop": ["twos"]}, "one two", 7, "end token"),
        ({"stop": ["one two!"], "max_new_tokens": 5}, "one t", 5, "max_new_tokens"),
        ({"stop": ["t"], "max_new_tokens": 5}, "one ", 5, "stop string"),
        ({"stop_token_ids": [ord("t")]}, "one ", 4, "stop token"),
        ({"ignore_eos": True, "max_new_tokens": 8}, "one two\0", 8, "max_new_tokens"),
        ({"ignore_eos": True, "stop_token_ids": [END]}, "one two", 7, "stop token"),
        ({"end": ()}, "one two\0", 8, None),
    ],
    ids=str,
)
def test_why_and_where_a_text_ends(rules, text, n_tokens, stopped_by):
    sequence, _ = run("one two", **rules)
    assert (sequence.text, len(sequence.tokens), sequence.stopped_by) == (text, n_tokens, stopped_by)


def test_the_next_step_gets_the_prompt_and_then_each_new_token():
    sequence = GeneratedSequence([5, 6], Sampler(), StopRules(5), ())
    assert sequence.next_tokens.tolist() == [5, 6]
    sequence.take(logits(9))
    assert sequence.next_tokens.tolist() == [9] and sequence.text == ""


def test_logprobs_belong_to_the_tokens_of_the_text():
    sequence, pieces = run("ab", n_logprobs=1)
    assert [found.top[0][0] for found in sequence.logprobs] == sequence.tokens == [ord("a"), ord("b")]
    assert pieces[0].logprobs == sequence.logprobs[0] and pieces[-1].logprobs is None
    assert run("ab")[0].logprobs is None


def test_penalties_see_the_prompt_and_the_new_tokens():
    flat = np.zeros(4, np.float32)
    flat[:3] = 3, 2, 1
    sequence = GeneratedSequence([0], Sampler(repetition_penalty=4.0), StopRules(3), ())
    assert [sequence.take(flat).token for _ in range(3)] == [1, 2, 0]


def test_sequences_with_one_sampler_draw_the_same():
    sampler, even = Sampler(temperature=1.0, seed=5), np.zeros(50, np.float32)
    first, second = (GeneratedSequence([1], sampler, StopRules(20), ()) for _ in range(2))
    for _ in range(20):
        first.take(even), second.take(even)
    assert first.tokens == second.tokens and len(set(first.tokens)) > 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rules": StopRules(5, ["END"])}, "stop: got .* without a tokenizer"),
        ({"n_logprobs": -1}, "logprobs: got -1, expected a whole number from 0 to 100"),
        ({"n_logprobs": 101}, "logprobs: got 101"),
        ({"n_logprobs": True}, "logprobs: got True"),
        ({"prompt": np.zeros((1, 2), np.int64)}, r"prompt: got array\(.*, expected token ids"),
    ],
    ids=str,
)
def test_bad_requests_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        GeneratedSequence(
            **{"prompt": [1], "sampler": Sampler(), "rules": StopRules(5), "end_token_ids": (), **options}
        )
