"""What a tokenizer.json says of the text, and what it says of the program that saved it."""

from __future__ import annotations

import dataclasses
import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from exporter.bundle.tokenizer import encode, load_tokenizer, open_tokenizer

PROMPT = "ab" * 20


def make_tokenizer(begin: str | None = None) -> Tokenizer:
    """A tokenizer over the bytes, with one merge. `begin` is put before each text."""
    vocabulary = {"<s>": 0, "</s>": 1, "ab": 2}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary.setdefault(character, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(f"{begin} $A", special_tokens=[(begin, 0)])
    return tokenizer


def truncated(tokenizer: Tokenizer) -> None:
    tokenizer.enable_truncation(max_length=8)


def padded(tokenizer: Tokenizer) -> None:
    tokenizer.enable_padding(length=32, pad_id=1, pad_token="</s>")


def truncated_on_the_left_and_padded(tokenizer: Tokenizer) -> None:
    tokenizer.enable_truncation(max_length=8, stride=2, direction="left")
    tokenizer.enable_padding(direction="left", pad_id=1, pad_token="</s>", pad_to_multiple_of=32)


def dropped(tokenizer: Tokenizer) -> None:
    tokenizer.model.dropout = 1.0


@pytest.mark.parametrize("setting", [truncated, padded, truncated_on_the_left_and_padded, dropped])
@pytest.mark.parametrize("text", [PROMPT, "ab"], ids=["long", "short"])
def test_settings_of_the_program_that_saved_a_tokenizer_do_not_change_a_prompt(tmp_path, setting, text):
    tokenizer = make_tokenizer(begin="<s>")
    expected = tokenizer.encode(text).ids
    setting(tokenizer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids != expected or text == "ab"
    assert load_tokenizer(tmp_path / "tokenizer.json").encode(text).ids == expected


def test_a_bundles_tokenizer_is_opened_without_them(tiny_bundle, tmp_path):
    tokenizer = make_tokenizer()
    truncated_on_the_left_and_padded(tokenizer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    bundle = tiny_bundle("model")
    manifest = dataclasses.replace(bundle.manifest, files={**bundle.manifest.files, "tokenizer.json": {}})
    opened = open_tokenizer(dataclasses.replace(bundle, folder=tmp_path, manifest=manifest))
    assert encode(opened, PROMPT) == [2] * 20 and encode(opened, "ab") == [2]


@pytest.mark.parametrize("post_processor", [True, False], ids=["begins", "plain"])
@pytest.mark.parametrize(
    "config",
    [{}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}, {"model_max_length": 4}],
    ids=str,
)
def test_a_prompts_tokens_are_those_of_transformers(tmp_path, post_processor, config):
    """tokenizer.json decides what surrounds a text; tokenizer_config.json's lengths and switches do not."""
    transformers = pytest.importorskip("transformers")
    tokenizer = make_tokenizer(begin="<s>" if post_processor else None)
    truncated_on_the_left_and_padded(tokenizer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **config}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert encode(load_tokenizer(tmp_path / "tokenizer.json"), PROMPT) == theirs(PROMPT).input_ids
