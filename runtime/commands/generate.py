"""`python -m runtime generate`: continues prompts with a whole model, or chats with it."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from exporter.common import command, terminal
from exporter.common.errors import InputError
from runtime.commands.opening import add_session_arguments, naming_flags, open_session, open_text_bundle
from runtime.commands.prompts import Prompt, PromptReader, add_prompt_arguments, stdin_lines
from runtime.commands.sampling_arguments import add_sampling_arguments, read_sampler, read_stop_rules
from runtime.session import DecodeSession
from runtime.text.generation import generate
from runtime.text.sequence import GeneratedSequence

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_AT_ONCE = 8


def add_parser(commands: Any) -> None:
    """Adds the parser of `generate`."""
    parser = commands.add_parser(
        "generate", help="continue prompts or chat; print the text on stdout as it is generated"
    )
    add_session_arguments(parser)
    add_prompt_arguments(parser)
    add_sampling_arguments(parser)
    batch = f"prompts to run at once (default: all of them, at most {MOST_AT_ONCE})"
    parser.add_argument("--batch", type=int, metavar="N", help=batch)
    logprobs = "with --format json: the logarithms of each token's probability and of the N likeliest tokens'"
    parser.add_argument("--logprobs", type=int, metavar="N", help=logprobs)
    command.add_format(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Prints the generated text on stdout, then the number of tokens and the time on stderr."""
    bundle, tokenizer = open_text_bundle(arguments.bundle)
    reader = PromptReader(arguments, bundle, tokenizer)
    if arguments.logprobs is not None and arguments.format != "json":
        raise InputError("--logprobs: got it without --format json, expected both, since texts have no place for them")
    if reader.is_interactive and arguments.format == "json":
        raise InputError("--format json: got it for a chat on stdin, expected --prompt, --prompts or --messages")
    with naming_flags(arguments):
        sampler = read_sampler(arguments)
        rules = read_stop_rules(arguments, in_chat=arguments.chat or arguments.messages is not None)
        end_token_ids = bundle.manifest.end_token_ids

        def begin(prompt: Prompt) -> GeneratedSequence:
            return GeneratedSequence(prompt.tokens, sampler, rules, end_token_ids, tokenizer, arguments.logprobs)

        prompts = [] if reader.is_interactive else reader.read()
        sequences = [begin(prompt) for prompt in prompts]
        n_at_once = min(len(prompts) or 1, MOST_AT_ONCE) if arguments.batch is None else arguments.batch
        with open_session(arguments, max_batch=n_at_once) as session:
            if sampler.is_random:
                drawn = " (drawn; give --seed to have the same text again)" if arguments.seed is None else ""
                terminal.say(f"seed {sampler.seed}{drawn}")
            if reader.is_interactive:
                _chat(session, reader, begin)
                return
            started = time.perf_counter()
            if arguments.format == "json":
                for _ in generate(session, sequences):
                    pass
            else:
                _print_in_order(session, sequences)
            seconds = time.perf_counter() - started
    if arguments.format == "json":
        results = [_result(*pair, tokenizer) for pair in zip(prompts, sequences, strict=True)]
        terminal.print_json({"seed": sampler.seed if sampler.is_random else None, "results": results})
    _say_counts(sequences, seconds)


def _print_in_order(session: DecodeSession, sequences: Sequence[GeneratedSequence]) -> None:
    """Prints each text as it is generated, but none before the texts of the prompts before it are complete.

    Several texts have a heading each, as `head` and `tail` have for several files.
    """
    pieces, waiting, current = generate(session, sequences), [""] * len(sequences), 0
    _print_heading(current, len(sequences))
    for index, piece in pieces:
        waiting[index] += piece.text
        while current < len(sequences):
            print(waiting[current], end="", flush=True)
            waiting[current] = ""
            if not sequences[current].stopped_by:
                break
            print(flush=True)
            current += 1
            _print_heading(current, len(sequences))


def _print_heading(index: int, n_texts: int) -> None:
    if n_texts > 1 and index < n_texts:
        print(f"==> {index + 1} <==", flush=True)


def _chat(session: DecodeSession, reader: PromptReader, begin: Callable[[Prompt], GeneratedSequence]) -> None:
    """Answers the lines of stdin, one after the other, as one chat."""
    messages: list[dict] = reader.system_messages()
    if sys.stdin.isatty():
        terminal.say("type a message and Enter; end with Ctrl-D")
    for line in stdin_lines():
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line.strip()})
        started, sequence = time.perf_counter(), begin(reader.of_messages(messages))
        _print_in_order(session, [sequence])
        _say_counts([sequence], time.perf_counter() - started)
        messages.append({"role": "assistant", "content": sequence.text})


def _say_counts(sequences: Sequence[GeneratedSequence], seconds: float) -> None:
    n_tokens = sum(len(sequence.tokens) for sequence in sequences)
    n_prompt = sum(len(sequence.prompt) for sequence in sequences)
    reasons = sorted({str(sequence.stopped_by) for sequence in sequences})
    which = "prompt" if len(sequences) == 1 else f"{len(sequences)} prompts"
    terminal.say(f"{n_tokens} tokens in {seconds:.2f} s, {which} of {n_prompt}; stopped by {', '.join(reasons)}")


def _result(prompt: Prompt, sequence: GeneratedSequence, tokenizer: Tokenizer) -> dict:
    """Returns what the JSON document has for one prompt."""
    result: dict[str, Any] = {
        "prompt": prompt.text,
        "prompt_tokens": len(sequence.prompt),
        "text": sequence.text,
        "tokens": sequence.tokens,
        "stopped_by": sequence.stopped_by,
        "stop_string": sequence.stop_string,
    }
    if sequence.logprobs is not None:
        result["logprobs"] = [
            {
                "token": token,
                "text": tokenizer.decode([token], skip_special_tokens=False),
                "logprob": found.logprob,
                "top": [
                    {"token": other, "text": tokenizer.decode([other], skip_special_tokens=False), "logprob": value}
                    for other, value in found.top
                ],
            }
            for token, found in zip(sequence.tokens, sequence.logprobs, strict=True)
        ]
    return result
