"""HTML report of a probe: one page without scripts or network, for screens, phones and paper."""

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape

import lockstep
from lockstep.probe.report import (
    Comparison,
    Finding,
    Plot,
    Section,
    ServerReport,
    Table,
    text_of,
)

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --page: #fff; --line: #d1d9e0;
  --box: #f6f8fa; --good: #1a7f37; --bad: #c1121f; --warn: #9a6700; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --page: #0d1117;
  --line: #3d444d; --box: #151b23; --good: #2ea043; --bad: #f85149; --warn: #d29922; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1.25rem; background: var(--page);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0 0 .75rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
.verdict { border-left: .4rem solid var(--good); background: var(--box); padding: .75rem 1rem;
  margin: .5rem 0; } .verdict.fault { border-color: var(--bad); }
.verdict.warning { border-color: var(--warn); }
.wide { overflow-x: auto; } table { border-collapse: collapse; margin: .5rem 0;
  font-variant-numeric: tabular-nums; } th, td { text-align: left; padding: .25rem .75rem;
  border-bottom: 1px solid var(--line); vertical-align: top; } th { font-weight: 600; }
th, td:nth-child(-n + 2) { white-space: nowrap; }
.fault b { color: var(--bad); } .warning b { color: var(--warn); }
.soft, figcaption { color: var(--soft); font-size: .9rem; }
ul { padding-left: 1.2rem; margin: .25rem 0; } figure { margin: .75rem 0; overflow-x: auto; }
svg { display: block; max-width: 100%; height: auto; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; } svg .axis { stroke: var(--line); }
@media print { body { padding: 0; font-size: 11pt; } figure, li, tr { break-inside: avoid; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""
COLORS = ("#3b6ea5", "#b3402a", "#4b8b3b", "#8250a0", "#b8860b", "#57606a")
WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 12, 44


def page(
    reports: Sequence[ServerReport], comparison: Comparison | None, command: Sequence[str]
) -> str:
    """Return the complete page of one or two servers."""
    title = "lockstep probe: " + ", ".join(report.model for report in reports)
    parts = [f"<h1>{escape(title)}</h1>", *(_verdict(report) for report in reports)]
    if comparison is not None:
        parts.append(_comparison(reports, comparison))
    for report in reports:
        parts += [_summary(report), *(_section(section) for section in report.sections)]
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    about = f"lockstep {lockstep.__version__}, {written}. Command: {' '.join(command)}"
    parts.append(f'<p class="soft">{escape(about)}</p>')
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _verdict(report: ServerReport) -> str:
    kind = "fault" if report.count("fault") else "warning" if report.count("warning") else ""
    return f'<p class="verdict {kind}">{escape(report.verdict)}</p>'


def _summary(report: ServerReport) -> str:
    head = ("section", "result", "figures", "requests")
    rows = tuple(
        (
            section.title,
            section.state,
            "; ".join(f"{name}: {text_of(v)}" for name, v in list(section.figures.items())[:3]),
            str(section.requests),
        )
        for section in report.sections
    )
    about = f"{report.url}, {report.requests} requests in {report.seconds:.0f} s"
    if report.interrupted:
        about += ", interrupted"
    return (
        f"<section><h2>{escape(report.model)}</h2>"
        f'<p class="soft">{escape(about)}</p>{_table(Table(head, rows))}</section>'
    )


def _comparison(reports: Sequence[ServerReport], comparison: Comparison) -> str:
    head = ("section", "figure", *(f"{report.model} at {report.url}" for report in reports))
    text = f"{comparison.identical} of {comparison.compared} greedy answers are identical."
    return (
        f"<section><h2>Side by side</h2><p>{text}</p>"
        f"{_table(Table(head, comparison.rows))}</section>"
    )


def _section(section: Section) -> str:
    parts = [f"<section><h2>{escape(section.title)}: {escape(section.state)}</h2>"]
    if section.stopped:
        parts.append(f'<p class="soft">Stopped early: {escape(section.stopped)}.</p>')
    findings = "".join(_finding(finding) for finding in section.findings)
    parts.append(f"<ul>{findings}</ul>" if findings else "")
    figures = "".join(
        f"<li>{escape(name)}: {escape(text_of(value))}</li>"
        for name, value in section.figures.items()
    )
    parts.append(f"<ul>{figures}</ul>" if figures else "")
    parts += [_table(table) for table in section.tables]
    parts += [_plot(plot) for plot in section.plots]
    lacking = "".join(
        f"<li>{escape(name)}: {escape(why)}</li>" for name, why in section.unsupported.items()
    )
    parts.append(
        f'<p>Not supported by the server:</p><ul class="soft">{lacking}</ul>' * bool(lacking)
    )
    return "".join(parts) + "</section>"


def _finding(finding: Finding) -> str:
    times = f" ({finding.count} times)" if finding.count > 1 else ""
    return (
        f'<li class="{finding.severity}"><b>{finding.severity}</b>: '
        f'{escape(finding.name)}{times}<br><span class="soft">{escape(finding.detail)}</span></li>'
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    rows = (
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _plot(plot: Plot) -> str:
    """Return an inline SVG of a plot. Both axes begin at 0."""
    points = [point for series in plot.series.values() for point in series]
    if not points:
        return ""
    # A constant 0 must not divide by 0.
    x_max = max(x for x, _ in points) or 1.0
    y_max = max(y for _, y in points) * 1.05 or 1.0
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    body = []
    for step in range(5):
        y = TOP + height * (1 - step / 4)
        x = LEFT + width * step / 4
        body.append(f'<line class="axis" x1="{LEFT}" x2="{LEFT + width}" y1="{y}" y2="{y}"/>')
        body.append(
            f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{text_of(y_max * step / 4)}</text>'
            f'<text x="{x}" y="{TOP + height + 16}" text-anchor="middle">'
            f"{text_of(x_max * step / 4)}</text>"
        )
    body.append(
        f'<text x="{LEFT + width / 2}" y="{HEIGHT - 6}" text-anchor="middle">'
        f"{escape(plot.x_label)}</text>"
    )
    for index, (name, series) in enumerate(plot.series.items()):
        color = COLORS[index % len(COLORS)]
        pixels = [(LEFT + x / x_max * width, TOP + (1 - y / y_max) * height) for x, y in series]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
        body.append(f'<polyline fill="none" stroke="{color}" points="{line}"/>')
        body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in pixels]
        y = TOP + 12 + index * 18
        body.append(f'<circle cx="{LEFT + width + 14}" cy="{y - 4}" r="4" fill="{color}"/>')
        body.append(f'<text x="{LEFT + width + 24}" y="{y}">{escape(name)}</text>')
    caption = f"{plot.title} ({plot.y_label})"
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
        f'aria-label="{escape(caption)}">{"".join(body)}</svg>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )
