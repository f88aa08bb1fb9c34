"""Draw docs/images/packages.svg: the packages of lockstep and their imports, from the code alone.

    python docs/package_diagram.py     # writes the picture; tests/test_docs.py finds a stale one

Every package or module directly below lockstep/ is a box; its folders are listed below its name. A
box is one row above the highest box that it imports. Imports that follow from others are left out
(transitive reduction), so that the lines show the layers and not every dependency.
"""

import re
from collections.abc import Iterable
from graphlib import TopologicalSorter
from html import escape
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "lockstep"
PICTURE = ROOT / "docs" / "images" / "packages.svg"
IMPORT = re.compile(r"^[ \t]*(?:from|import) lockstep(?:\.(\w+)| import ([\w, ]+))", re.MULTILINE)
HIDDEN = ("__init__", "__main__", "errors")
"""Modules that are not drawn: the entry points, and the errors, which all others import."""

WIDTH = 980
MARGIN = 16
ROW_HEIGHT = 92
BOX_HEIGHT = 54
GAP = 18
CHARACTER = 7.3
"""Width of a character of a folder list at 12 px, in px."""
MAX_FOLDER_CHARACTERS = 64
"""Maximum characters of a box's folder list."""
STYLE = """
  .name { font: bold 14px sans-serif; font-size: 14px; fill: #1f2328 }
  .folders { font: 12px sans-serif; font-size: 12px; fill: #57606a }
  .box { fill: #ffffff; stroke: #3b6ea5; stroke-width: 1.5 }
  .import { fill: none; stroke: #9aa7b5; stroke-width: 1.2 }
"""


def imports() -> dict[str, set[str]]:
    """Return package or module -> the packages and modules of lockstep that it imports."""
    graph: dict[str, set[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        targets = graph.setdefault(package, set())
        for match in IMPORT.finditer(path.read_text()):
            names = [match[1]] if match[1] else re.findall(r"\w+", match[2])
            targets.update(name for name in names if _is_part(name))
    shown = {name for name in graph if name not in HIDDEN}
    return {name: (graph[name] & shown) - {name} for name in sorted(shown)}


def _is_part(name: str) -> bool:
    return (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").is_file()


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the graph without edges that follow from other paths."""
    below: dict[str, set[str]] = {}
    for name in TopologicalSorter(graph).static_order():
        below[name] = graph[name].union(*(below[target] for target in graph[name]))
    return {
        name: {t for t in targets if not any(t in below[other] for other in targets - {t})}
        for name, targets in graph.items()
    }


def rows(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the names by row, the highest row first."""
    height: dict[str, int] = {}
    for name in TopologicalSorter(graph).static_order():
        height[name] = 1 + max((height[target] for target in graph[name]), default=-1)
    levels: list[list[str]] = [[] for _ in range(max(height.values()) + 1)]
    for name in sorted(height):
        levels[height[name]].append(name)
    return levels[::-1]


def folders(name: str) -> str:
    """Return the list of a package's folders that have code, shortened."""
    inner = sorted(path.parent.name for path in (SOURCE / name).glob("*/__init__.py"))
    text = ""
    for index, folder in enumerate(inner):
        longer = f"{text}  {folder}/".strip()
        if len(longer) > MAX_FOLDER_CHARACTERS:
            return f"{text}  + {len(inner) - index}"
        text = longer
    return text


def place_boxes(levels: list[list[str]]) -> dict[str, tuple[float, float, float]]:
    """Return name -> (left, top, width) of its box, in px. Boxes of a row are centered."""
    boxes = {}
    for index, names in enumerate(levels):
        widths = [max((len(name) + 3) * 9, len(folders(name)) * CHARACTER) + 28 for name in names]
        left = (WIDTH - sum(widths) - GAP * (len(names) - 1)) / 2
        for name, width in zip(names, widths, strict=True):
            boxes[name] = (left, MARGIN + index * ROW_HEIGHT, width)
            left += width + GAP
    return boxes


def svg() -> str:
    """Return the picture."""
    graph = reduced(imports())
    levels = rows(imports())
    boxes = place_boxes(levels)
    height = 2 * MARGIN + (len(levels) - 1) * ROW_HEIGHT + BOX_HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img">',
        "<title>Packages of lockstep; lines lead down to what a package imports</title>",
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fcfcfa"/>',
        *(_line(boxes[name], boxes[t]) for name in graph for t in sorted(graph[name])),
        *(part for name in boxes for part in _box(name, *boxes[name])),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _line(source: tuple[float, float, float], target: tuple[float, float, float]) -> str:
    """Return the curve from a box down to a box that it imports."""
    x = source[0] + source[2] / 2
    y = source[1] + BOX_HEIGHT
    end_x = target[0] + target[2] / 2
    end_y = target[1]
    bend = (end_y - y) / 2
    return (
        f'<path class="import" d="M{x:.0f} {y:.0f} C{x:.0f} {y + bend:.0f} '
        f'{end_x:.0f} {end_y - bend:.0f} {end_x:.0f} {end_y:.0f}"/>'
    )


def _box(name: str, left: float, top: float, width: float) -> Iterable[str]:
    middle = left + width / 2
    inner = folders(name)
    shown = f"{name}/" if (SOURCE / name).is_dir() else f"{name}.py"
    yield (
        f'<rect class="box" x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" '
        f'height="{BOX_HEIGHT}" rx="6"/>'
    )
    baseline = top + (23 if inner else 32)
    yield (
        f'<text class="name" x="{middle:.0f}" y="{baseline:.0f}" '
        f'text-anchor="middle">{escape(shown)}</text>'
    )
    if inner:
        yield (
            f'<text class="folders" x="{middle:.0f}" y="{top + 42:.0f}" '
            f'text-anchor="middle">{escape(inner)}</text>'
        )


if __name__ == "__main__":
    PICTURE.write_text(svg())
