"""`python -m runtime`: decode (time a bundle on random input), generate (text from a whole model), report and doctor."""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np
from rich.markup import escape
from rich.table import Table

from exporter.bundle.bundle import VERIFY, Bundle
from exporter.bundle.engine_records import read_records
from exporter.common import command, terminal
from exporter.common.errors import InputError
from exporter.spec.dtypes import numpy_dtype
from exporter.spec.limits import DEFAULT_CACHE_CAPACITY
from runtime.backends import BACKENDS
from runtime.session import DecodeSession
from runtime.text.generation import Generation
from runtime.text.sampling import Sampler

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="blockline-run", description="Decode from a bundle with an in-place KV cache."
    )
    commands = parser.add_subparsers(title="commands", required=True, parser_class=command.CommandParser)

    decode = commands.add_parser("decode", help="prefill and decode on random input; print the time of each step")
    _add_session_arguments(decode)
    decode.add_argument("--batch", type=int, default=1, metavar="N", help="sequences (default 1)")
    decode.add_argument("--prompt-len", type=int, default=16, metavar="N", help="tokens to prefill (default 16)")
    decode.add_argument("--steps", type=int, default=16, metavar="N", help="tokens to decode after it (default 16)")
    command.add_format(decode)
    decode.set_defaults(run=_decode)

    generate = commands.add_parser("generate", help="continue a prompt; text goes to stdout as it appears")
    _add_session_arguments(generate)
    generate.add_argument("--prompt", required=True, metavar="TEXT", help="raw text to continue")
    generate.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="most tokens to add (default 64)")
    generate.add_argument(
        "--temperature", type=float, metavar="X", help="0 is greedy: the default, but refused with --top-k or --top-p"
    )
    generate.add_argument("--top-k", type=int, metavar="N", help="draw from the N likeliest tokens")
    generate.add_argument(
        "--top-p", type=float, metavar="X", help="draw from the likeliest tokens that reach probability X"
    )
    generate.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
    generate.set_defaults(run=_generate)

    report = commands.add_parser(
        "report", help="what a bundle is, what was measured of it, and what it says to a prompt"
    )
    _add_session_arguments(report)
    report.add_argument("--prompt", required=True, metavar="TEXT", help="raw text to continue")
    report.add_argument("--max-new-tokens", type=int, default=16, metavar="N", help="most tokens to add (default 16)")
    report.set_defaults(run=_report)

    doctor = commands.add_parser(
        "doctor", help="what is installed, what really works here, and how to mend what does not"
    )
    command.add_format(doctor)
    doctor.set_defaults(run=_doctor)
    return parser


def _add_session_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", help="the bundle's folder")
    parser.add_argument(
        "--backend", default="auto", metavar="NAME", help=f"one of {', '.join(BACKENDS)} (default auto)"
    )
    parser.add_argument(
        "--provider", metavar="NAME", help="onnxruntime execution provider (default CPUExecutionProvider)"
    )
    parser.add_argument(
        "--cache-capacity",
        type=int,
        metavar="N",
        help=f"tokens a sequence can hold (default {DEFAULT_CACHE_CAPACITY}, at most the export's positions)",
    )
    parser.add_argument(
        "--verify",
        choices=VERIFY,
        default="graph",
        help="checksums to take before anything runs: the graph's (default), or those of weights, tokenizer and engine too",
    )


def _open(arguments: argparse.Namespace, max_batch: int) -> DecodeSession:
    session = DecodeSession.open(
        arguments.bundle,
        arguments.backend,
        arguments.provider,
        max_batch=max_batch,
        cache_capacity=arguments.cache_capacity,
        verify=arguments.verify,
    )
    terminal.say(f"backend: {session.description}; cache: {max_batch} × {session.cache_capacity} tokens")
    return session


def _decode(arguments: argparse.Namespace) -> None:
    for name in ("batch", "prompt_len", "steps"):
        if getattr(arguments, name) < 1:
            raise InputError(f"--{name.replace('_', '-')}: got {getattr(arguments, name)}, expected at least 1")
    with _open(arguments, arguments.batch) as session:
        needed = arguments.prompt_len + arguments.steps
        if needed > session.cache_capacity:
            raise InputError(
                f"decode: --prompt-len {arguments.prompt_len} and --steps {arguments.steps} need {needed} tokens of cache, a sequence has "
                f"{session.cache_capacity}; lower them or give --cache-capacity {needed}"
            )
        result = _time_steps(session, arguments.batch, arguments.prompt_len, arguments.steps)
    if arguments.format == "json":
        terminal.print_json(result)
        return
    table = Table(
        "",
        "tokens",
        "median",
        "rate",
        title=f"{result['unit']}, {result['dtype']}, {result['backend']}",
        title_justify="left",
    )
    for name in ("prefill", "decode"):
        part = result[name]
        table.add_row(name, f"{part['tokens']:,}", f"{part['median_ms']:.2f} ms", f"{part['tok_s']:,.1f} tok/s")
    terminal.stderr.print(table)
    terminal.say(f"lengths {result['lengths']} of {result['cache_capacity']}; outputs are finite")


