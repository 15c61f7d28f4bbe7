"""Opens sessions and bundles for the subcommands."""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from exporter.bundle.bundle import VERIFY, Bundle
from exporter.common import terminal
from exporter.common.errors import InputError
from exporter.spec.limits import DEFAULT_CACHE_CAPACITY
from runtime.backends import BACKENDS
from runtime.session import DecodeSession

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FLAGS = {  # argument of a library function → flag of the commands
    "allow_host_code": "--allow-host-code",
    "cache_capacity": "--cache-capacity",
    "max_batch": "--batch",
    "frequency_penalty": "--frequency-penalty",
    "logit_bias": "--logit-bias",
    "max_new_tokens": "--max-new-tokens",
    "min_p": "--min-p",
    "presence_penalty": "--presence-penalty",
    "providers": "--provider",
    "repetition_penalty": "--repetition-penalty",
    "stop_token_ids": "--stop-token",
    "top_k": "--top-k",
    "top_p": "--top-p",
}


def add_session_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that `open_session` reads."""
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
        help=f"tokens that a sequence can hold (default {DEFAULT_CACHE_CAPACITY}, at most the export's positions)",
    )
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="threads of onnxruntime (default: one for each core, at most what the container's quota allows)",
    )
    parser.add_argument(
        "--verify",
        choices=VERIFY,
        default="graph",
        help="check the graph's checksum first (default), or also those of weights, tokenizer and engine",
    )
    text = "let a version-compatible engine run its own code on the CPU; only for engines from a source that you trust"
    parser.add_argument("--allow-host-code", action="store_true", help=text)


def open_session(arguments: argparse.Namespace, max_batch: int) -> DecodeSession:
    """Opens a session as the arguments say, and prints its backend and cache."""
    session = DecodeSession.open(
        arguments.bundle,
        arguments.backend,
        arguments.provider,
        max_batch=max_batch,
        cache_capacity=arguments.cache_capacity,
        verify=arguments.verify,
        allow_host_code=arguments.allow_host_code,
        threads=arguments.threads,
    )
    terminal.say(f"backend: {session.description}; cache: {max_batch} × {session.cache_capacity} tokens")
    return session


def open_text_bundle(folder: str) -> tuple[Bundle, Tokenizer]:
    """Opens a bundle and its tokenizer.

    Raises:
        InputError: its weights are random, or it has no tokenizer.
    """
    from exporter.bundle.tokenizer import open_tokenizer

    bundle = Bundle.open(folder)
    if bundle.manifest.has_random_weights:
        raise InputError(
            f"bundle {folder}: its weights are random, expected trained ones, since its text would be random too; "
            "export it from a --checkpoint"
        )
    return bundle, open_tokenizer(bundle)


@contextlib.contextmanager
def naming_flags(arguments: argparse.Namespace) -> Iterator[None]:
    """Adds to the message of an InputError which flags set the arguments that it names."""
    try:
        yield
    except InputError as error:
        flags = {name: flag for name, flag in FLAGS.items() if hasattr(arguments, flag[2:].replace("-", "_"))}
        named = [f"{name} is {flag}" for name, flag in flags.items() if re.search(rf"\b{name}\b", str(error))]
        if not named:
            raise
        raise type(error)(f"{error}; on the command line, {', '.join(named)}") from error
