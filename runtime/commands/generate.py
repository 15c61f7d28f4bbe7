"""`python -m runtime generate`: continues a prompt with a whole model."""

from __future__ import annotations

import argparse
import time
from typing import Any

from exporter.common import terminal
from runtime.commands.opening import add_session_arguments, naming_flags, open_session, open_text_bundle
from runtime.text.generation import Generation
from runtime.text.sampling import Sampler


def add_parser(commands: Any) -> None:
    """Adds the parser of `generate`."""
    parser = commands.add_parser("generate", help="continue a prompt; print the text on stdout as it is generated")
    add_session_arguments(parser)
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="raw text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="most tokens to add (default 64)")
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="X",
        help="0 takes the likeliest token (default without --top-k and --top-p, which need a temperature above 0)",
    )
    parser.add_argument("--top-k", type=int, metavar="N", help="draw from the N likeliest tokens")
    parser.add_argument(
        "--top-p", type=float, metavar="X", help="draw from the likeliest tokens that reach probability X"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed for the random draws (default 0)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Prints the generated text on stdout, then the number of tokens and the time on stderr."""
    from exporter.bundle.tokenizer import encode
    from runtime.text.stream import TextStream

    _, tokenizer = open_text_bundle(arguments.bundle)
    with naming_flags(arguments):
        sampler = Sampler(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)
        with open_session(arguments, max_batch=1) as session:
            generation = Generation(session, encode(tokenizer, arguments.prompt), arguments.max_new_tokens, sampler)
            stream, count, started = TextStream(tokenizer, generation.prompt), 0, time.perf_counter()
            for token in generation:
                count += 1
                print(stream.push(token), end="", flush=True)
            print(stream.flush(), flush=True)
            seconds = time.perf_counter() - started
    terminal.say(
        f"{count} tokens in {seconds:.2f} s, prompt of {len(generation.prompt)}; stopped by {generation.stopped_by}"
    )