def _time_steps(session: DecodeSession, batch: int, prompt_len: int, steps: int) -> dict:
    """Prefills, then decodes `steps` times; times are medians in milliseconds, outputs fed back where they are tokens."""
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
    return {
        "unit": str(session.manifest.unit),
        "dtype": session.manifest.dtype,
        "backend": session.description,
        "cache_capacity": session.cache_capacity,
        "lengths": lengths.tolist(),
        "prefill": {
            "tokens": batch * prompt_len,
            "median_ms": prefill_ms,
            "tok_s": batch * prompt_len / prefill_ms * 1e3,
        },
        "decode": {"tokens": batch * steps, "median_ms": decode_ms, "tok_s": batch / decode_ms * 1e3},
    }


def _generate(arguments: argparse.Namespace) -> None:
    from exporter.bundle.tokenizer import encode
    from runtime.text.stream import TextStream

    _, tokenizer = _open_text_bundle(arguments.bundle)
    sampler = Sampler(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)
    with _open(arguments, max_batch=1) as session:
        generation = Generation(session, encode(tokenizer, arguments.prompt), arguments.max_new_tokens, sampler)
        stream, count, started = TextStream(tokenizer), 0, time.perf_counter()
        for token in generation:
            count += 1
            print(stream.push(token), end="", flush=True)
        print(stream.flush(), flush=True)
        seconds = time.perf_counter() - started
    terminal.say(
        f"{count} tokens in {seconds:.2f} s, prompt of {len(generation.prompt)}; stopped by {generation.stopped_by}"
    )


def _open_text_bundle(folder: str) -> tuple[Bundle, Tokenizer]:
    from exporter.bundle.tokenizer import open_tokenizer

    bundle = Bundle.open(folder)
    if bundle.manifest.has_random_weights:
        raise InputError(
            f"bundle {folder}: its weights are random, its text would mean nothing; export it from a --checkpoint"
        )
    return bundle, open_tokenizer(bundle)


def _report(arguments: argparse.Namespace) -> None:
    from exporter.bundle.tokenizer import encode

    bundle, tokenizer = _open_text_bundle(arguments.bundle)
    manifest, validation = bundle.manifest, bundle.read_report().get("validation")
    with _open(arguments, max_batch=1) as session:
        generation = Generation(session, encode(tokenizer, arguments.prompt), arguments.max_new_tokens, Sampler())
        started = time.perf_counter()
        text = tokenizer.decode(list(generation))
        seconds = time.perf_counter() - started
        table = Table.grid(padding=(0, 2))
        table.add_row("bundle", str(bundle.folder))
        table.add_row(
            "unit",
            f"{manifest.unit}, {manifest.dtype}, {sum(f['size_bytes'] for f in manifest.files.values()) / 2**20:,.0f} MiB",
        )
        if validation:
            table.add_row("validated", _verdict(validation))
        table.add_row("backend", f"{session.description}, cache of {session.cache_capacity} tokens")
        table.add_row(
            "speed",
            f"{len(generation.prompt)} + {session.lengths[0] - len(generation.prompt)} tokens in {seconds:.2f} s",
        )
        table.add_row("prompt", arguments.prompt)
        for engine in read_records(bundle.folder):
            table.add_row(
                "engine",
                f"{engine.file}, {engine.size_bytes / 2**20:,.0f} MiB, {engine.backend} {engine.version}, {engine.portability}; "
                f"profiles {', '.join(profile['name'] for profile in engine.profiles)}; built in {engine.build_seconds:.1f} s",
            )
    terminal.stderr.print(table)
    print(f"text      {text!r}")


def _doctor(arguments: argparse.Namespace) -> int:
    from runtime.doctor.examine import examine
    from runtime.doctor.findings import FAILED

    findings = []
    with terminal.stderr.status("looking at versions, the machine and every backend (about half a minute)"):
        for finding in examine():
            findings.append(finding)
    failed = [finding for finding in findings if finding.state == FAILED]
    if arguments.format == "json":
        terminal.print_json({"passed": not failed, "findings": [asdict(finding) for finding in findings]})
        return command.EXIT_CHECK_FAILED if failed else command.EXIT_GOOD
    table = Table("", "state", "found", title="blockline here", title_justify="left")
    for finding in findings:
        table.add_row(
            finding.name, finding.state.upper() if finding.state == FAILED else finding.state, escape(finding.detail)
        )
    terminal.stderr.print(table)
    for finding in failed:
        terminal.say(f"{finding.name}: {finding.detail}; to mend it: {finding.fix}")
    terminal.say(f"to mend: {len(failed)}" if failed else "everything that is needed works")
    return command.EXIT_CHECK_FAILED if failed else command.EXIT_GOOD


def _verdict(validation: dict) -> str:
    """A report's validation in a few words; its largest error is null where it was not finite."""
    error, allowed = (validation.get(key) for key in ("max_error", "max_allowed"))
    if not isinstance(allowed, int | float) or not isinstance(error, int | float | None):
        return "unknown: report.json does not say"
    said = "not finite" if error is None else f"{error:.1e} of rms at most"
    return f"{'PASSED' if validation.get('passed') is True else 'FAILED'}: {said}, {allowed:.0e} allowed"


def main(arguments: list[str] | None = None) -> int:
    return command.run(lambda parsed: parsed.run(parsed), _parser(), arguments)
