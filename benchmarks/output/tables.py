"""Shows the record of a run as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table

GIB = 2**30


def tables(record: Mapping) -> Iterator[Table]:
    """Yields the tables of a record, workload by workload, targets last."""
    for name, workload in record["workloads"].items():
        yield contenders(name, workload["contenders"])
        for kind in ("decode", "prefill"):
            if workload[kind]:
                yield times(f"{name}: {kind}, ms: median (p10 to p90), share of the machine's limit", workload[kind])
        yield memory(name, workload["decode"])
        yield ours_alone(name, workload)
        for row in workload["roofline"]:
            yield roofline(name, row)
    yield exports(record["exports by depth"])
    yield targets(record["targets"])


def contenders(workload: str, entries: Mapping[str, Mapping]) -> Table:
    title = f"{workload}: contenders, and agreement of their logits with the float32 reference's"
    table = _table(title, "contender", "same token", "KL", "error of rms", "open, s", "what")
    for name, entry in entries.items():
        agreement = entry.get("agreement")
        numbers = [""] * 3
        if agreement:
            numbers = [f"{agreement['top1']:.1%}", f"{agreement['kl']:.1e}", f"{agreement['error']:.1e}"]
        seconds = f"{entry['open_seconds']:.1f}" if "open_seconds" in entry else ""
        what = entry["version"] if entry["status"] == "ran" else f"{entry['status']}: {entry['reason']}"
        table.add_row(name, *numbers, seconds, what)
    return table


def times(title: str, cases: Sequence[Mapping]) -> Table:
    table = _table(title, "contender", *(case["name"] for case in cases))
    names = dict.fromkeys(name for case in cases for name in case["results"])
    reasons: dict[str, str] = {}
    for name in names:
        cells = [_time(case["results"].get(name, {}), reasons, name) for case in cases]
        table.add_row(name, *cells)
    if all("limits" in case for case in cases):  # older records have them for the whole run only
        table.add_section()
        table.add_row("the machine in that minute", *(_rates(case) for case in cases))
    table.caption = "\n".join(f"{name}: {reason}" for name, reason in reasons.items()) or None
    table.caption_justify = "left"
    return table


def _time(result: Mapping, reasons: dict[str, str], name: str) -> str:
    if "median_ms" in result:
        share = f", {result['share']:.0%}" if "share" in result else ""
        return f"{result['median_ms']:,.1f} ({result['p10_ms']:,.1f} to {result['p90_ms']:,.1f}){share}"
    reasons[name] = result.get("not_timed", "no result")
    return "not timed"


def _rates(case: Mapping) -> str:
    """Returns the rate that limits a case: bytes read in a decode step, operations in a prompt."""
    limits = case["limits"]
    return f"{limits['flop_rate'] / 1e9:.0f} GFLOP/s" if "length" in case else f"{limits['bandwidth'] / 1e9:.1f} GB/s"


def memory(workload: str, cases: Sequence[Mapping]) -> Table:
    title = f"{workload}: peak resident memory while decoding, GiB"
    table = _table(title, "contender", *(case["name"] for case in cases))
    for name in dict.fromkeys(name for case in cases for name in case["results"]):
        peaks = [case["results"].get(name, {}).get("memory", {}).get("peak") for case in cases]
        table.add_row(name, *(f"{peak / GIB:.2f}" if peak else "" for peak in peaks))
    table.add_section()
    sizes = [case["sizes"]["weights_bytes"] + case["sizes"]["cache_bytes"] for case in cases]
    table.add_row("weights and cache, float32", *(f"{size / GIB:.2f}" for size in sizes))
    return table


def ours_alone(workload: str, record: Mapping) -> Table:
    table = _table(f"{workload}: our own step, ms: median (p10 to p90)", "what", "ms")
    reasons: dict[str, str] = {}
    for row in record["capacity"]:
        table.add_row(f"cache capacity {row['capacity']:,}", _time(row, reasons, f"{row['capacity']:,}"))
    bare = record["bare products"]
    table.add_row(f"step, {bare['case']}", _time(bare["step"], reasons, "step"))
    table.add_row("its matrix products alone", _time(bare["products"], reasons, "products"))
    return table


def roofline(workload: str, row: Mapping) -> Table:
    limit, step = row["limit_ms"], row["step_ms"]
    title = (
        f"{workload}: {row['case']}, at the machine's limit {limit:.2f} ms, measured {step:.2f} ms: {limit / step:.0%}"
    )
    columns = ("component", "at the limit, ms", "bound by", "in the profile, ms", "share of the limit")
    table = _table(title, *columns)
    for component in row["components"]:
        ms, part = component["measured_ms"], component["share"]
        measured = ["" if ms is None else f"{ms:.3f}", "" if part is None else f"{part:.0%}"]
        table.add_row(component["name"], f"{component['limit_ms']:.3f}", component["bound"], *measured)
    return table


def exports(rows: Sequence[Mapping]) -> Table:
    table = _table("export by depth", "layers", "exporter", "seconds", "peak GiB")
    for row in rows:
        figures = (row.get("not_timed", ""), "")
        if "seconds" in row:
            figures = (f"{row['seconds']:.1f}", f"{row['peak_memory_bytes'] / GIB:.2f}")
        table.add_row(str(row["n_layers"]), row["exporter"], *figures)
    return table


def targets(rows: Sequence[Mapping]) -> Table:
    table = _table("targets: largest wanted ratios", "target", "wanted", "measured", "")
    for row in rows:
        measured = "" if row["measured"] is None else f"{row['measured']:.2f}"
        state = {True: "met", False: "MISSED", None: "not measured"}[row["met"]]
        table.add_row(row["name"], f"{row['wanted']:.2f}", measured, state)
    return table


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(first, title=title, title_justify="left")
    for name in others:
        table.add_column(name, justify="left" if name in ("what", "target", "bound by", "exporter", "") else "right")
    return table
