"""Draw the plots of the documentation from the tables of benchmarks/log/2026-11.md alone.

    python docs/plots.py          # writes docs/images/vllm.svg; needs matplotlib (extra `bench`)

tokens/s: without drafts a row gets one token a step, so rows / time of a step; with drafts, the
figures that the log gives.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "log" / "2026-11.md"
PLOT = ROOT / "docs" / "images" / "vllm.svg"
SECTION = "steps, alone and with their host, H200"
ENGINE_COLUMN = 8
VLLM_COLUMN = 9
COLORS = {"Lockstep": "#3b6ea5", "vLLM 0.20.2": "#b9bec5"}


@dataclass(frozen=True)
class Speed:
    """Speed in tokens/s of one engine; `low` and `high` differ where the log gives a range."""

    low: float
    high: float

    @property
    def label(self) -> str:
        """Return the figure, or the range, in whole tokens/s."""
        ends = [f"{self.low:,.0f}", f"{self.high:,.0f}"]
        return ends[0] if ends[0] == ends[1] else " to ".join(ends)


@dataclass(frozen=True)
class Pair:
    """A model with K drafts at some rows, in both engines."""

    model: str
    context: str
    drafts: int
    rows: int
    ours: Speed
    theirs: Speed


def section(text: str) -> str:
    """Return the part of the log under the heading with SECTION."""
    parts = [part for part in text.split("\n## ") if SECTION in part.splitlines()[0]]
    return parts[0]


def speed(rows: int, ms: str) -> Speed:
    """Return tokens/s of steps of these ms, one token a row; "13.71 to 14.82" is a range."""
    ends = sorted(rows / float(end) * 1000 for end in ms.split(" to "))
    return Speed(ends[0], ends[-1])


def drafted(text: str) -> dict[int, tuple[Speed, Speed]]:
    """Return rows -> (Lockstep, vLLM) of Qwen3.6-27B with 3 drafts, from the line of tokens/s."""
    line = re.search(r"Tokens/s of the engine.*?, ([\d/ ]+) rows: (.*?); vLLM ([\d,/ ]+\d)", text)
    assert line is not None, "the log has no line of tokens/s"
    rows, ours, theirs = (
        [float(number.replace(",", "")) for number in part.split(" / ")] for part in line.groups()
    )
    return {int(r): (Speed(a, a), Speed(b, b)) for r, a, b in zip(rows, ours, theirs, strict=True)}


def pairs(results: str) -> list[Pair]:
    """Return every pair for which the log has both engines, in the order of its table."""
    text = section(results)
    known = drafted(text)
    pairs_by_rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| Qwen") or not cells[VLLM_COLUMN]:
            continue
        model = cells[0]
        rows = int(cells[2])
        drafts = int(cells[3])
        ours = speed(rows, cells[ENGINE_COLUMN])
        theirs = speed(rows, cells[VLLM_COLUMN])
        if drafts:
            ours, theirs = known[rows]
        pairs_by_rows.append(Pair(model, cells[1], drafts, rows, ours, theirs))
    return pairs_by_rows


def name(pair: Pair) -> str:
    """Return the label under the bars of a pair."""
    drafts = f"MTP, K={pair.drafts}" if pair.drafts else "no drafts"
    return f"{pair.model}, {drafts}\ncontext {pair.context}"


def draw(pairs_by_rows: list[Pair], path: Path) -> None:
    """Draw one panel for each number of rows, each with an axis from 0."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "lockstep", "font.size": 10}
    )
    from matplotlib import pyplot

    rows = sorted({pair.rows for pair in pairs_by_rows})
    figure, panels = pyplot.subplots(
        len(rows), 1, figsize=(7.8, 6.8), layout="constrained", facecolor="#fcfcfa"
    )
    for panel, count in zip(panels, rows, strict=True):
        shown = [pair for pair in pairs_by_rows if pair.rows == count]
        for side, engine in ((-0.2, "Lockstep"), (0.2, "vLLM 0.20.2")):
            speeds = [pair.ours if engine == "Lockstep" else pair.theirs for pair in shown]
            positions = [position + side for position in range(len(shown))]
            bars = panel.barh(
                positions,
                [s.low for s in speeds],
                height=0.38,
                color=COLORS[engine],
                label=engine,
            )
            panel.bar_label(bars, [s.label for s in speeds], padding=4, color="#1f2328")
        panel.set_yticks(range(len(shown)), [name(pair) for pair in shown])
        panel.invert_yaxis()
        panel.margins(x=0.16)
        panel.set_facecolor("#fcfcfa")
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_title(f"{count} row{'s' if count > 1 else ''}", loc="left", fontweight="bold")
    panels[0].legend(frameon=False, loc="center right")
    panels[-1].set_xlabel("tokens/s, bf16, one H200")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    path.write_text("".join(f"{line.rstrip()}\n" for line in path.read_text().splitlines()))


if __name__ == "__main__":
    draw(pairs(RESULTS.read_text()), PLOT)
