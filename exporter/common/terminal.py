"""Prints to the terminal: text for people goes to stderr, JSON for programs goes to stdout."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text

WIDE = 200  # columns where stderr is a file or a pipe, so that lines stay whole


def printable(text: str) -> str:
    """Returns the text with control characters escaped.

    Otherwise a name in an untrusted file could control the terminal.
    """
    return "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class _Console(Console):
    """A console that prints texts as they are: it ignores markup and emoji codes, and escapes control characters."""

    def render_str(self, text: str, **named: Any) -> Text:
        return super().render_str(printable(text), **named)


def _stderr_console() -> _Console:
    console = _Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = WIDE
    return console


stderr = _stderr_console()


def say(line: str) -> None:
    """Prints a line on stderr."""
    stderr.print(line)


def mib(n_bytes: int) -> str:
    """Returns a size in MiB as text."""
    return f"{n_bytes / 2**20:,.1f} MiB"


def print_json(data: object) -> None:
    """Prints the one JSON document of a command with --format json on stdout."""
    json.dump(data, sys.stdout, indent=1, ensure_ascii=False)
    sys.stdout.write("\n")


@contextlib.contextmanager
def byte_progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar in bytes, with rate and time left. It shows nothing where stderr is not a terminal."""
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, disable=not stderr.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda n_bytes: bar.advance(task, n_bytes)
