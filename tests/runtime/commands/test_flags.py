"""Messages of library functions name arguments; the commands add the flags that set them."""

from __future__ import annotations

import argparse

import pytest

from exporter.common.errors import BackendError
from runtime.commands.main import main
from runtime.commands.opening import naming_flags


def test_a_refused_capacity_names_the_argument_and_its_flag(tiny_bundle, capsys):
    assert main(["decode", str(tiny_bundle("model").folder), "--cache-capacity", "100000"]) == 2
    error = capsys.readouterr().err
    assert "cache_capacity: got 100000" in error
    assert "; on the command line, cache_capacity is --cache-capacity\n" in error and "--batch" not in error


def test_only_flags_of_the_command_are_named_and_the_kind_of_error_stays():
    arguments = argparse.Namespace(batch=1, cache_capacity=None)
    with pytest.raises(BackendError) as caught, naming_flags(arguments):
        raise BackendError("max_batch: got 9, top_k too")
    assert str(caught.value) == "max_batch: got 9, top_k too; on the command line, max_batch is --batch"
    with pytest.raises(BackendError) as caught, naming_flags(arguments):
        raise BackendError("no argument")
    assert str(caught.value) == "no argument"
