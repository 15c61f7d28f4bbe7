"""Prints the record of an engine as a table."""

from __future__ import annotations

from rich.table import Table

from exporter.bundle.engine_records import EngineRecord
from exporter.common import terminal


def print_record(record: EngineRecord) -> None:
    """Prints an engine's file, origin, cost and profiles on stderr."""
    table = Table.grid(padding=(0, 2))
    table.add_row("engine", f"{record.file}, {record.size_bytes / 2**20:,.1f} MiB")
    table.add_row("built with", f"{record.backend} {record.version}; {record.portability}")
    table.add_row("took", f"{record.build_seconds:.1f} s, {record.peak_memory_bytes / 2**30:.2f} GiB at most")
    table.add_row("TF32", "allowed" if record.options.get("tf32") else "not allowed")
    for profile in record.profiles:
        table.add_row(f"profile {profile['name']}", _ranges(profile))
    terminal.stderr.print(table)


def _ranges(profile: dict) -> str:
    """The dynamic inputs of a profile, each as min … max. Cache tensors are left out: only their batch is dynamic."""
    texts = []
    for name, sizes in profile["ranges"].items():
        if sizes["min"] != sizes["max"] and not name.startswith("past_key_values."):
            low, high = ("×".join(map(str, sizes[which])) for which in ("min", "max"))
            texts.append(f"{name} {low} … {high}")
    return ", ".join(texts)
