"""Stop strings and stop tokens: found across pieces, and nothing of them is shown."""

from __future__ import annotations

import random

import pytest

from exporter.common.errors import InputError
from runtime.text.stopping import StopRules, StopStrings


def pushed(stop: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    strings = StopStrings(stop)
    return [*(strings.push(piece) for piece in pieces), strings.flush()], strings.found


@pytest.mark.parametrize(
    ("stop", "pieces", "expected", "found"),
    [
        (["END"], ["one E", "N", "D two"], ["one ", "", "", ""], "END"),
        (["END"], ["one E", "N", "one"], ["one ", "", "ENone", ""], None),
        (["END"], ["EN"], ["", "EN"], None),
        (["\n\n"], ["a\n", "b\n", "\nc"], ["a", "\nb", "", ""], "\n\n"),
        (["aab"], ["a", "a", "a", "b", "c"], ["", "", "a", "", "", ""], "aab"),
        (["bc", "abcd"], ["xa", "b", "c", "d"], ["x", "", "a", "", ""], "bc"),
        (["bc", "b"], ["abc"], ["a", ""], "bc"),
        ([], ["a", ""], ["a", "", ""], None),
    ],
)
def test_a_stop_string_is_found_across_pieces(stop, pieces, expected, found):
    assert pushed(stop, pieces) == (expected, found)


@pytest.mark.parametrize("seed", range(30))
def test_however_a_text_is_cut_it_ends_before_its_first_stop_string(seed):
    rng = random.Random(seed)
    text = "".join(rng.choices("ab", k=40))
    stop = ["".join(rng.choices("ab", k=rng.randint(3, 6))) for _ in range(2)]
    by_characters, _ = pushed(stop, list(text))
    ends = min((text.index(item) + len(item), text.index(item)) for item in [*stop, text] if item in text)
    assert "".join(by_characters) == (text[: ends[1]] if any(item in text for item in stop) else text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": "END"}, "stop: got 'END', expected a list"),
        ({"stop": [""]}, "at least one character"),
        ({"stop": [1]}, "stop: got"),
        ({"stop_token_ids": 5}, "stop_token_ids: got 5"),
        ({"stop_token_ids": [-1]}, "stop_token_ids: got"),
        ({"stop_token_ids": [True]}, "stop_token_ids: got"),
        ({"max_new_tokens": 0}, "max_new_tokens: got 0"),
    ],
    ids=str,
)
def test_bad_rules_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        StopRules(**{"max_new_tokens": 5, **options})
