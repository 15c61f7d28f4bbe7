"""`python -m runtime decode`: runs a bundle on random input and prints the time of each step."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
from rich.table import Table

from exporter.common import command, terminal
from exporter.common.errors import InputError
from exporter.spec.dtypes import numpy_dtype
from runtime.commands.opening import add_session_arguments, naming_flags, open_session
from runtime.session import DecodeSession


def add_parser(commands: Any) -> None:
    """Adds the parser of `decode`."""
    parser = commands.add_parser("decode", help="prefill and decode on random input; print the time of each step")
    add_session_arguments(parser)
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences (default 1)")
    parser.add_argument("--prompt-len", type=int, default=16, metavar="N", help="tokens to prefill (default 16)")
    parser.add_argument("--steps", type=int, default=16, metavar="N", help="tokens to decode after them (default 16)")
    command.add_format(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Times the steps and prints a table, or JSON."""
    for name in ("batch", "prompt_len", "steps"):
        if getattr(arguments, name) < 1:
            raise InputError(f"--{name.replace('_', '-')}: got {getattr(arguments, name)}, expected at least 1")
    with naming_flags(arguments), open_session(arguments, arguments.batch) as session:
        needed = arguments.prompt_len + arguments.steps
        if needed > session.cache_capacity:
            raise InputError(
                f"decode: --prompt-len {arguments.prompt_len} and --steps {arguments.steps} need {needed} tokens "
                f"of cache, a sequence has {session.cache_capacity}; lower them or give --cache-capacity {needed}"
            )
        result = time_steps(session, arguments.batch, arguments.prompt_len, arguments.steps)
    if arguments.format == "json":
        terminal.print_json(result)
        return
    title = f"{result['unit']}, {result['dtype']}, {result['backend']}"
    table = Table("", "tokens", "median", "rate", title=title, title_justify="left")
    for name in ("prefill", "decode"):
        part = result[name]
        table.add_row(name, f"{part['tokens']:,}", f"{part['median_ms']:.2f} ms", f"{part['tok_s']:,.1f} tok/s")
    terminal.stderr.print(table)
    terminal.say(f"lengths {result['lengths']} of {result['cache_capacity']}; outputs are finite")


def time_steps(session: DecodeSession, batch: int, prompt_len: int, steps: int) -> dict:
    """Prefills, then decodes `steps` times. A model gets its own likeliest tokens, other units random hidden states.

    Returns:
        What ran, and for prefill and decode: tokens, median milliseconds, tokens per second.
    """
    rng = np.random.default_rng(0)
    config, is_model = session.manifest.config, session.manifest.unit.kind == "model"

    def draw(width: int) -> np.ndarray:
        if is_model:
            return rng.integers(0, config.vocab_size, (batch, width))
        return rng.standard_normal((batch, width, config.hidden_size)).astype(numpy_dtype(session.manifest.dtype))

    started = time.perf_counter()
    output = session.prefill(draw(prompt_len))
    prefill_ms = (time.perf_counter() - started) * 1e3
    times_ms = []
    for _ in range(steps):
        x = output.argmax(-1) if is_model else draw(1)
        started = time.perf_counter()
        output = session.decode(x)
        times_ms.append((time.perf_counter() - started) * 1e3)
    decode_ms = statistics.median(times_ms)
    lengths = session.lengths
    assert isinstance(lengths, np.ndarray), "the session is used with rows"

    def part(n_steps: int, step_tokens: int, median_ms: float) -> dict:
        return {"tokens": step_tokens * n_steps, "median_ms": median_ms, "tok_s": step_tokens / median_ms * 1e3}

    return {
        "unit": str(session.manifest.unit),
        "dtype": session.manifest.dtype,
        "backend": session.description,
        "cache_capacity": session.cache_capacity,
        "lengths": lengths.tolist(),
        "prefill": part(1, batch * prompt_len, prefill_ms),
        "decode": part(steps, batch, decode_ms),
    }
