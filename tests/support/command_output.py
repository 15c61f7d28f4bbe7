"""Runs commands in this process and returns what they print: the one line of a refusal, or the one JSON document."""

from __future__ import annotations

import json


def refusal(capsys, main, *arguments: object) -> str:
    """The one line on stderr of a command that was given bad input."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert captured.err.splitlines()[-1] == errors[0]
    assert captured.out == ""
    return errors[0]


def json_output(capsys, main, *arguments: object) -> dict:
    """The one JSON document on stdout of a command that ends well."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 0
    return json.loads(capsys.readouterr().out)
