"""Writes a comparison's result as one HTML page with no script and no link, light or dark like the reader's system."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from engines.comparison.audit import BackendAudit, OperationError
from engines.comparison.control import explain_control
from engines.comparison.report import by_operation, layer_of, short_name
from engines.comparison.results import BackendResult, CompareResult

STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5b6575; --page: #ffffff; --panel: #f4f6f9; --line: #d5dae3;
        --good: #1a7f4b; --bad: #c0262d; --first: #2563c9; --second: #c2620a; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ef; --soft: #9aa4b5; --page: #14181f; --panel: #1c222c; --line: #343d4c;
          --good: #4cc38a; --bad: #ff6b70; --first: #6ea8ff; --second: #f0a35e; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 2rem auto;
       max-width: 72rem; padding: 0 1.5rem; }
h1 { font-size: 1.5rem; margin-bottom: .25rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
h3 { font-size: 1rem; margin: 1.75rem 0 .5rem; }
p, li { max-width: 60rem; } .soft { color: var(--soft); }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; display: block;
        overflow-x: auto; }
th, td { text-align: left; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; } td.number, th.number { text-align: right; }
.good { color: var(--good); font-weight: 600; } .bad { color: var(--bad); font-weight: 600; }
.panel { background: var(--panel); border: 1px solid var(--line); border-radius: .5rem; padding: .75rem 1rem; }
svg { width: 100%; height: auto; } svg text { fill: var(--soft); font: 11px system-ui, sans-serif; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .carried { stroke: var(--first); fill: none; stroke-width: 1.6; }
svg .local { stroke: var(--second); fill: none; stroke-width: 1.6; }
svg .budget { stroke: var(--soft); fill: none; stroke-dasharray: 3 3; }
svg .failed { fill: var(--bad); } svg .bar { fill: var(--first); }
svg .carriedkey { fill: var(--first); } svg .localkey { fill: var(--second); }
summary { cursor: pointer; color: var(--soft); margin: .5rem 0; }
"""


def to_html(result: CompareResult) -> str:
    """Returns the page."""
    metric = "Errors are max |a − b| relative to the rms of the reference."
    body = [
        f"<h1>{escape(result.unit)}, {escape(result.dtype)}: {_verdict(result.passed)}</h1>",
        f'<p class="soft">Reference: {escape(result.reference)}. {metric}</p>',
        *(_backend(backend) for backend in result.results),
    ]
    if result.left_out:
        items = "".join(f"<li>{escape(name)}: {escape(reason)}</li>" for name, reason in result.left_out.items())
        body.append(f"<h2>Left out</h2><ul>{items}</ul>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(result.unit)} compared</title><style>{STYLE}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _verdict(passed: bool) -> str:
    return '<span class="good">PASSED</span>' if passed else '<span class="bad">FAILED</span>'


def _backend(result: BackendResult) -> str:
    allowed = f"{result.tolerance.allowed:.1e}, {escape(result.tolerance.reason)}"
    parts = [
        f"<h2>{escape(result.backend)}: {_verdict(result.passed)}</h2>",
        f'<p class="soft">{escape(result.description)}. Allowed: {allowed}.</p>',
    ]
    if result.control:
        reason = explain_control(result.control, result.tolerance.allowed)
        parts.append(f"<p>{escape(reason[:1].upper() + reason[1:])}.</p>")
    if result.audit is not None:
        parts.append(_audit(result.audit))
    parts.append(_outputs(result))
    return "".join(parts)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int]) -> str:
    """Returns a table; cells are HTML already, and the columns in `numbers` are aligned to the right."""

    def line(cells: Sequence[str], tag: str) -> str:
        opening = [f"<{tag}{' class=number' if i in numbers else ''}>" for i in range(len(cells))]
        return f"<tr>{''.join(f'{start}{cell}</{tag}>' for start, cell in zip(opening, cells, strict=True))}</tr>"

    return f"<table><thead>{line(head, 'th')}</thead><tbody>{''.join(line(row, 'td') for row in rows)}</tbody></table>"


