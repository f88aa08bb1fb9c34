"""SVG plot of the difference of log-probabilities by position in the window."""

from collections.abc import Sequence
from html import escape
from math import log10

from lockstep.bench.cache_quality import CacheDtypes, Quality

WIDTH = 800
"""Width in pixels."""
PANEL = 340
"""Height of the panel in pixels; the legend is below it."""
LINE = 18
"""Height of a legend line in pixels."""
LEFT = 80
RIGHT = 20
TOP = 40
AXIS = 44
"""Height of the axis labels in pixels."""
BINS = 64
"""Number of bins along a window; each point is the mean of one."""
MIN_DIFFERENCE = 1e-9
"""Smallest plotted difference in nats."""
COLORS = ("#3b6ea5", "#b3402a", "#4b8b3b", "#8250a0", "#b8860b", "#57606a")
STYLE = 'font-family="DejaVu Sans, Verdana, Arial, sans-serif" font-size="12" fill="#1f2328"'


def label_of(dtypes: CacheDtypes) -> str:
    """Return the label of a pair of cache dtypes."""
    return f"kv {dtypes.kv_cache_dtype}, state {dtypes.mamba_ssm_cache_dtype}"


def points_of(quality: Quality, window: int) -> list[tuple[float, float]]:
    """Return (position, mean difference) along a window of this length."""
    sums: dict[int, list[float]] = {}
    positions = quality.measured.scores.positions
    for position, difference in zip(positions, quality.differences, strict=True):
        sums.setdefault(position * BINS // (window + 1), []).append(difference)
    width = (window + 1) / BINS
    return [
        ((bin_index + 0.5) * width, sum(values) / len(values))
        for bin_index, values in sorted(sums.items())
    ]


def plot(qualities: Sequence[Quality], window: int) -> str:
    """Return an SVG plot with one line per pair of cache dtypes, on a log scale.

    The first pair is the baseline and has no line.
    """
    lines = [(label_of(q.measured.dtypes), points_of(q, window)) for q in qualities[1:]]
    differences = [max(y, MIN_DIFFERENCE) for _, points in lines for _, y in points]
    high = _power(max(differences), 1)
    low = min(_power(min(differences), 0), high - 1)
    inner_width = WIDTH - LEFT - RIGHT
    legend_top = TOP + PANEL + AXIS
    height = legend_top + len(lines) * LINE + LINE // 2

    def to_pixels(x: float, y: float) -> str:
        height_share = (log10(max(y, MIN_DIFFERENCE)) - low) / (high - low)
        return f"{LEFT + x / window * inner_width:.1f},{TOP + (1 - height_share) * PANEL:.1f}"

    body = [
        f'<rect width="{WIDTH}" height="{height}" fill="#fcfcfa"/>',
        f'<text x="{LEFT}" y="22">mean |difference of log-probability|, nats, against kv auto, '
        "state auto</text>",
    ]
    for power in range(low, high + 1):
        y = TOP + (high - power) / (high - low) * PANEL
        body.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
                    'stroke="#d0d7de"/>')  # fmt: skip
        body.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>')
    for quarter in range(5):
        x = LEFT + quarter / 4 * inner_width
        y = TOP + PANEL + 16
        body.append(
            f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{window * quarter // 4}</text>'
        )
    body.append(f'<text x="{LEFT + inner_width / 2:.1f}" y="{TOP + PANEL + 32}" '
                'text-anchor="middle">position in the window, tokens</text>')  # fmt: skip
    for index, (name, points) in enumerate(lines):
        dashes = ("none", "6 3", "2 2")[index // len(COLORS) % 3]
        style = f'fill="none" stroke="{COLORS[index % len(COLORS)]}" stroke-dasharray="{dashes}"'
        pixels = " ".join(to_pixels(*point) for point in points)
        body.append(f'<polyline {style} points="{pixels}"/>')
        y = legend_top + index * LINE + LINE // 2
        body.append(f'<line {style} x1="{LEFT}" x2="{LEFT + 40}" y1="{y}" y2="{y}"/>')
        body.append(f'<text x="{LEFT + 50}" y="{y + 4}">{escape(name)}</text>')
    header = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" {STYLE}>'
    )
    return "\n".join([header, *body, "</svg>\n"])


def _power(value: float, offset: int) -> int:
    """Return the exponent of the power of ten below a value, plus an offset."""
    return int(log10(value) // 1) + offset
