"""`generate` on a tiny model: prompts from everywhere, in order; chats; when a text ends; JSON; the seed."""

from __future__ import annotations

import io
import json
import re

import pytest

from runtime.commands.main import main as runtime
from tests.support.command_output import json_output, refusal
from tests.support.text_bundles import write_text_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return str(write_text_bundle(tmp_path_factory.mktemp("text")))


@pytest.fixture
def generate(bundle, capsys):
    """Runs the command and returns what it has on stdout and stderr."""

    def run(*arguments: object) -> tuple[str, str]:
        assert runtime(["generate", bundle, "--ignore-eos", *map(str, arguments)]) == 0
        return capsys.readouterr()

    return run


@pytest.fixture
def results(bundle, capsys):
    """Runs the command and returns the results of its JSON document."""

    def run(*arguments: object) -> list[dict]:
        options = ["--format", "json", "--ignore-eos"]
        return json_output(capsys, runtime, "generate", bundle, *options, *arguments)["results"]

    return run


def give_stdin(monkeypatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_prompts_of_a_file_come_back_in_order_each_as_if_alone(generate, results, tmp_path):
    lines = ["one", "second prompt", "é", "4", "five", "the sixth prompt is longest"]
    (tmp_path / "prompts.txt").write_bytes("\ufeff".encode() + "\r\n\n".join(lines).encode() + b"\n\n")
    options = ["--max-new-tokens", "9", "--stop", "\n"]
    alone = [results("--prompt", line, *options)[0] for line in lines]
    for batch in ([], ["--batch", "2"], ["--batch", "1"]):
        found = results("--prompts", tmp_path / "prompts.txt", *options, *batch)
        assert [result["prompt"] for result in found] == lines
        assert found == alone
    out, err = generate("--prompts", tmp_path / "prompts.txt", *options, "--batch", "3")
    assert out == "".join(f"==> {number} <==\n{result['text']}\n" for number, result in enumerate(alone, 1))
    assert "6 prompts of " in err


def test_prompts_come_from_everywhere(results, tmp_path, monkeypatch):
    (tmp_path / "prompts.jsonl").write_text(
        '"two\\nlines"\n{"prompt": "object"}\n{"messages": [{"role": "user", "content": "chat"}]}\n'
    )
    give_stdin(monkeypatch, b"from stdin\n")
    options = ["--prompt", "first", "--prompt", "-", "--prompts", tmp_path / "prompts.jsonl", "--max-new-tokens", "2"]
    found = results(*options)
    assert [result["prompt"] for result in found] == ["first", "from stdin\n", "two\nlines", "object", "chat"]
    assert [result["prompt_tokens"] for result in found] == [6, 12, 10, 7, len("<u:chat\na:")]
    give_stdin(monkeypatch, b"a\nb\n")
    assert [result["prompt"] for result in results("--prompts", "-", "--max-new-tokens", "1")] == ["a", "b"]


def test_a_begin_token_that_the_prompt_has_is_noticed_and_not_added_again(generate, results):
    assert results("--prompt", "<s>abc", "--max-new-tokens", "3")[0]["prompt_tokens"] == 4
    out, err = generate("--prompt", "<s>abc", "--max-new-tokens", "3")
    assert "prompt: it begins with <s> already" in err
    assert out == generate("--prompt", "abc", "--max-new-tokens", "3")[0]
    assert results("--prompt", "<s><s>abc", "--max-new-tokens", "3")[0]["prompt_tokens"] == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "prompt: got none, expected --prompt TEXT"),
        (["--prompts", "empty"], "prompt: got none"),
        (["--prompt", "-", "--prompts", "-"], "stdin: got - for 2 arguments"),
        (["--prompts", "latin"], "latin: it is not UTF-8 text at byte 1"),
        (["--prompts", "missing"], "missing: No such file"),
        (["--prompts", "bad.jsonl"], "bad.jsonl line 2: it is not JSON"),
        (["--prompts", "number.jsonl"], "number.jsonl line 1: got 5"),
        (["--messages", "latin"], "latin: it is not UTF-8"),
        (["--messages", "empty"], "empty: it is not JSON"),
        (["--messages", "number.jsonl"], "messages: got 5, expected a list"),
        (["--messages", "robot"], "no robots"),
        (["--system", "x", "--prompt", "y"], "--system: got a system message without --chat"),
        (["--prompt", "x", "--logprobs", "2"], "--logprobs: got it without --format json"),
        (["--chat", "--format", "json"], "--format json: got it for a chat on stdin"),
        (["--prompt", "x", "--logit-bias", "5"], "--logit-bias: got '5', expected ID=X"),
        (["--prompt", "x", "--logit-bias", "999=1"], "logit_bias: got token 999, expected 0 to 257"),
        (["--prompt", "x", "--stop", ""], "stop: got ['']"),
        (["--prompt", "x", "--stop-token=-1"], "stop_token_ids is --stop-token"),
        (["--prompt", "x", "--min-p", "2"], "min_p is --min-p"),
        (
            ["--prompt", "x", "--temperature", "0", "--min-p", "0.1"],
            "which always takes the likeliest token, with min_p",
        ),
        (["--prompt", "x", "--batch", "0"], "max_batch: got 0"),
        (["--prompt", "x", "--threads", "0"], "threads: got 0"),
        (["--prompt", "x" * 200, "--cache-capacity", "64"], "it has 201 tokens and the cache holds 64"),
        (["--prompts", "long", "--cache-capacity", "64"], "prompt 2: it has 201 tokens"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_in_one_line(bundle, capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_text("\n \n")
    (tmp_path / "latin").write_bytes(b"x\xe9")
    (tmp_path / "bad.jsonl").write_text('"x"\n{\n')
    (tmp_path / "number.jsonl").write_text("5\n")
    (tmp_path / "long").write_text(f"x\n{'x' * 200}\n")
    (tmp_path / "robot").write_text('[{"role": "robot", "content": "x"}]')
    assert message in refusal(capsys, runtime, "generate", bundle, *arguments)


# --- chats -----------------------------------------------------------------------------------------------------------


def test_a_chat_is_rendered_with_the_models_template_and_has_one_begin_token(results, tmp_path):
    (tmp_path / "messages.json").write_text('[{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]')
    from_file = results("--messages", tmp_path / "messages.json", "--max-new-tokens", "5")
    from_flags = results("--chat", "--system", "S", "--prompt", "U", "--max-new-tokens", "5")
    assert from_file == from_flags and from_file[0]["prompt_tokens"] == len("<s:S\nu:U\na:")
    raw = results("--prompt", "s:S\nu:U\na:", "--max-new-tokens", "5")
    assert raw[0]["tokens"] == from_flags[0]["tokens"]


def test_a_chat_on_stdin_answers_each_line_and_remembers_the_others(generate, results, monkeypatch, tmp_path):
    give_stdin(monkeypatch, b"first\n\nsecond\n")
    options = ["--max-new-tokens", "6", "--stop", "\n"]
    out, err = generate("--chat", *options)
    first = results("--chat", "--prompt", "first", *options)[0]["text"]
    messages = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "second"},
    ]
    (tmp_path / "messages.json").write_text(json.dumps(messages))
    second = results("--messages", tmp_path / "messages.json", *options)[0]["text"]
    assert out == f"{first}\n{second}\n" and err.count("stopped by") == 2


