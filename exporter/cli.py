"""What the three commands share: one line for an error, exit codes, progress on stderr, JSON on stdout."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text

from exporter.errors import CheckFailed, InputError, NumericalError

EXIT_GOOD, EXIT_CHECK_FAILED, EXIT_BAD_INPUT = 0, 1, 2

WIDE = 200  # columns where stderr is a file or a pipe: nothing there is gained by wrapping


def printable(text: str) -> str:
    """The text with control characters spelt out: a name in somebody's file must not steer the terminal."""
    return "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class _Console(Console):
    """A console that takes texts as they are: no markup, no emoji codes, no control characters in them."""

    def render_str(self, text: str, **named: Any) -> Text:
        return super().render_str(printable(text), **named)


stderr = _Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)
if not stderr.is_terminal:
    stderr.width = WIDE


def say(line: str) -> None:
    """A line for the person at the terminal."""
    stderr.print(line)


def run(main: Callable[[argparse.Namespace], int | None], parser: argparse.ArgumentParser, arguments: list[str] | None) -> int:
    """Parses the arguments, runs the command, and turns the project's own errors, and files that cannot be read or written,
    into one line and an exit code."""
    try:
        return main(parser.parse_args(arguments)) or EXIT_GOOD
    except InputError as error:
        say(f"error: {error}")
        return EXIT_BAD_INPUT
    except OSError as error:
        say(f"error: {error.filename or 'a file'}: {error.strerror or error}")
        return EXIT_BAD_INPUT
    except (CheckFailed, NumericalError) as error:
        say(f"failed: {error}")
        return EXIT_CHECK_FAILED
    except KeyboardInterrupt:
        say("interrupted; nothing half-written was left")
        return 130


def print_json(data: object) -> None:
    """The one JSON document of a command run with --format json."""
    json.dump(data, sys.stdout, indent=1, ensure_ascii=False)
    sys.stdout.write("\n")


def add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=("table", "json"), default="table", help="table for people (default), json for programs")


@contextlib.contextmanager
def byte_progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar in bytes, with rate and time left; silent where stderr is not a terminal."""
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, disable=not stderr.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda n_bytes: bar.advance(task, n_bytes)
