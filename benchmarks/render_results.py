"""Write benchmarks/RESULTS.md from benchmarks/results/*.json.

    python benchmarks/render_results.py

A file of results is one section: {"title", "order", "cells"}. A cell is one measured quantity with
its latest figure: {"cell", "figure", "unit", "date", "commit", "machine", "command"}. Replace the
figure of a cell when it is measured again, and keep the old one in benchmarks/log/.
"""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PAGE = FOLDER / "RESULTS.md"
FIELDS = ("cell", "figure", "unit", "date", "commit", "machine", "command")
INTRODUCTION = """# Results

Latest figure of every measured quantity. `python benchmarks/render_results.py` writes this page
from `benchmarks/results/`. [log/](log/2026-11.md) has all earlier measurements with their notes and
limits.

Steps have dummy weights of the real dimensions and greedy sampling. A row has one token, K drafts
and context 2,048 (DeepSeek-V3: 4,096). Host time is excluded. `lockstep bench MODEL --floor`
computes the roofline of a step. "Not recorded": the log names no commit for this figure.
"""


def sections() -> list[dict[str, Any]]:
    """Return the sections of all result files in their order.

    Raises ValueError if a cell lacks a field or occurs twice in its section.
    """
    loaded = [json.loads(path.read_text()) for path in sorted((FOLDER / "results").glob("*.json"))]
    for section in loaded:
        names = [cell["cell"] for cell in section["cells"]]
        if len(set(names)) < len(names):
            raise ValueError(f"{section['title']}: a cell occurs twice; keep its latest figure")
        for cell in section["cells"]:
            if tuple(cell) != FIELDS:
                raise ValueError(f"{cell} must have the fields {', '.join(FIELDS)} in this order")
    return sorted(loaded, key=lambda section: section["order"])


def table(cells: list[dict[str, str]]) -> str:
    """Return a Markdown table of cells."""
    head = "| quantity | figure | unit | date, commit | machine | command |"
    rows = [head, "|" + "---|" * 6]
    for c in cells:
        columns = (c["cell"], c["figure"], c["unit"], f"{c['date']}, {c['commit']}", c["machine"])
        rows.append(f"| {' | '.join(columns)} | `{c['command']}` |")
    return "\n".join(rows)


def page() -> str:
    """Return the text of RESULTS.md."""
    parts = [f"## {s['title']}\n\n{table(s['cells'])}\n" for s in sections()]
    return "\n".join([INTRODUCTION, *parts])


if __name__ == "__main__":
    PAGE.write_text(page())
