"""`python -m runtime report`: prints what a bundle is, its measurements, and its answer to a prompt."""

from __future__ import annotations

import argparse
import time
from typing import Any

from rich.table import Table

from exporter.bundle.engine_records import read_records
from exporter.common import terminal
from runtime.commands.opening import add_session_arguments, naming_flags, open_session, open_text_bundle
from runtime.text.generation import generate
from runtime.text.sampling import Sampler
from runtime.text.sequence import GeneratedSequence
from runtime.text.stopping import StopRules


def add_parser(commands: Any) -> None:
    """Adds the parser of `report`."""
    parser = commands.add_parser("report", help="print what a bundle is, its measurements, and its answer to a prompt")
    add_session_arguments(parser)
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="raw text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=16, metavar="N", help="most tokens to add (default 16)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Prints the report on stderr and the generated text on stdout."""
    from exporter.bundle.tokenizer import encode

    bundle, tokenizer = open_text_bundle(arguments.bundle)
    manifest, validation = bundle.manifest, bundle.read_report().get("validation")
    with naming_flags(arguments), open_session(arguments, max_batch=1) as session:
        prompt, rules = encode(tokenizer, arguments.prompt, terminal.say), StopRules(arguments.max_new_tokens)
        answer = GeneratedSequence(prompt, Sampler(), rules, manifest.end_token_ids, tokenizer)
        started = time.perf_counter()
        for _ in generate(session, [answer]):
            pass
        seconds = time.perf_counter() - started
    size_mib = sum(entry["size_bytes"] for entry in manifest.files.values()) / 2**20
    table = Table.grid(padding=(0, 2))
    table.add_row("bundle", str(bundle.folder))
    table.add_row("unit", f"{manifest.unit}, {manifest.dtype}, {size_mib:,.0f} MiB")
    if validation:
        table.add_row("validated", _verdict(validation))
    table.add_row("backend", f"{session.description}, cache of {session.cache_capacity} tokens")
    table.add_row("speed", f"{len(prompt)} + {len(answer.tokens)} tokens in {seconds:.2f} s")
    table.add_row("prompt", arguments.prompt)
    for engine in read_records(bundle.folder):
        profiles = ", ".join(profile["name"] for profile in engine.profiles)
        table.add_row(
            "engine",
            f"{engine.file}, {engine.size_bytes / 2**20:,.0f} MiB, {engine.backend} {engine.version}, "
            f"{engine.portability}; profiles {profiles}; built in {engine.build_seconds:.1f} s",
        )
    terminal.stderr.print(table)
    print(f"text      {answer.text!r}")


def _verdict(validation: dict) -> str:
    """Returns a report's validation in a few words. Its largest error is null where it was not finite."""
    meaning = validation.get("meaning", validation)  # older reports have one answer, and no sections
    if not isinstance(meaning, dict):
        return "unknown: report.json does not say"
    error, allowed = (meaning.get(key) for key in ("max_error", "max_allowed"))
    if not isinstance(allowed, int | float) or not isinstance(error, int | float | None):
        return "unknown: report.json does not say"
    largest = "not finite" if error is None else f"{error:.1e} of rms at most"
    if meaning.get("judged_by") == "operations":
        largest = f"{largest}, judged by operation"
    return f"{'PASSED' if validation.get('passed') is True else 'FAILED'}: {largest}, {allowed:.0e} allowed"