def test_a_model_without_a_chat_template_is_refused(capsys, tmp_path):
    bundle = write_text_bundle(tmp_path, template=None)
    error = refusal(capsys, runtime, "generate", bundle, "--chat", "--prompt", "x")
    assert "it has no chat template" in error


# --- how tokens are drawn, and when a text ends ----------------------------------------------------------------------


def test_a_stop_string_over_several_tokens_stops(results, generate):
    whole = results("--prompt", "abc", "--max-new-tokens", "24")[0]
    text = whole["text"]
    start = next(index for index in range(3, len(text)) if "\ufffd" not in text[index : index + 3])
    stop = text[start : start + 3]
    cut = results("--prompt", "abc", "--max-new-tokens", "24", "--stop", stop)[0]
    assert cut["text"] == text[: text.index(stop)] and cut["stopped_by"] == "stop string"
    assert cut["stop_string"] == stop and cut["tokens"] == whole["tokens"][: len(cut["tokens"])]
    assert generate("--prompt", "abc", "--max-new-tokens", "24", "--stop", stop)[0] == f"{cut['text']}\n"


def test_a_stop_token_stops_and_an_end_token_can_be_ignored(results, bundle, capsys):
    whole = results("--prompt", "abc", "--max-new-tokens", "12", "--logit-bias", "1=100")[0]
    assert whole["tokens"] == [1] * 12 and whole["stopped_by"] == "max_new_tokens"
    document = json_output(
        capsys, runtime, "generate", bundle, "--prompt", "abc", "--logit-bias", "1=100", "--format", "json"
    )
    assert document["results"][0]["stopped_by"] == "end token" and document["results"][0]["tokens"] == []
    free = results("--prompt", "abc", "--max-new-tokens", "12")[0]["tokens"]
    cut = results("--prompt", "abc", "--max-new-tokens", "12", "--stop-token", free[4])[0]
    assert cut["tokens"] == free[: free.index(free[4])] and cut["stopped_by"] == "stop token"


def test_a_seed_is_drawn_anew_and_printed_and_gives_the_same_text_again(generate):
    options = ["--prompt", "abc", "--temperature", "2", "--max-new-tokens", "30"]
    (first, err), (second, _) = generate(*options), generate(*options)
    assert first != second
    seed = re.search(r"seed (\d+) \(drawn; give --seed", err)[1]
    again, err = generate(*options, "--seed", seed)
    assert again == first and f"seed {seed}\n" in err
    assert "seed" not in generate("--prompt", "abc", "--max-new-tokens", "3")[1]


def test_logprobs_have_each_token_and_the_likeliest(results):
    (result,) = results("--prompt", "abc", "--max-new-tokens", "4", "--logprobs", "3")
    assert [found["token"] for found in result["logprobs"]] == result["tokens"]
    for found in result["logprobs"]:
        assert found["top"][0] == {key: found[key] for key in ("token", "text", "logprob")} and len(found["top"]) == 3
        assert found["logprob"] < 0 and found["top"][0]["logprob"] >= found["top"][1]["logprob"]


def test_penalties_change_the_text(results):
    plain, penalized = (
        results("--prompt", "aaaa", "--max-new-tokens", "16", *options)[0]["tokens"]
        for options in ([], ["--repetition-penalty", "5", "--presence-penalty", "2", "--frequency-penalty", "2"])
    )
    assert len(set(penalized)) > len(set(plain))
