"""`python -m runtime doctor`: prints what is installed, what works on this machine, and how to fix what does not."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from exporter.common import command, terminal
from runtime.doctor.findings import FAILED, Finding

TABLE_COLUMNS = 80  # the width of a usual terminal


def add_parser(commands: Any) -> None:
    """Adds the parser of `doctor`."""
    parser = commands.add_parser(
        "doctor", help="print what is installed, what works on this machine, and how to fix what does not"
    )
    command.add_format(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints all findings and the fix of each failure. Returns the exit code."""
    from runtime.doctor.examine import examine

    with terminal.stderr.status("checking versions, the machine and every backend (about half a minute)"):
        findings = list(examine())
    failed = [finding for finding in findings if finding.state == FAILED]
    if arguments.format == "json":
        terminal.print_json({"passed": not failed, "findings": [asdict(finding) for finding in findings]})
        return command.EXIT_CHECK_FAILED if failed else command.EXIT_GOOD
    terminal.stderr.print(_table(findings), soft_wrap=False, width=TABLE_COLUMNS)
    for finding in failed:
        terminal.say(f"{finding.name}: {finding.detail}; to fix it: {finding.fix}")
    terminal.say(f"to fix: {len(failed)}" if failed else "everything that is needed works")
    return command.EXIT_CHECK_FAILED if failed else command.EXIT_GOOD


def _table(findings: Sequence[Finding]) -> Table:
    """Returns the findings as a table; long texts continue on the next line of their cell."""
    table = Table(title="blockline on this machine", title_justify="left")
    for header in ("", "state", "found"):
        table.add_column(header, overflow="fold")
    for finding in findings:
        state = finding.state.upper() if finding.state == FAILED else finding.state
        table.add_row(finding.name, state, finding.detail)
    return table
