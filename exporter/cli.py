"""What the three commands share: one line for an error, exit codes, progress on stderr, JSON on stdout."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from exporter.errors import CheckFailed, InputError, NumericalError

EXIT_GOOD, EXIT_CHECK_FAILED, EXIT_BAD_INPUT = 0, 1, 2

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

WIDE = 200  # columns where stderr is a file or a pipe: nothing there is gained by wrapping

stderr = Console(stderr=True, highlight=False, soft_wrap=True)
if not stderr.is_terminal:
    stderr.width = WIDE


def say(line: str) -> None:
    """A line for the person at the terminal."""
    stderr.print(line, markup=False)


class Stopped(KeyboardInterrupt):
    """A signal asked this process to end.

    Attributes:
        number: the signal's.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def on_signal(handler: Callable[[int], None]) -> Iterator[None]:
    """While entered, signals that ask this process to end call the handler with their number; ignored ones (nohup) stay so."""
    previous = {}
    if threading.current_thread() is threading.main_thread():  # only there can signals be handled
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                previous[number] = signal.signal(number, lambda number, _: handler(number))
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def _stop(number: int) -> None:
    raise Stopped(number)


def run(main: Callable[[argparse.Namespace], int | None], parser: argparse.ArgumentParser, arguments: list[str] | None) -> int:
    """Parses the arguments, runs the command, and turns the project's own errors, and files that cannot be read or written,
    into one line and an exit code."""
    try:
        with on_signal(_stop):
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
    except KeyboardInterrupt as error:
        say("interrupted; nothing half-written was left")
        return 128 + (error.number if isinstance(error, Stopped) else signal.SIGINT)


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
