"""`python -m engines refit`: puts the weights of a bundle into an engine of the bundle."""

from __future__ import annotations

import argparse

from engines.commands.record_table import print_record
from engines.library.usable_engines import backend_of
from exporter.bundle.bundle import Bundle
from exporter.bundle.engine_records import read_records
from exporter.common.errors import InputError


def add_parser(commands: argparse._SubParsersAction) -> None:
    text = "put the bundle's weights into an engine that was built with --refit or --strip-plan (needs a GPU)"
    parser = commands.add_parser("refit", help=text)
    parser.add_argument("bundle", metavar="BUNDLE", help="folder of the bundle")
    parser.add_argument("--engine", metavar="FILE", help="name of the engine in the bundle (default: the only one)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from engines.building.refit import refit_bundle

    for bundle in Bundle.open(arguments.bundle).parts:
        records = read_records(bundle.folder)
        wanted = [record for record in records if arguments.engine in (None, record.file)]
        if len(wanted) != 1:
            names = ", ".join(record.file for record in records) or "none, the bundle has no engine"
            raise InputError(f"refit {bundle.folder}: got --engine {arguments.engine}, expected one of {names}")
        print_record(refit_bundle(bundle, backend_of(wanted[0]), wanted[0]))
