"""Streamed text: the pieces together are the text of all tokens, each piece comes early, and each costs the same."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from runtime.text.stream import HELD_CHARACTERS, PENDING_TOKENS, TextStream

CHARACTERS = "aé€😀 \n한\u200d中z"


class Bytes:
    """A tokenizer whose tokens are single UTF-8 bytes. It notes how many tokens each call decodes."""

    def __init__(self) -> None:
        self.decoded: list[int] = []

    def decode(self, tokens):
        self.decoded.append(len(tokens))
        return bytes(tokens).decode(errors="replace")


def byte_pieces() -> Tokenizer:
    """Tokens of one to three bytes, as byte-level BPE has them, and a special token, 0."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    rng = random.Random(0)
    pieces = {"".join(rng.choices(letters, k=size)) for size in (2, 3) for _ in range(300)}
    vocabulary = {text: index for index, text in enumerate(["<s>", *letters, *sorted(pieces)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece() -> Tokenizer:
    """A tokenizer with Llama 2's decoder: ▁ is a space, unknown characters are bytes, and one space is dropped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", "▁the", "▁cat", "s", "é"]
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def pieces(tokenizer, tokens, prompt=()) -> list[str]:
    stream = TextStream(tokenizer, prompt)
    return [*(stream.push(token) for token in tokens), stream.flush()]


def test_text_is_held_back_until_its_character_is_whole():
    assert pieces(Bytes(), "aé€z".encode()) == ["a", "", "é", "", "", "€", "z", ""]
    assert pieces(Bytes(), "é".encode()[:1]) == ["", "\ufffd"]


@pytest.mark.parametrize("seed", range(60))
def test_the_pieces_are_the_text_of_any_bytes(seed):
    """Whole characters, broken ones and random bytes in any order."""
    rng = random.Random(seed)
    parts = [rng.choice(CHARACTERS).encode() for _ in range(200)]
    parts = [part[: rng.randint(1, len(part))] if rng.random() < 0.2 else part for part in parts]
    parts = [rng.randbytes(rng.randint(1, 30)) if rng.random() < 0.1 else part for part in parts]
    text = b"".join(parts)
    assert "".join(pieces(Bytes(), text)) == text.decode(errors="replace")


@pytest.mark.parametrize("seed", range(20))
def test_the_pieces_are_the_text_of_any_byte_level_tokens(seed):
    rng, tokenizer = random.Random(seed), byte_pieces()
    tokens = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(300)]
    assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_each_token_costs_the_same_however_long_the_text_is():
    for text in (CHARACTERS.encode() * 200, b"\xff" * 2000, b"\xe2\x82" * 1000):
        tokenizer = Bytes()
        pieces(tokenizer, text, prompt=list(b"prompt" * 1000))
        assert max(tokenizer.decoded) <= 2 * (PENDING_TOKENS + 1)
        assert len(tokenizer.decoded) <= 4 * len(text) + 10


def test_a_text_of_special_tokens_costs_no_more():
    decoded = []

    class Special(Bytes):
        def decode(self, tokens):
            decoded.append(len(tokens))
            return ""

    assert pieces(Special(), range(500)) == [""] * 501
    assert max(decoded) <= 2 * (PENDING_TOKENS + 1)


@pytest.mark.parametrize("tokenizer", [Bytes(), byte_pieces(), sentencepiece()], ids=["bytes", "BPE", "SentencePiece"])
def test_of_invalid_bytes_only_the_last_are_held_back(tokenizer):
    invalid = {
        "Bytes": lambda: 0xFF,
        "Tokenizer": lambda: tokenizer.token_to_id("<0xFF>") or tokenizer.token_to_id("ÿ"),
    }[type(tokenizer).__name__]()
    stream, shown = TextStream(tokenizer), ""
    for count in range(1, 51):
        shown += stream.push(invalid)
        assert len(shown) >= count - HELD_CHARACTERS and set(shown) <= {"\ufffd"}
    assert shown + stream.flush() == "\ufffd" * 50


@pytest.mark.parametrize("prompt", [["<s>", "▁the"], ["▁the", "</s>", "<s>"], ["▁the", *["<s>"] * 40]], ids=str)
def test_the_space_after_a_prompt_is_kept(prompt):
    tokenizer = sentencepiece()
    prompt, tokens = ([tokenizer.token_to_id(piece) for piece in part] for part in (prompt, ["▁cat", "s", "▁the"]))
    assert pieces(tokenizer, tokens, prompt) == [" cat", "s", " the", ""]
    assert pieces(tokenizer, tokens, prompt[:0]) == ["cat", "s", " the", ""]


def test_only_the_first_space_of_a_text_is_dropped():
    tokenizer = sentencepiece()
    tokens = [tokenizer.token_to_id(piece) for piece in ("▁", "▁cat", "<s>", "▁▁", "s")]
    assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens) == " cat  s"


@pytest.mark.parametrize("seed", range(20))
def test_the_pieces_are_the_text_of_any_sentencepiece_tokens(seed):
    """Characters in bytes are whole here: a run of bytes with one that is broken has no text but U+FFFD."""
    rng, tokenizer = random.Random(seed), sentencepiece()
    tokens = []
    for _ in range(100):
        if rng.random() < 0.5:
            tokens += [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in rng.choice("€😀한中z").encode()]
        else:
            tokens.append(rng.randrange(tokenizer.get_vocab_size() - 6, tokenizer.get_vocab_size()))
    assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_a_broken_byte_after_a_character_in_bytes_does_not_change_what_was_returned():
    tokenizer = sentencepiece()
    bytes_of = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "é".encode() + b"\xff"]
    assert pieces(tokenizer, [*bytes_of, tokenizer.token_to_id("▁cat")]) == ["", "é", "", "\ufffd cat", ""]
