"""Functions that all commands use: arguments, one line for an error, exit codes, and the log of --verbose."""

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
from exporter.common.terminal import escaped_output, flush_output, reader_is_gone, say, stderr

EXIT_GOOD, EXIT_CHECK_FAILED, EXIT_BAD_INPUT = 0, 1, 2
EXIT_NO_READER = 128 + signal.SIGPIPE  # as a shell reports a program that SIGPIPE ended


def _stop(number: int) -> None:
    raise Stopped(number)


def run(
    main: Callable[[argparse.Namespace], int | None], parser: argparse.ArgumentParser, arguments: list[str] | None
) -> int:
    """Parses the arguments, runs the command, and turns every exception into one line and an exit code.

    With --verbose the log of the run goes to stderr. With --debug, details and the traceback of an error follow it
    there. Where the program that reads the output ends first, such as `head`, the command ends too and says nothing.
    """
    try:
        try:
            parsed = parser.parse_args(arguments)
        except SystemExit:  # after --help
            flush_output()
            raise
        return _run(main, parsed)
    except BrokenPipeError:  # only of the output: `_run` reports another
        reader_is_gone()
        return EXIT_NO_READER


def _run(main: Callable[[argparse.Namespace], int | None], parsed: argparse.Namespace) -> int:
    with _logged(parsed):
        try:
            with on_signal(_stop), escaped_output():
                return main(parsed) or EXIT_GOOD
        except KeyboardInterrupt as error:
            say("interrupted; nothing half-written was left")
            return 128 + (error.number if isinstance(error, Stopped) else signal.SIGINT)
        except Exception as error:
            if isinstance(error, BrokenPipeError) and (error.filename == "stdout" or reader_is_gone()):
                raise
            if parsed.debug:
                stderr.print(traceback.format_exc().rstrip(), markup=False)
            line, code = _one_line(error, parsed.debug)
            say(line)
            return code


def _one_line(error: Exception, debug: bool) -> tuple[str, int]:
    """Returns the line that reports an error, and its exit code."""
    if isinstance(error, InputError):
        return f"error: {error}", EXIT_BAD_INPUT
    if isinstance(error, OSError):
        return f"error: {error.filename or 'a file'}: {error.strerror or error}", EXIT_BAD_INPUT
    if isinstance(error, MemoryError):
        line = "error: memory: there was not enough; free some, or take a smaller model, dtype, batch or capacity"
        return line, EXIT_BAD_INPUT
    if isinstance(error, CheckFailed | NumericalError):
        return f"failed: {error}", EXIT_CHECK_FAILED
    message = (str(error).strip().splitlines() or ["no reason given"])[0]
    advice = "run the command again with --debug to see the traceback, and please report it"
    if debug:
        advice = "please report it with the traceback above"
    line = (
        f"bug: {type(error).__name__}: {message}; this is a fault of blockline, your input is not the cause; {advice}"
    )
    return line, EXIT_CHECK_FAILED


class CommandParser(argparse.ArgumentParser):
    """The parser of one command. It adds the arguments of the log to every command."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        verbose = "print a log on stderr: stages, sizes, times, and each choice with its reason"
        self.add_argument("--verbose", action="store_true", help=verbose)
        debug = "print the log of --verbose with more details, and the traceback of an error"
        self.add_argument("--debug", action="store_true", help=debug)


class _LogPrinter(logging.Handler):
    """Prints log records on stderr, each with the seconds since the command began and the name of its module."""

    def __init__(self) -> None:
        super().__init__()
        self._started = time.time()

    def emit(self, record: logging.LogRecord) -> None:
        say(f"{record.created - self._started:7.2f} s  {record.name}: {record.getMessage()}")


@contextlib.contextmanager
def _logged(parsed: argparse.Namespace) -> Iterator[None]:
    """Prints the log of the three packages while a command runs with --verbose or --debug."""
    if not (parsed.verbose or parsed.debug):
        yield
        return
    handler, loggers = _LogPrinter(), [logging.getLogger(name) for name in ("exporter", "engines", "runtime")]
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
    """Adds the argument --format to a command."""
    parser.add_argument(
        "--format", choices=("table", "json"), default="table", help="table for people (default), json for programs"
    )