def _outputs(result: BackendResult) -> str:
    rows, steps = [], []
    for tensor in result.tensors:
        c = tensor.comparison
        names = [escape(c.scenario), escape(c.tensor)]
        errors = [_figure(error) for error in (c.max_error, c.mean_error, c.allowed)]
        rows.append([*names, *errors, _verdict(c.passed)])
        for index, step in enumerate(tensor.steps):
            shape = "×".join(map(str, step.shape))
            differences = [_figure(x) for x in (step.max_abs, step.mean_abs, step.max_rel, step.mean_rel)]
            cosine = "" if math.isnan(step.cosine) else f"{step.cosine:.7f}"
            where = str(list(step.worst_index)) if step.worst_index is not None else "missing or misshapen"
            steps.append([*names, str(index), shape, *differences, cosine, where])
    head = ["scenario", "tensor", "largest error", "mean error", "allowed", "result"]
    differences = ["max |a − b|", "mean |a − b|", "max relative", "mean relative"]
    step_head = ["scenario", "tensor", "step", "shape", *differences, "cosine", "worst at"]
    return (
        f"<h3>Outputs and cache rows</h3>{_table(head, rows, (2, 3, 4))}"
        f"<details><summary>every step</summary>{_table(step_head, steps, (2, 4, 5, 6, 7, 8))}</details>"
    )


def _figure(value: float) -> str:
    return "∞" if math.isinf(value) else "" if math.isnan(value) else f"{value:.2e}"


# --- audit ------------------------------------------------------------------------------------------------------------


def _audit(audit: BackendAudit) -> str:
    findings = "".join(f"<li>{escape(line)}</li>" for line in audit.explain())
    no_findings = "<p>Every operation keeps its budget on the reference's own inputs.</p>"
    parts = [
        f"<h3>Audit: {_verdict(audit.passed)}</h3>",
        f"<ul>{findings}</ul>" if findings else no_findings,
        f'<div class="panel">{_error_plot(_worst_over_steps(audit.operations))}</div>',
        f"<h3>Error made by each operation, worst over layers and steps</h3>{_operations(audit)}",
        "<h3>Shares of the output error of the last step, to first order</h3>",
        f'<div class="panel">{_share_plot(audit)}</div>',
    ]
    return "".join(parts)


def _operations(audit: BackendAudit) -> str:
    rows = []
    for name, group in by_operation(audit.operations).items():
        worst = max(group, key=lambda o: (not o.passed, o.local))
        differing = "" if math.isnan(worst.differing) else f"{max(o.differing for o in group):.2%}"
        errors = [_figure(x) for x in (max(o.carried for o in group), worst.local, worst.budget.error)]
        largest = f"{max(o.largest for o in group):,.4g}"
        verdict = _verdict(all(o.passed for o in group))
        rows.append([escape(name), *errors, differing, largest, layer_of(worst.name), verdict])
    head = ["operation", "carried", "made here", "budget", "bits differ", "largest value", "worst layer", "result"]
    return _table(head, rows, (1, 2, 3, 4, 5, 6))


def _worst_over_steps(operations: Sequence[OperationError]) -> list[OperationError]:
    worst: dict[str, OperationError] = {}
    for operation in operations:
        seen = worst.get(operation.name)
        if seen is None or (not operation.passed, operation.local) > (not seen.passed, seen.local):
            worst[operation.name] = operation
    return list(worst.values())


WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 1000, 360, 52, 80, 24
RIGHT = 40
SMALLEST = 1e-9  # smaller errors do not stretch the axis; they are drawn at the bottom


