"""Tries one mutant of a parsed network: `compare` must notice what the float32 twin's network shows."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import onnx

import engines.interpreter.stepper
from benchmarks.campaigns.mutants.drafts import Draft
from benchmarks.campaigns.mutants.good_units import GoodUnit
from benchmarks.campaigns.mutants.network_faults import NetworkMutation, network_faults
from benchmarks.campaigns.mutants.trials_of_graphs import Outcome
from benchmarks.campaigns.mutants.twin_oracle import Outputs, change, run_scenarios, write_twin
from engines.comparison.compare import CompareRequest, compare_bundle
from engines.interpreter.stepper import InterpreterStepper
from engines.library.backend import Backend, choose_backend
from engines.network.parsed import ParsedNetwork, parse_network
from engines.network.source import load_source
from exporter.bundle.bundle import Bundle
from exporter.common.errors import CheckFailed, InputError
from exporter.graph.fixed_capacity import fix_capacity

PARSER = "tensorrt-rtx"  # it needs no GPU
CAPACITY = 32
REQUEST = CompareRequest(("eager", "interpreter"), parser=PARSER, audit=False)


@contextmanager
def planted(mutation: NetworkMutation, found: Callable[[bool], None] = lambda is_there: None) -> Iterator[None]:
    """Lets the interpreter run every network with one mutation; `found` is told whether the network has its layer."""

    def parse(backend: Backend, model: onnx.ModelProto, path: Path) -> ParsedNetwork:
        parsed = parse_network(backend, model, path)
        found(mutation.plant(parsed))
        return parsed

    with patch.object(engines.interpreter.stepper, "parse_network", parse):
        yield


@dataclass
class NetworkTrials:
    """The trials of the network of one good unit, whose graph is one.

    Attributes:
        name, unit: the good unit.
        good: its bundle.
        scratch: folder for the twin.
    """

    name: str
    unit: GoodUnit
    good: Bundle
    scratch: Path
    _twin: Path = field(init=False)
    _outputs: Outputs = field(init=False)

    def __post_init__(self) -> None:
        self._twin = write_twin(Draft.read(self.good), Path(tempfile.mkdtemp(dir=self.scratch)))
        self._outputs = self._run_twin()
        good = compare_bundle(self.good, REQUEST, weights=self.unit.weights)
        assert good.passed, f"the network of {self.name}, which is good, does not pass"

    def _run_twin(self) -> Outputs:
        manifest = self.good.manifest
        contract = manifest.contract.in_dtype(manifest.dtype, "fp32")
        stepper = InterpreterStepper(self._twin, contract, choose_backend(PARSER))
        try:
            return run_scenarios(manifest, stepper)
        finally:
            stepper.close()

    def mutations(self) -> Iterator[NetworkMutation]:
        """Yields every mutation of the network."""
        model = load_source(self.good.graph_path)
        fix_capacity(model, CAPACITY)
        parsed = parse_network(choose_backend(PARSER), model, self.good.graph_path)
        yield from network_faults(parsed)

    def run(self, mutation: NetworkMutation) -> Outcome | None:
        """Plants one mutation and asks the oracle and `compare`; None where the twin has no such layer."""
        there: list[bool] = []
        try:
            with planted(mutation, there.append):
                found, where = change(self._outputs, self._run_twin())
        except (InputError, CheckFailed, RuntimeError, IndexError, ValueError, AssertionError) as error:
            found, where = float("inf"), str(error).partition("\n")[0]
        if not all(there):
            return None
        caught_by, said = None, ""
        try:
            with planted(mutation):
                result = compare_bundle(self.good, REQUEST, weights=self.unit.weights)
            if not result.passed:
                caught_by, said = "compare", "an output differs"
        except (InputError, CheckFailed, RuntimeError, IndexError, ValueError, AssertionError) as error:
            caught_by, said = "the interpreter's refusal", str(error).partition("\n")[0]
        return Outcome(self.name, "network", mutation.kind, mutation.site, found, where[:200], caught_by, said[:200])
