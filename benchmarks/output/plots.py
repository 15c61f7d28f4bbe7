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

Series = dict[str, list[tuple[float, float, float, float]]]  # label → (x, median, p10, p90)


def draw(record: Mapping, folder: Path) -> list[Path]:
    """Draws every plot that the record has points for; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, workload in record["workloads"].items():
        cases = workload["decode"]
        stem = name.lower().replace(" ", "-")
        for batch in sorted({case["case"]["batch"] for case in cases}):
            series = _series([case for case in cases if case["case"]["batch"] == batch], "past_len")
            file = folder / f"{stem}-past-length-batch-{batch}.svg"
            files += _draw(file, f"{name}, batch {batch}", "cached tokens", series)
        for past_len in sorted({case["case"]["past_len"] for case in cases}):
            series = _series([case for case in cases if case["case"]["past_len"] == past_len], "batch")
            file = folder / f"{stem}-batch-at-{past_len}.svg"
            files += _draw(file, f"{name}, {past_len:,} cached tokens", "batch", series)
        capacities = {"ours": [_point(row["capacity"], row) for row in workload["capacity"] if "median_ms" in row]}
        title = f"{name}, one length, growing allocation"
        files += _draw(folder / f"{stem}-capacity.svg", title, "cache capacity", capacities)
    for key, label, scale in (
        ("seconds", "export, s", 1),
        ("peak_memory_bytes", "peak memory of the export, GiB", 2**30),
    ):
        by_exporter: Series = defaultdict(list)
        for row in record["exports by depth"]:
            if key in row:
                by_exporter[row["exporter"]].append((row["n_layers"], *[row[key] / scale] * 3))
        file = folder / f"export-{key.replace('_', '-')}.svg"
        files += _draw(file, "export over depth", "layers", by_exporter, label, logarithmic=False)
    return files


def _series(cases: list[Mapping], axis: str) -> Series:
    series: Series = defaultdict(list)
    for case in cases:
        for contender, result in case["results"].items():
            if "median_ms" in result:
                series[contender].append(_point(case["case"][axis], result))
    return series


def _point(x: float, result: Mapping) -> tuple[float, float, float, float]:
    return x, result["median_ms"], result["p10_ms"], result["p90_ms"]


def _draw(
    file: Path, title: str, x_label: str, series: Series, y_label: str = "ms a step", logarithmic: bool = True
) -> list[Path]:
    """Draws one plot: medians with p10 to p90 around them. Draws nothing where no line has two points."""
    if not any(len(points) > 1 for points in series.values()):
        return []
    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for label, points in series.items():
        x, median, low, high = zip(*sorted(points), strict=True)
        (line,) = axes.plot(x, median, marker="o", markersize=3, linewidth=2.2 if label == "ours" else 1.2, label=label)
        axes.fill_between(x, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    ticks = sorted({point[0] for points in series.values() for point in points})
    if logarithmic:
        axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)
    return [file]
