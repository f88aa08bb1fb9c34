"""HTML report of a check: one self-contained page for screens, phones and paper."""

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

import torch

import lockstep
from lockstep.check.matrix.setups import KERNEL, LOGITS, PHASES, SCENARIO, TESTS
from lockstep.check.report.report import Report, SectionState, Tally
from lockstep.check.sections import SECTIONS

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --page: #ffffff;
  --line: #d1d9e0; --box: #f6f8fa; --good: #1a7f37; --bad: #c1121f; --none: #eaeef2;
  --on: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --page: #0d1117;
  --line: #3d444d; --box: #151b23; --good: #2ea043; --bad: #f85149; --none: #21262d;
  --on: #0d1117; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1.25rem; background: var(--page);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0 0 .75rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.verdict { border-left: .4rem solid var(--good); background: var(--box); padding: .75rem 1rem;
  font-size: 1.1rem; } .verdict.bad { border-color: var(--bad); }
  .verdict.early { border-color: var(--soft); }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(8.5rem, 1fr));
  gap: .5rem; } .figures div { background: var(--box); padding: .5rem .75rem; }
.figures b { display: block; font-size: 1.3rem; font-variant-numeric: tabular-nums; }
.figures span, .soft, figcaption { color: var(--soft); font-size: .9rem; }
figure { margin: 0; overflow-x: auto; } svg { display: block; max-width: 100%; height: auto; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; } svg .on { fill: var(--on); }
svg .soft { fill: var(--soft); } svg .good { fill: var(--good); } svg .bad { fill: var(--bad); }
svg .none { fill: var(--none); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1rem; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; } ul { padding-left: 1.2rem; margin: .25rem 0; }
code { font: .9em ui-monospace, monospace; }
table { border-collapse: collapse; } th { text-align: left; }
th, td { padding: .2rem 1rem .2rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; } td.good { color: var(--good); } td.bad { color: var(--bad); }
td.soft { color: var(--soft); } .reasons { display: block; } .reasons dt { color: var(--ink); }
.reasons dd { margin-bottom: .5rem; }
@media (max-width: 34rem) { dl { grid-template-columns: 1fr; gap: 0; } dd { margin: 0 0 .5rem; } }
@media print { :root { color-scheme: light; --ink: #000; --soft: #444; --page: #fff;
  --line: #bbb; --box: #fff; --good: #1a7f37; --bad: #c1121f; --none: #eee; --on: #fff; }
  body { padding: 0; font-size: 11pt; max-width: none; } .figures div { border: 1px solid #bbb; }
  .verdict { border-top: 1px solid #bbb; border-bottom: 1px solid #bbb; }
  h2 { break-after: avoid; } figure, li { break-inside: avoid; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""
STATE_CLASSES = {
    SectionState.PASSED: "good",
    SectionState.PASSED_IN_PART: "",
    SectionState.FAILED: "bad",
    SectionState.NOT_RUN: "soft",
}
"""CSS class of each result of a section."""
MAX_FAILURES = 50
"""Maximum differences that the page lists."""
LABEL = 96
"""Width of row labels in pixels."""
CELL = 82
"""Width of a matrix cell in pixels."""
ROW = 26
"""Height of a matrix row in pixels."""
HEAD = 26
"""Height of column labels in pixels."""
PER_LINE = 15
"""Scenarios in a line."""
DOT = 16
"""Width and height of a scenario."""


def page(report: Report, command: Sequence[str]) -> str:
    """Return the complete page."""
    title, kind = _title(report)
    parts = [
        f'<h1>lockstep check: {title.lower()}</h1><p class="verdict{kind}">'
        f"{escape(report.verdict)}</p>",
        _section("Sections", _sections(report)),
        _figures(report),
        _failures(report),
        _section("Random scenarios", _scenarios(report)),
        _section("Combinations of features", _tuples(report)),
        _section("Matrix of engine settings", _matrix(report)),
        _section("Logits in other batches and chunks, bit for bit", _logits(report)),
        _section("Tests of distributions, logits and kernels", _tests(report)),
        _section("Not exercised", _not_exercised(report)),
        _section("About this run", _about(report, command)),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>lockstep check: {title}</title><style>{STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def write_page(path: Path, report: Report, command: Sequence[str]) -> None:
    """Write the page to a file."""
    path.write_text(page(report, command), encoding="utf-8")


def _title(report: Report) -> tuple[str, str]:
    """Return the page's title, and the CSS class of the verdict."""
    if report.failed:
        return "Differences found", " bad"
    if not report.cases:
        return "Nothing compared", " early"
    return ("Stopped early", " early") if report.interrupted else ("All outputs equal", "")


def _section(name: str, body: str) -> str:
    return f"<section><h2>{escape(name)}</h2>{body}</section>" if body else ""


def _figures(report: Report) -> str:
    """Return the section of event counters."""
    shown = {"cases": report.cases, "differences": report.failed, **report.exercised}
    boxes = (f"<div><b>{n:,}</b><span>{escape(name)}</span></div>" for name, n in shown.items())
    return _section("Exercised", f'<div class="figures">{"".join(boxes)}</div>')


def _sections(report: Report) -> str:
    """Return a table of the sections: result, cases, seconds, and why parts were not run."""
    if not report.section_seconds:
        return ""
    rows = []
    for one in report.sections:
        cases = f"{one.passed:,}/{one.cases:,}" if one.cases else ""
        cells = (one.name, one.state, cases, f"{one.seconds:.0f} s", one.reasons)
        kind = STATE_CLASSES[one.state]
        name, state, *rest = (escape(cell) for cell in cells)
        rows.append(
            f'<tr title="{escape(SECTIONS[one.name])}"><th>{name}</th>'
            f'<td class="{kind}">{state}</td>'
            + "".join(f"<td>{cell}</td>" for cell in rest)
            + "</tr>"
        )
    return f"<table>{''.join(rows)}</table>"


def _failures(report: Report) -> str:
    """Return the section of differences, at most MAX_FAILURES of them."""
    lines = []
    for failure in report.failures[:MAX_FAILURES]:
        position = "" if failure.position is None else f", output position {failure.position}"
        text = f"{failure.place}: {failure.request}{position} ({failure.sampling}): {failure.what}"
        where = f"; {failure.where}" if failure.where else ""
        file = escape(failure.file or "")
        replay = f"<br><code>lockstep check --replay {file}</code>" if file else ""
        lines.append(f"<li>{escape(text + where)}{replay}</li>")
    num_hidden = len(report.failures) - MAX_FAILURES
    more = f'<p class="soft">and {num_hidden} more</p>' if num_hidden > 0 else ""
    return _section("Differences", f"<ul>{''.join(lines)}</ul>{more}" if lines else "")


def _tallies_of(report: Report, *phases: str) -> list[Tally]:
    return [t for t in report.tallies if t.setup.phase in phases]


def _css_class(tallies: Sequence[Tally]) -> str:
    if not tallies:
        return "none"
    return "bad" if any(t.failed for t in tallies) else "good"


def _svg(width: int, height: int, name: str, body: str, caption: str) -> str:
    return (
        f'<figure><svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(name)}">{body}</svg><figcaption>{escape(caption)}</figcaption></figure>'
    )


def _logits(report: Report) -> str:
    """Return the outputs whose logits were compared, by engine."""
    tallies = _tallies_of(report, LOGITS)
    lines = []
    for drafting, graph in dict.fromkeys((t.setup.drafting, t.setup.graph) for t in tallies):
        of_engine = [t for t in tallies if (t.setup.drafting, t.setup.graph) == (drafting, graph)]
        cases, failed = (sum(getattr(t, name) for t in of_engine) for name in ("cases", "failed"))
        batches = ", ".join(dict.fromkeys(t.batch for t in of_engine))
        text = f"drafter {drafting}, graph {graph}: {cases - failed}/{cases} ({batches})"
        lines.append(f"<li>{escape(text)}</li>")
    return f"<ul>{''.join(lines)}</ul>" if lines else ""


def _matrix(report: Report) -> str:
    """Return one grid per graph mode: equal outputs by drafter and phase."""
    tallies = _tallies_of(report, *PHASES)
    graphs = dict.fromkeys(t.setup.graph for t in tallies)
    return "".join(_grid([t for t in tallies if t.setup.graph == graph], graph) for graph in graphs)


def _grid(tallies: Sequence[Tally], graph: str) -> str:
    rows = list(dict.fromkeys(t.setup.drafting for t in tallies))
    body = []
    for x, phase in enumerate(PHASES):
        center = LABEL + x * CELL + CELL // 2
        body.append(f'<text x="{center}" y="16" text-anchor="middle">{escape(phase)}</text>')
    for y, drafting in enumerate(rows):
        top = HEAD + y * ROW
        body.append(f'<text x="0" y="{top + 17}">{escape(drafting)}</text>')
        for x, phase in enumerate(PHASES):
            cell_tallies = [
                t for t in tallies if (t.setup.drafting, t.setup.phase) == (drafting, phase)
            ]
            body.append(_cell(cell_tallies, LABEL + x * CELL, top))
    dimensions = LABEL + len(PHASES) * CELL, HEAD + len(rows) * ROW
    caption = f"Graph mode {graph}: outputs equal to the plain run / outputs compared"
    return _svg(*dimensions, f"matrix, graph mode {graph}", "".join(body), caption)


def _cell(tallies: Sequence[Tally], x: int, y: int) -> str:
    kind = _css_class(tallies)
    box = f'<rect x="{x + 1}" y="{y + 1}" width="{CELL - 2}" height="{ROW - 2}" class="{kind}"/>'
    if not tallies:
        return box
    cases, failed = (sum(getattr(t, name) for t in tallies) for name in ("cases", "failed"))
    text = f'<text x="{x + CELL // 2}" y="{y + 17}" text-anchor="middle" class="on">'
    return f"{box}{text}{cases - failed}/{cases}</text>"


def _scenarios(report: Report) -> str:
    """Return a picture with one square per scenario, grouped by drafter."""
    tallies = _tallies_of(report, SCENARIO)
    if not tallies:
        return ""
    body = []
    y = 0
    for drafter in dict.fromkeys(t.setup.drafter for t in tallies):
        drafter_tallies = [t for t in tallies if t.setup.drafter == drafter]
        body.append(f'<text x="0" y="{y + 13}">{escape(drafter)}</text>')
        for index, tally in enumerate(drafter_tallies):
            x = LABEL + index % PER_LINE * DOT
            top = y + index // PER_LINE * DOT
            text = f"{tally.batch}, {tally.setup.drafting}: {tally.cases} outputs"
            body.append(
                f'<rect x="{x}" y="{top + 2}" width="{DOT - 3}" height="{DOT - 3}" '
                f'class="{_css_class([tally])}"><title>{escape(text)}</title></rect>'
            )
        y += -(-len(drafter_tallies) // PER_LINE) * DOT + 6
    answers = sum(t.cases for t in tallies)
    caption = f"{len(tallies)} scenarios of seed {report.seed}, {answers:,} outputs, by drafter"
    return _svg(LABEL + PER_LINE * DOT, y, "random scenarios", "".join(body), caption)


def _tuples(report: Report) -> str:
    """Return which combinations of feature values scenarios met, and which not, with reasons."""
    tuples = report.tuples
    if tuples is None:
        return ""
    parts = [f"<p>{escape(tuples.summary())}.</p>"]
    values = tuples.unmet_values()
    # Of tuples that were not met, the first ones are listed.
    num_unmet = tuples.num_feasible - tuples.num_met
    excluded = tuples.excluded()
    for title, number, lines in (
        ("Values that no request had", len(values), values),
        ("Not met", num_unmet, tuples.unmet()),
        ("Excluded", sum(excluded.values()), [f"{why}: {n}" for why, n in excluded.items()]),
    ):
        items = "".join(f"<li>{escape(line)}</li>" for line in lines)
        if items:
            summary = f"<summary>{escape(title)}: {number:,}</summary>"
            parts.append(f'<details>{summary}<ul class="soft">{items}</ul></details>')
    return "".join(parts)


def _tests(report: Report) -> str:
    """Return the results of tests: distributions, transformers, kernels."""
    tallies = _tallies_of(report, *TESTS, KERNEL)
    if not tallies:
        return ""
    wrong = [t.batch for t in tallies if t.failed]
    count = f"{len(tallies) - len(wrong)} of {len(tallies)} passed"
    named = ", ".join(dict.fromkeys(t.batch.partition(",")[0] for t in tallies))
    bad = f"<p>failed: {escape(', '.join(wrong))}</p>" if wrong else ""
    return f'<p>{count}.</p>{bad}<p class="soft">{escape(named)}</p>'


def _not_exercised(report: Report) -> str:
    """Return what was not run, one entry per reason."""
    items = "".join(
        f"<dt>{escape(reason)}</dt><dd>{escape('; '.join(parts))}</dd>"
        for reason, parts in report.not_exercised().items()
    )
    return f'<dl class="soft reasons">{items}</dl>' if items else ""


def _about(report: Report, command: Sequence[str]) -> str:
    about = {
        "command": " ".join(command),
        "size, shard, seed": f"{report.size}, {report.shard}, {report.seed}",
        "numerics": report.numerics,
        "lockstep": lockstep.__version__,
        "torch": torch.__version__,
        "Python": f"{platform.python_version()} on {platform.platform()}",
        "duration": f"{report.seconds:.0f} s",
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    lines = (f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in about.items())
    return f"<dl>{''.join(lines)}</dl>"
