"""Targets: ratios of a run's figures that we want to reach. A missed target fails nothing; the report shows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks.race.lineup import LINEUP, OURS, REFERENCE
from benchmarks.race.workloads import BLOCK, REAL

DECODE, PREFILL = f"{REAL} / decode P=1,000 B=1", f"{REAL} / prefill 1,000"
BLOCK_1000 = f"{BLOCK} / decode P=1,000 B=1"
PEERS = (REFERENCE, "optimum", "genai", "llama.cpp")
INT8, INT4, PEER_INT4 = "ours int8", "ours int4", "llama.cpp Q4_1"
WHOLE, SECOND, ROOM = "all tokens", "a second", "weights and cache × 1.3 + 200 MB"


@dataclass(frozen=True)
class Target:
    """A wanted ratio: `numerator` / `denominator` is at most `wanted`. Both are names that `figures` returns."""

    name: str
    numerator: str
    denominator: str
    wanted: float


def _faster(what: str, case: str, wanted: dict[str, float], contender: str = OURS) -> tuple[Target, ...]:
    """Returns targets: `contender` is so many times as fast as each peer in `wanted` (peer → times)."""
    return tuple(
        Target(
            f"{what}: {contender} against {peer}, {times} × as fast",
            f"{case} / {contender}",
            f"{case} / {peer}",
            1 / times,
        )
        for peer, times in wanted.items()
    )


TARGETS = (
    *_faster("8B block, a token at 1,000", BLOCK_1000, {"optimum": 1.3, "genai": 1.6, REFERENCE: 1.8}),
    *_faster("SmolLM2, a token at 1,000", DECODE, {"llama.cpp": 1.05, "genai": 1.4, "optimum": 1.8, REFERENCE: 3.0}),
    *_faster("SmolLM2, a prompt of 1,000", PREFILL, {"llama.cpp": 1.5, "genai": 1.1}),
    *_faster("SmolLM2, a token at 1,000", DECODE, {OURS: 1.8}, INT8),
    *_faster("SmolLM2, a token at 1,000", DECODE, {OURS: 2.3, PEER_INT4: 1.1}, INT4),
    Target("SmolLM2: tokens that differ with int8, at most 2 %", f"{REAL} / {INT8} / differing", WHOLE, 0.02),
    Target(
        "8B block: a step against its bare matrix products", f"{BLOCK} / bare step", f"{BLOCK} / bare products", 1.1
    ),
    Target("8B block: capacity 32,768 against 1,024, same length", f"{BLOCK} / C=32,768", f"{BLOCK} / C=1,024", 1.05),
    Target(
        "SmolLM2: peak memory against weights and cache × 1.3 + 200 MB",
        f"{DECODE} / {OURS} / peak bytes",
        f"{DECODE} / {ROOM}",
        1.0,
    ),
    Target("SmolLM2: seconds to open a session", f"{REAL} / {OURS} / open seconds", SECOND, 1.5),
)


def figures(record: Mapping) -> dict[str, float]:
    """Returns every figure of a record that a target can name: name → value."""
    return {WHOLE: 1.0, SECOND: 1.0, **dict(_figures(record))}


def _figures(record: Mapping) -> Iterator[tuple[str, float]]:
    for name, workload in record["workloads"].items():
        for contender, entry in workload.get("contenders", {}).items():
            if "open_seconds" in entry:
                yield f"{name} / {contender} / open seconds", entry["open_seconds"]
            if entry.get("agreement"):
                yield f"{name} / {contender} / differing", 1 - entry["agreement"]["top1"]
        for case in [*workload["decode"], *workload["prefill"]]:
            for contender, result in case["results"].items():
                if "median_ms" in result:
                    yield f"{name} / {case['name']} / {contender}", result["median_ms"]
                if "memory" in result:
                    yield f"{name} / {case['name']} / {contender} / peak bytes", result["memory"]["peak"]
            if "sizes" in case:
                held = case["sizes"]["weights_bytes"] + case["sizes"]["cache_bytes"]
                yield f"{name} / {case['name']} / {ROOM}", 1.3 * held + 200e6
        for row in workload["capacity"]:
            if "median_ms" in row:
                yield f"{name} / C={row['capacity']:,}", row["median_ms"]
        for kind in ("step", "products"):
            if "median_ms" in workload["bare products"][kind]:
                yield f"{name} / bare {kind}", workload["bare products"][kind]["median_ms"]


def measured_targets(record: Mapping) -> list[dict]:
    """Returns every target with its measured ratio and whether it is met; None where one of its figures is missing."""
    known = figures(record)
    rows = []
    for target in TARGETS:
        parts = known.get(target.numerator), known.get(target.denominator)
        ratio = None if parts[0] is None or not parts[1] else parts[0] / parts[1]
        rows.append(
            {
                "name": target.name,
                "wanted": target.wanted,
                "measured": ratio,
                "met": None if ratio is None else ratio <= target.wanted,
            }
        )
    return rows


assert set(PEERS) <= {entry.name for entry in LINEUP}
