"""What all commands share: arguments, one line for an error, exit codes, and the log of --verbose."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from exporter.common.errors import CheckFailed, InputError, NumericalError
from exporter.common.signals import Stopped, on_signal
from exporter.common.terminal import say, stderr

EXIT_GOOD, EXIT_CHECK_FAILED, EXIT_BAD_INPUT = 0, 1, 2


def _stop(number: int) -> None:
    raise Stopped(number)


def run(
    main: Callable[[argparse.Namespace], int | None], parser: argparse.ArgumentParser, arguments: list[str] | None
) -> int:
    """Parses the arguments, runs the command, and turns whatever it raises into one line and an exit code.

    With --verbose the story of the run goes to stderr; with --debug also details, and the traceback before the line.
    """
    parsed = parser.parse_args(arguments)
    with _story(parsed):
        try:
            with on_signal(_stop):
                return main(parsed) or EXIT_GOOD
        except KeyboardInterrupt as error:
            say("interrupted; nothing half-written was left")
            return 128 + (error.number if isinstance(error, Stopped) else signal.SIGINT)
        except Exception as error:
            if parsed.debug:
                stderr.print(traceback.format_exc().rstrip(), markup=False)
            line, code = _one_line(error, parsed.debug)
            say(line)
            return code


def _one_line(error: Exception, debug: bool) -> tuple[str, int]:
    """What a person needs to know of an error, and the exit code that goes with it."""
    if isinstance(error, InputError):
        return f"error: {error}", EXIT_BAD_INPUT
    if isinstance(error, OSError):
        return f"error: {error.filename or 'a file'}: {error.strerror or error}", EXIT_BAD_INPUT
    if isinstance(error, MemoryError):
        return (
            "error: memory: there was not enough; free some, or take a smaller model, dtype, batch or capacity",
            EXIT_BAD_INPUT,
        )
    if isinstance(error, CheckFailed | NumericalError):
        return f"failed: {error}", EXIT_CHECK_FAILED
    said = (str(error).strip().splitlines() or ["no reason given"])[0]
    advice = (
        "please report it with the traceback above"
        if debug
        else "run the command again with --debug to see the traceback, and please report it"
    )
    return (
        f"bug: {type(error).__name__}: {said}; this is a fault of blockline, not of what you gave it; {advice}",
        EXIT_CHECK_FAILED,
    )


class CommandParser(argparse.ArgumentParser):
    """The parser of one command: each can tell its story."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.add_argument(
            "--verbose",
            action="store_true",
            help="tell on stderr what is done: stages, sizes, times, what was chosen and why",
        )
        self.add_argument(
            "--debug", action="store_true", help="as --verbose, with details, and with the traceback of an error"
        )


class _Story(logging.Handler):
    """Prints log records on stderr, each with the seconds since the command began and the module that speaks."""

    def __init__(self) -> None:
        super().__init__()
        self._started = time.time()

    def emit(self, record: logging.LogRecord) -> None:
        say(f"{record.created - self._started:7.2f} s  {record.name}: {record.getMessage()}")


@contextlib.contextmanager
def _story(parsed: argparse.Namespace) -> Iterator[None]:
    """Listens to the three packages for as long as a command runs that was asked to tell its story."""
    if not (parsed.verbose or parsed.debug):
        yield
        return
    handler, loggers = _Story(), [logging.getLogger(name) for name in ("exporter", "engines", "runtime")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG if parsed.debug else logging.INFO)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)


def add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--format", choices=("table", "json"), default="table", help="table for people (default), json for programs"
    )