def _error_plot(operations: list[OperationError]) -> str:
    """Returns a plot of carried and local errors along the network, layer after layer, on a logarithmic scale."""
    errors = [e for o in operations for e in (o.carried, o.local, o.budget.error) if SMALLEST < e < math.inf]
    low, high = math.floor(math.log10(min(errors, default=1e-7))), math.ceil(math.log10(max(errors, default=1e-1)))
    high = max(high, low + 1)

    def x(index: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (index + 0.5) / len(operations)

    def y(error: float) -> float:
        exponent = math.log10(min(max(error, 10.0**low), 10.0**high))
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - exponent) / (high - low)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="error along the network">']
    for exponent in range(low, high + 1):
        level = y(10.0**exponent)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{level:.1f}" y2="{level:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{level + 4:.1f}" text-anchor="end">1e{exponent}</text>')
    parts += _layer_marks(operations, x)
    for kind, values in (
        ("budget", [o.budget.error for o in operations]),
        ("carried", [o.carried for o in operations]),
        ("local", [o.local for o in operations]),
    ):
        points = " ".join(f"{x(i):.1f},{y(value):.1f}" for i, value in enumerate(values))
        parts.append(f'<polyline class="{kind}" points="{points}"/>')
    for index, operation in enumerate(operations):
        if not operation.passed:
            title = escape(f"{operation.name}: {_figure(operation.local)} made here")
            at = f'cx="{x(index):.1f}" cy="{y(operation.local):.1f}"'
            parts.append(f'<circle class="failed" {at} r="4"><title>{title}</title></circle>')
    parts.append(
        f'<rect class="carriedkey" x="{LEFT}" y="6" width="14" height="3"/><text x="{LEFT + 20}" y="12">carried</text>'
        f'<rect class="localkey" x="{LEFT + 90}" y="6" width="14" height="3"/>'
        f'<text x="{LEFT + 110}" y="12">made here</text>'
        f'<text x="{LEFT + 190}" y="12">dashed: budget · at the bottom: exact</text></svg>'
    )
    return "".join(parts)


def _layer_marks(operations: list[OperationError], x: Callable[[float], float]) -> list[str]:
    """Returns a line and a number at the start of each layer, or the operations' names where there is one layer."""
    layers = [layer_of(o.name) for o in operations]
    starts = [i for i, layer in enumerate(layers) if layer and (i == 0 or layers[i - 1] != layer)]
    marks = []
    if len(starts) <= 1:
        for index, operation in enumerate(operations):
            name = short_name(operation.name)
            for group in ("attention.", "mlp.", "attention_mask."):
                name = name.removeprefix(group)
            place = f"translate({x(index):.1f},{HEIGHT - BOTTOM + 10}) rotate(35)"
            marks.append(f'<text transform="{place}">{escape(name)}</text>')
        return marks
    every = max(1, len(starts) // 16)
    for number, index in enumerate(starts):
        at = f"{x(index - 0.5):.1f}"
        marks.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        if number % every == 0:
            marks.append(f'<text x="{x(index):.1f}" y="{HEIGHT - BOTTOM + 16}">{layers[index]}</text>')
    marks.append(f'<text x="{LEFT}" y="{HEIGHT - BOTTOM + 36}">layer</text>')
    return marks


def _share_plot(audit: BackendAudit) -> str:
    """Returns bars of the largest shares; negative shares cancel others."""
    bars = [(o.name, o.share) for o in audit.contributors()[:12]]
    bars.append(("rows cached in earlier steps", audit.share_of_earlier_steps))
    bars = [(name, share) for name, share in bars if math.isfinite(share)]
    if not bars:
        return "<p>There is no error to divide, or it is not finite.</p>"
    largest, row = max(abs(share) for _, share in bars) or 1.0, 22
    parts = [f'<svg viewBox="0 0 {WIDTH} {row * len(bars) + 8}" role="img" aria-label="shares of the output error">']
    for index, (name, share) in enumerate(bars):
        top, width = index * row + 6, 560 * abs(share) / largest
        parts.append(f'<text x="300" y="{top + 12}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect class="bar" x="310" y="{top}" width="{width:.1f}" height="{row - 8}"/>')
        parts.append(f'<text x="{318 + width:.1f}" y="{top + 12}">{share:+.1%}</text>')
    return "".join([*parts, "</svg>"])
