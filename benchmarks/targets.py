"""What we want to reach: ratios of figures of a run. Nothing fails where one is missed; the report shows it with what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks.lineup import LINEUP, OURS, REFERENCE
from benchmarks.workloads import BLOCK, REAL

DECODE, PREFILL = f"{REAL} / decode P=1,000 B=1", f"{REAL} / prefill 1,000"
BLOCK_1000, BLOCK_8000, BLOCK_8_8000 = (f"{BLOCK} / decode P={case}" for case in ("1,000 B=1", "8,000 B=1", "8,000 B=8"))
PEERS = (REFERENCE, "optimum", "genai", "llama.cpp")


@dataclass(frozen=True)
class Target:
    """`numerator` over `denominator`, both named as `figures` names them, is wanted to be at most `wanted`."""

    name: str
    numerator: str
    denominator: str
    wanted: float


TARGETS = (
    *(Target(f"decode at 1,000 tokens: ours against {peer}", f"{DECODE} / {OURS}", f"{DECODE} / {peer}", 1.0) for peer in PEERS),
    *(Target(f"prefill of 1,000: ours against {peer}", f"{PREFILL} / {OURS}", f"{PREFILL} / {peer}", 1.0) for peer in PEERS),
    *(Target(f"8B block at 8,000 tokens: ours against {peer}", f"{BLOCK_8000} / {OURS}", f"{BLOCK_8000} / {peer}", 1.0) for peer in PEERS),
    Target("8B block, 8 × 8,000 tokens: ours against transformers", f"{BLOCK_8_8000} / {OURS}", f"{BLOCK_8_8000} / {REFERENCE}", 1.0),
    Target("8B block, capacity 32,768 against 1,024, same length", f"{BLOCK} / C=32,768", f"{BLOCK} / C=1,024", 1.05),
    Target("SmolLM2 step against its bare matrix products", f"{REAL} / bare step", f"{REAL} / bare products", 1.25),
    Target("8B block step against its bare matrix products", f"{BLOCK} / bare step", f"{BLOCK} / bare products", 1.1),
    Target("SmolLM2 step against the machine's limit", f"{DECODE} / {OURS}", f"{DECODE} / limit", 1.5),
    Target("8B block step at 1,000 tokens against the machine's limit", f"{BLOCK_1000} / {OURS}", f"{BLOCK_1000} / limit", 1.3),
    Target("peak memory of decoding SmolLM2 against weights and cache", f"{DECODE} / {OURS} / peak bytes", f"{DECODE} / weights and cache", 1.25),
    Target("export of 30 layers: seconds against optimum", "export 30 / ours / seconds", "export 30 / optimum / seconds", 1.0),
    Target("export of 30 layers: peak memory against optimum", "export 30 / ours / peak bytes", "export 30 / optimum / peak bytes", 1.0),
)  # fmt: skip


def figures(record: Mapping) -> dict[str, float]:
    """Every figure of a record that a target may name, flat."""
    return dict(_figures(record))


def _figures(record: Mapping) -> Iterator[tuple[str, float]]:
    for name, workload in record["workloads"].items():
        for case in [*workload["decode"], *workload["prefill"]]:
            for contender, result in case["results"].items():
                if "median_ms" in result:
                    yield f"{name} / {case['name']} / {contender}", result["median_ms"]
                if "memory" in result:
                    yield f"{name} / {case['name']} / {contender} / peak bytes", result["memory"]["peak"]
            if "sizes" in case:
                yield f"{name} / {case['name']} / weights and cache", case["sizes"]["weights_bytes"] + case["sizes"]["cache_bytes"]
        for row in workload["roofline"]:
            yield f"{name} / {row['case']} / limit", row["limit_ms"]
        for row in workload["capacity"]:
            if "median_ms" in row:
                yield f"{name} / C={row['capacity']:,}", row["median_ms"]
        for kind in ("step", "products"):
            if "median_ms" in workload["bare products"][kind]:
                yield f"{name} / bare {kind}", workload["bare products"][kind]["median_ms"]
    for row in record["exports by depth"]:
        if "seconds" in row:
            yield f"export {row['n_layers']} / {row['exporter']} / seconds", row["seconds"]
            yield f"export {row['n_layers']} / {row['exporter']} / peak bytes", row["peak_memory_bytes"]


def measured_targets(record: Mapping) -> list[dict]:
    """Every target with the ratio measured, None where one of its figures is missing, and whether it is met."""
    known = figures(record)
    rows = []
    for target in TARGETS:
        parts = known.get(target.numerator), known.get(target.denominator)
        ratio = parts[0] / parts[1] if all(parts) else None
        rows.append({"name": target.name, "wanted": target.wanted, "measured": ratio, "met": None if ratio is None else ratio <= target.wanted})
    return rows


assert set(PEERS) <= {entry.name for entry in LINEUP}
