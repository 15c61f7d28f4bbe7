"""Prints to the terminal: text for people goes to stderr, JSON for programs goes to stdout."""

from __future__ import annotations

import codecs
import contextlib
import errno
import json
import os
import select
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

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

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))  # the command decides; rich would exit


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
    """Prints the one JSON document of a command with --format json on stdout.

    Characters that stdout's encoding lacks become JSON's own escapes.
    """
    text = json.dumps(data, indent=1, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(data, indent=1)
    sys.stdout.write(f"{text}\n")


@contextlib.contextmanager
def escaped_output() -> Iterator[None]:
    """Writes characters that stdout's encoding lacks as escapes such as \\u20ac, and says so at the end."""
    stream, escaped = sys.stdout, False
    if not hasattr(stream, "reconfigure"):
        yield
        return
    errors = stream.errors or "strict"
    before = codecs.lookup_error(errors)

    def escape(error: UnicodeError) -> tuple[str | bytes, int]:
        nonlocal escaped
        try:
            return before(error)
        except UnicodeError:
            escaped = True
            return codecs.backslashreplace_errors(error)

    codecs.register_error("blockline.escape", escape)
    stream.reconfigure(errors="blockline.escape")
    try:
        yield
        flush_output()
    finally:
        with contextlib.suppress(OSError):  # it writes what the stream holds; the body's own error is the one to report
            stream.reconfigure(errors=errors)
        if escaped:
            say(
                f"note: stdout is {stream.encoding}, which lacks some characters of this output; they were written as "
                "escapes; set PYTHONIOENCODING=utf-8 for the characters themselves"
            )


def flush_output() -> None:
    """Writes what stdout still holds.

    Raises:
        OSError: it cannot be written, with stdout as its file. It is dropped, so that Python does not try again.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        _drop_output(sys.stdout)
        raise type(error)(error.errno, error.strerror, "stdout") from None


def reader_is_gone() -> bool:
    """Whether the program that read stdout or stderr has ended. What they still hold is dropped then."""
    gone = False
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a stream without a file
            waiting = select.poll()
            waiting.register(stream.fileno(), 0)
            if any(event & select.POLLERR for _, event in waiting.poll(0)):
                _drop_output(stream)
                gone = True
    return gone


def _drop_output(stream: TextIO) -> None:
    """Lets a stream write nowhere from now on."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


@contextlib.contextmanager
def byte_progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar in bytes, with rate and time left. It shows nothing where stderr is not a terminal."""
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, disable=not stderr.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda n_bytes: bar.advance(task, n_bytes)
