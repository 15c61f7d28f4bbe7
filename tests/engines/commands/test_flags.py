"""The flags that a command adds to an error of a library function."""

from __future__ import annotations

import pytest

from engines.commands.flags import FLAGS, flags_in_errors, flags_of
from engines.commands.main import make_parser
from exporter.common.errors import BackendError, CheckFailed, InputError


@pytest.mark.parametrize("kind", [InputError, BackendError, CheckFailed])
def test_an_error_gets_the_flags_of_the_arguments_that_it_names(kind):
    with pytest.raises(kind) as caught, flags_in_errors():
        raise kind("max_seq_len: got 65; lower it, or raise cache_capacity")
    hint = " (on the command line: --max-seq-len, --cache-capacity)"
    assert str(caught.value) == "max_seq_len: got 65; lower it, or raise cache_capacity" + hint


def test_an_error_that_names_no_argument_stays_as_it_is():
    with pytest.raises(InputError) as caught, flags_in_errors():
        raise InputError("backend tensorrt: it is not installed")
    assert str(caught.value) == "backend tensorrt: it is not installed"


@pytest.mark.parametrize(
    ("message", "flags"),
    [("use backend=tensorrt-rtx", ["--backend"]), ("a refit replaces weights", []), ("the_cache_capacity", [])],
)
def test_only_whole_names_count(message, flags):
    assert flags_of(message) == flags


def test_every_flag_is_one_of_a_command():
    parser = make_parser()
    (commands,) = (action.choices for action in parser._actions if action.choices)
    actions = [action for command in commands.values() for action in command._actions]
    flags = {flag for action in actions for flag in action.option_strings}
    assert set(FLAGS.values()) <= flags
