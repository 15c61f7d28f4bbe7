"""Writes a comparison's result: one JSON document for programs, tables for people at a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from engines.comparison.audit import BackendAudit, OperationError
from engines.comparison.control import explain_control
from engines.comparison.results import BackendResult, CompareResult, TensorResult
from exporter.common import terminal

CONTRIBUTORS = 8


def to_dict(result: CompareResult) -> dict:
    """Returns everything that was measured as one JSON document; numbers that are not finite are null."""
    return _jsonable(
        {
            "passed": result.passed,
            "unit": result.unit,
            "dtype": result.dtype,
            "reference": result.reference,
            "metric": "max |a - b| relative to the rms of the reference",
            "left_out": result.left_out,
            "files": result.files,
            "results": [
                {
                    "backend": r.backend,
                    "description": r.description,
                    "passed": r.passed,
                    "tolerance": asdict(r.tolerance),
                    "control": r.control,
                    "tensors": [_tensor_dict(tensor) for tensor in r.tensors],
                    "audit": None if r.audit is None else _audit_dict(r.audit),
                    "meaning": None if r.meaning is None else r.meaning.to_dict(),
                }
                for r in result.results
            ],
        }
    )


def _tensor_dict(tensor: TensorResult) -> dict:
    c = tensor.comparison
    return {
        "scenario": c.scenario,
        "tensor": c.tensor,
        "passed": c.passed,
        "max_error": c.max_error,
        "mean_error": c.mean_error,
        "allowed": c.allowed,
        "steps": [asdict(step) for step in tensor.steps],
    }


def _audit_dict(audit: BackendAudit) -> dict:
    first = audit.first_failure
    return {
        "passed": audit.passed,
        "first_failure": None if first is None else {"step": first.step, "name": first.name},
        "findings": audit.explain(),
        "missing": audit.missing,
        "contributors": [{"name": o.name, "share": o.share} for o in audit.contributors()[:CONTRIBUTORS]],
        "share_of_earlier_steps": audit.share_of_earlier_steps,
        "operations": [asdict(o) | {"passed": o.passed, "headroom": o.headroom} for o in audit.operations],
    }


def _jsonable(value: Any) -> Any:
    """Returns the value with tuples as lists, and with null for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- tables -----------------------------------------------------------------------------------------------------------


def print_result(result: CompareResult) -> None:
    """Prints tables on stderr: outputs by scenario, and the findings of the audits."""
    terminal.say(f"reference: {result.reference}")
    for backend in result.results:
        terminal.stderr.print(_output_table(backend))
        if backend.control:
            terminal.say(explain_control(backend.control, backend.tolerance.allowed))
        if backend.meaning is not None:
            terminal.say(backend.meaning.sentence)
        if backend.audit is not None:
            _print_audit(backend.audit)
    for name, reason in result.left_out.items():
        terminal.say(f"left out: {name}: {reason}")
    for backend in result.results:
        terminal.say(f"{backend.backend}: {'PASSED' if backend.passed else 'FAILED'}")


def _output_table(result: BackendResult) -> Table:
    title = f"{result.backend}: {result.description}"
    head = ("scenario", "tensor", "largest error", "allowed", "largest |a − b|", "cosine", "worst at", "result")
    table = Table(*head, title=title, title_justify="left", box=SIMPLE_HEAD)
    for tensor in result.tensors:
        c = tensor.comparison
        worst = max(range(len(tensor.steps)), key=[step.max_abs for step in tensor.steps].__getitem__)
        cosines = [step.cosine for step in tensor.steps if not math.isnan(step.cosine)]
        index = tensor.steps[worst].worst_index
        table.add_row(
            c.scenario,
            c.tensor,
            f"{c.max_error:.2e}",
            f"{c.allowed:.0e}",
            f"{tensor.steps[worst].max_abs:.2e}",
            f"{min(cosines):.6f}" if cosines else "",
            f"step {worst}, {list(index)}" if index is not None else "missing or misshapen",
            "PASSED" if c.passed else "FAILED",
        )
    return table


def _print_audit(audit: BackendAudit) -> None:
    what = "the error that each operation makes, and the error carried to it"
    title = f"audit of {audit.backend}: {what}; worst over layers and steps"
    head = ("operation", "carried", "made here", "budget", "bits differ", "largest", "layer", "result")
    table = Table(*head, title=title, title_justify="left", box=SIMPLE_HEAD)
    for name, group in by_operation(audit.operations).items():
        worst = max(group, key=lambda o: (not o.passed, o.local))
        table.add_row(
            name,
            f"{max(o.carried for o in group):.1e}",
            f"{worst.local:.1e}",
            f"{worst.budget.error:.1e}",
            "" if math.isnan(worst.differing) else f"{max(o.differing for o in group):.2%}",
            f"{max(o.largest for o in group):,.4g}",
            layer_of(worst.name),
            "PASSED" if all(o.passed for o in group) else "FAILED",
        )
    terminal.stderr.print(table)
    for line in audit.explain():
        terminal.say(line)
    shares = ", ".join(f"{o.name} {o.share:+.0%}" for o in audit.contributors()[:CONTRIBUTORS])
    if shares:
        cached = f"rows cached in earlier steps {audit.share_of_earlier_steps:+.0%}"
        terminal.say(f"shares of the last step's output error, to first order: {shares}; {cached}")
    if audit.missing:
        terminal.say(f"not shown by {audit.backend}: {', '.join(audit.missing)}")


def by_operation(operations: Iterable[OperationError]) -> dict[str, list[OperationError]]:
    """Returns the operations of all layers and steps by their short name, in the order of the block."""
    groups: dict[str, list[OperationError]] = {}
    for operation in operations:
        groups.setdefault(short_name(operation.name), []).append(operation)
    return groups


def short_name(name: str) -> str:
    """Returns a name without its layer: "mlp.up_proj" for "blocks.3.mlp.up_proj"."""
    return name.split(".", 2)[2] if name.startswith("blocks.") else name


def layer_of(name: str) -> str:
    """Returns the layer in a name, or "" where it has none."""
    return name.split(".")[1] if name.startswith("blocks.") else ""
