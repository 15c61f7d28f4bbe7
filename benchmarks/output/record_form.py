"""Checks the form of a benchmark record, before it is written and after an old one is read."""

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
    """Checks the form of a record.

    Raises:
        ValueError: the form is wrong; the message names every fault.
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
        yield "got no workloads, expected at least one"
    for name, workload in record["workloads"].items():
        yield from (f"{name}: {fault}" for fault in _workload_faults(workload))


def _workload_faults(workload: Mapping) -> Iterator[str]:
    if set(workload) != WORKLOAD:
        yield f"its keys are {sorted(workload)}, expected {sorted(WORKLOAD)}"
        return
    yield from _contender_faults(workload["contenders"])
    ran = {name for name, contender in workload["contenders"].items() if contender.get("status") == "ran"}
    for case in [*workload["decode"], *workload["prefill"]]:
        for rate in ("bandwidth", "flop_rate"):
            if not case.get("limits", {}).get(rate, 0) > 0:
                yield f"{case['name']}: limits {rate}: got {case.get('limits')}, expected more than 0"
        if set(case["results"]) != ran:
            yield f"{case['name']}: got results of {sorted(case['results'])}, expected those that ran, {sorted(ran)}"
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
            yield f"{needed}: got {contenders.get(needed)}, expected status 'ran'"
    for name, contender in contenders.items():
        status = contender.get("status")
        if status not in STATUSES:
            yield f"{name}: got status {status!r}, expected one of {sorted(STATUSES)}"
        elif status != "ran" and not contender.get("reason"):
            yield f"{name}: its status is {status}, expected a reason"
        elif status == "ran" and "agreement" not in contender:
            yield f"{name}: its status is ran, expected an agreement"


def _result_faults(what: str, result: Mapping) -> Iterator[str]:
    if "not_timed" in result:
        if not result["not_timed"]:
            yield f"{what}: it is not timed, expected a reason"
        return
    p10, median, p90 = (result.get(name, 0) for name in ("p10_ms", "median_ms", "p90_ms"))
    if not 0 < p10 <= median <= p90 or not result.get("n"):
        yield f"{what}: got {dict(result)}, expected 0 < p10 <= median <= p90 and at least one sample"
