"""What a record of the benchmark must look like: held against it before it is written, and by whoever reads an old one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from benchmarks.race.lineup import OURS, REFERENCE

TOP = {
    "date",
    "commit",
    "versions",
    "machine",
    "threads",
    "limits",
    "workloads",
    "exports by depth",
    "targets",
    "seconds",
}
WORKLOAD = {"contenders", "decode", "prefill", "capacity", "bare products", "roofline", "exports", "seconds"}
STATUSES = {"ran", "missing", "failed", "disagrees"}


def check_record(record: Mapping) -> None:
    """Refuses a record that does not have the form described.

    Raises:
        ValueError: names everything that is wrong with it.
    """
    faults = list(_faults(record))
    if faults:
        raise ValueError("record: " + "; ".join(faults))


def _faults(record: Mapping) -> Iterator[str]:
    if set(record) != TOP:
        yield f"its keys are {sorted(record)}, expected {sorted(TOP)}"
        return
    for rate in ("bandwidth", "flop_rate"):
        if not record["limits"].get(rate, 0) > 0:
            yield f"limits {rate}: got {record['limits'].get(rate)}, expected more than 0"
    if not record["workloads"]:
        yield "it has no workloads"
    for name, workload in record["workloads"].items():
        yield from (f"{name}: {fault}" for fault in _workload_faults(workload))


def _workload_faults(workload: Mapping) -> Iterator[str]:
    if set(workload) != WORKLOAD:
        yield f"its keys are {sorted(workload)}, expected {sorted(WORKLOAD)}"
        return
    yield from _contender_faults(workload["contenders"])
    ran = {name for name, contender in workload["contenders"].items() if contender.get("status") == "ran"}
    for case in [*workload["decode"], *workload["prefill"]]:
        if set(case["results"]) != ran:
            yield f"{case['name']}: it has results of {sorted(case['results'])}, expected of those who ran, {sorted(ran)}"
        for name, result in case["results"].items():
            yield from _result_faults(f"{case['name']}, {name}", result)
    for row in workload["capacity"]:
        yield from _result_faults(f"capacity {row.get('capacity')}", row)
    for kind in ("step", "products"):
        yield from _result_faults(f"bare products, {kind}", workload["bare products"].get(kind, {}))
    for row in workload["roofline"]:
        whole = sum(component["limit_ms"] for component in row["components"])
        if abs(whole - row["limit_ms"]) > 1e-6 * whole:
            yield f"roofline {row['case']}: its components add up to {whole} ms, expected {row['limit_ms']}"


def _contender_faults(contenders: Mapping) -> Iterator[str]:
    for needed in (REFERENCE, OURS):
        if contenders.get(needed, {}).get("status") != "ran":
            yield f"{needed}: got {contenders.get(needed)}, expected it to have run"
    for name, contender in contenders.items():
        status = contender.get("status")
        if status not in STATUSES:
            yield f"{name}: got status {status!r}, expected one of {sorted(STATUSES)}"
        elif status != "ran" and not contender.get("reason"):
            yield f"{name}: it is {status} and no reason is given"
        elif status == "ran" and "agreement" not in contender:
            yield f"{name}: it ran and was not compared"


def _result_faults(what: str, result: Mapping) -> Iterator[str]:
    if "not_timed" in result:
        if not result["not_timed"]:
            yield f"{what}: it is not timed and no reason is given"
    elif not 0 < result.get("p10_ms", 0) <= result.get("median_ms", 0) <= result.get("p90_ms", 0) or not result.get(
        "n"
    ):
        yield f"{what}: got {dict(result)}, expected 0 < p10 <= median <= p90 of at least one sample"
