"""The log of a run: none by default, printed with --verbose, tracebacks with --debug. Errors end in one clear line."""

from __future__ import annotations

import argparse
import logging
import shutil

import pytest

import engines.commands.main
import exporter.commands.main
import runtime.commands.main
from exporter.common import command

PACKAGES = {"exporter": exporter.commands.main, "engines": engines.commands.main, "runtime": runtime.commands.main}


def commands() -> list[tuple[str, argparse.ArgumentParser]]:
    found = []
    for name, module in PACKAGES.items():
        (action,) = [a for a in module.make_parser()._actions if isinstance(a, argparse._SubParsersAction)]
        found += [(f"{name} {command}", parser) for command, parser in action.choices.items()]
    return found


@pytest.mark.parametrize(("command", "parser"), commands(), ids=[name for name, _ in commands()])
def test_every_command_can_print_a_log(command, parser):
    options = {option for action in parser._actions for option in action.option_strings}
    assert {"--verbose", "--debug"} <= options


@pytest.mark.parametrize("package", PACKAGES)
def test_as_a_library_a_package_is_quiet_and_names_its_loggers_by_module(package, capsys):
    assert [type(handler) for handler in logging.getLogger(package).handlers] == [logging.NullHandler]
    logging.getLogger(f"{package}.anything").warning("nobody reads this")
    assert "nobody reads this" not in capsys.readouterr().err


def loggers_in(text: str) -> list[str]:
    """Returns the names of the loggers in a printed log, in order and without repeating."""
    lines = [line for line in text.splitlines() if " s  " in line and line.lstrip()[:1].isdigit()]
    names = [line.split(" s  ")[1].split(":")[0] for line in lines]
    return [name for index, name in enumerate(names) if names[index - 1 : index] != [name]]


def test_verbose_prints_what_was_done_and_what_was_chosen_and_why(tiny_bundle, tmp_path, capsys, monkeypatch):
    for module in ("library.backend", "building.build", "running.choose_engine"):
        monkeypatch.setattr(f"engines.{module}.visible_gpus", list)
    made, block = str(tmp_path / "made"), str(tmp_path / "block")
    shutil.copytree(tiny_bundle("block", "fp16").folder, block)
    origin, stepper = "exporter.bundle.origin", "exporter.steppers.onnxruntime_stepper"
    runs = [
        (
            exporter,
            ["export", "--model", "smollm2-135m", "--unit", "component:rms_norm", "-o", made],
            ["exporter.export", "exporter.graph.weight_writer", "exporter.export", origin, stepper, "exporter.export"],
            ["traced: ", "1 weights, ", "written: "],
            ["graph checked against its contract: ", f"{made} is in place, after "],
        ),
        (
            engines,
            ["build", block, "--backend", "tensorrt-rtx"],
            [
                "engines.library.backend",
                "exporter.bundle.bundle",
                origin,
                "engines.network.parsed",
                "engines.building.build",
            ],
            ["(asked for)", "parsed by tensorrt-rtx", "1 attentions, 2 cache updates"],
            ["building model.c64.tensorrt-rtx.engine for cache capacity 64"],
        ),
        (
            runtime,
            ["decode", block, "--steps", "1"],
            ["exporter.bundle.bundle", "runtime.backends", stepper, "runtime.session"],
            ["checksums of model.onnx: ", "auto takes onnxruntime: backend tensorrt: no GPU is visible"],
            ["a cache of ", "on CPUExecutionProvider: "],
        ),
        (
            exporter,
            ["verify", block],
            ["exporter.validation.verify"],
            ["sizes and checksums of model.onnx, model.onnx.data: "],
            ["model.onnx against its contract: "],
        ),
    ]
    for module, arguments, names, first_lines, more_lines in runs:
        capsys.readouterr()
        assert module.commands.main.main([*arguments, "--verbose"]) == 0
        text = capsys.readouterr().err
        assert loggers_in(text) == names
        assert [line for line in (*first_lines, *more_lines) if line not in text] == []
    for module, arguments, *_ in runs[2:]:
        assert module.commands.main.main(arguments) == 0
        assert loggers_in(capsys.readouterr().err) == []
        assert all(
            len(logging.getLogger(package).handlers) == 1 and logging.getLogger(package).level == logging.NOTSET
            for package in PACKAGES
        )


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def failing(monkeypatch, capsys):
    """Runs a command that raises the given error; returns its exit code and the lines on stderr."""

    def run(error: BaseException, *options: str) -> tuple[int, list[str]]:
        def fail(name: str):
            raise error

        monkeypatch.setattr("exporter.commands.params.lookup", fail)
        capsys.readouterr()
        code = exporter.commands.main.main(["params", "--model", "llama3-8b", *options])
        captured = capsys.readouterr()
        assert captured.out == ""
        return code, captured.err.splitlines()

    return run


def test_a_bug_ends_in_one_line_that_says_so_and_how_to_see_the_traceback(failing):
    code, lines = failing(KeyError("planted\nand more"))
    assert (code, len(lines)) == (command.EXIT_CHECK_FAILED, 1)
    assert lines[0].startswith("bug: KeyError: ") and "a fault of blockline" in lines[0] and "--debug" in lines[0]
    assert failing(AssertionError())[1][0].startswith("bug: AssertionError: no reason given; ")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (RuntimeError("planted"), 1, "bug: RuntimeError: planted; "),
        (command.InputError("planted"), 2, "error: planted"),
        (command.CheckFailed("planted"), 1, "failed: planted"),
        (OSError(28, "No space left on device", "x"), 2, "error: x: No space left on device"),
        (MemoryError("Unable to allocate 10 GiB"), 2, "error: memory: there was not enough; "),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_debug_shows_the_traceback_before_the_line_and_nothing_else_does(failing, error, code, line):
    for options in ((), ("--verbose",)):
        got, lines = failing(error, *options)
        assert got == code and len(lines) == 1 and lines[0].startswith(line)
    got, lines = failing(error, "--debug")
    assert got == code and lines[0] == "Traceback (most recent call last):" and lines[-1].startswith(line)
    assert any(", in fail" in entry for entry in lines) and "run the command again" not in lines[-1]


def test_an_interrupt_is_quiet_also_with_debug(failing):
    for options in ((), ("--debug",)):
        assert failing(KeyboardInterrupt(), *options) == (130, ["interrupted; nothing half-written was left"])


def test_a_log_ends_with_its_command_also_when_that_fails(failing):
    failing(RuntimeError("planted"), "--debug")
    assert all(len(logging.getLogger(package).handlers) == 1 for package in PACKAGES)
