"""Draws a record: step time over past length, batch and capacity; export time and memory over depth.

python -m benchmarks --plots RECORD      needs matplotlib, `pip install 'blockline[bench]'`
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "blockline"  # the same record gives the same file
from matplotlib import pyplot  # noqa: E402 - pyplot must be imported after the backend is chosen
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator  # noqa: E402

Series = dict[str, list[tuple[float, float, float, float]]]  # label → (x, median, p10, p90)


OURS, LIMIT = "ours", "the machine's limit"
OURS_STYLE = {"color": "#c2185b", "linewidth": 2.6, "zorder": 5}
LIMIT_STYLE = {"color": "black", "linewidth": 1.4, "linestyle": "--", "zorder": 4}


def draw(record: Mapping, folder: Path) -> list[Path]:
    """Draws every plot that the record has points for; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, workload in record["workloads"].items():
        cases, stem = workload["decode"], name.lower().replace(" ", "-")
        limits = {row["case"]: row["limit_ms"] for row in workload["roofline"]}
        for batch in sorted({case["case"]["batch"] for case in cases}):
            series = _series([case for case in cases if case["case"]["batch"] == batch], "past_len", limits)
            file = folder / f"{stem}-past-length-batch-{batch}.svg"
            files += _draw(file, f"{name}, batch {batch}", "cached tokens", series)
        for past_len in sorted({case["case"]["past_len"] for case in cases}):
            series = _series([case for case in cases if case["case"]["past_len"] == past_len], "batch", limits)
            file = folder / f"{stem}-batch-at-{past_len}.svg"
            files += _draw(file, f"{name}, {past_len:,} cached tokens", "batch", series)
        capacities = {OURS: [_point(row["capacity"], row) for row in workload["capacity"] if "median_ms" in row]}
        title = f"{name}, one length, growing allocation"
        files += _draw(folder / f"{stem}-capacity.svg", title, "cache capacity", capacities, logarithmic="x")
    for key, label, scale in (
        ("seconds", "export, s", 1),
        ("peak_memory_bytes", "peak memory of the export, GiB", 2**30),
    ):
        by_exporter: Series = defaultdict(list)
        for row in record["exports by depth"]:
            if key in row:
                by_exporter[row["exporter"]].append((row["n_layers"], *[row[key] / scale] * 3))
        file = folder / f"export-{key.replace('_', '-')}.svg"
        files += _draw(file, "export over depth", "layers", by_exporter, label, logarithmic="")
    return files


def _series(cases: list[Mapping], axis: str, limits: Mapping[str, float]) -> Series:
    """Returns a line for each contender, and one for the machine's limit.

    Args:
        cases: decode cases of the record.
        axis: field of a case that x is.
        limits: name of a case → the least milliseconds of its step on this machine.
    """
    series: Series = defaultdict(list)
    for case in cases:
        x = case["case"][axis]
        for contender, result in case["results"].items():
            if "median_ms" in result:
                series[contender].append(_point(x, result))
        if case["name"] in limits:
            series[LIMIT].append((x, *[limits[case["name"]]] * 3))
    return series


def _point(x: float, result: Mapping) -> tuple[float, float, float, float]:
    return x, result["median_ms"], result["p10_ms"], result["p90_ms"]


def _draw(
    file: Path, title: str, x_label: str, series: Series, y_label: str = "ms a step", logarithmic: str = "xy"
) -> list[Path]:
    """Draws one plot: medians with p10 to p90 around them. Draws nothing where no line has two points.

    One slow contender would press all others into one line, so times have a logarithmic scale. A linear one begins at
    0, so that equal distances are equal times.

    Args:
        file: where the plot goes.
        title, x_label, y_label: its words.
        series: its lines.
        logarithmic: the axes with a logarithmic scale, out of "x" and "y".
    """
    if not any(len(points) > 1 for points in series.values()):
        return []
    figure, axes = pyplot.subplots(figsize=(6.4, 3.8), layout="constrained")
    for label, points in series.items():
        x, median, low, high = zip(*sorted(points), strict=True)
        style = {OURS: OURS_STYLE, LIMIT: LIMIT_STYLE}.get(label, {"linewidth": 1.1, "alpha": 0.85})
        marker = None if label == LIMIT else "o"
        (line,) = axes.plot(x, median, marker=marker, markersize=3, label=label, **style)
        axes.fill_between(x, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
    ticks = sorted({point[0] for points in series.values() for point in points})
    if "x" in logarithmic:
        axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    if "y" in logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(bottom=0)
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)
    return [file]
