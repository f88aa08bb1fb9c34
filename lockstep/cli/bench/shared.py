"""Bounds and readings that several of the benchmarks share."""

from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.errors import ConfigError, choice_error
from lockstep.settings import check_writable

MOST_CONTEXT = 1 << 20
"""Tokens of a row: of its prompt, of its answer, or in the cache that kernels are timed at."""
MOST_ROWS = 1 << 16
"""Rows of a kernel's call, and tokens of each of them."""
MOST_RUNS = 10_000
"""Runs of a measurement, those that do not count among them."""
Json = Annotated[
    bool,
    typer.Option(
        "--json", help="print only one JSON object; without it, a pipe gets the object last"
    ),
]
Temperature = Annotated[float, typer.Option(min=0.0, max=100.0, help="0: greedy")]


def check_plot(path: Path) -> None:
    """Raises ConfigError where no PNG can be written."""
    if path.suffix.lower() != ".png":
        allowed = "a name that ends in .png"
        raise choice_error(ConfigError, "plot", str(path), allowed, "Name another file.")
    check_writable("plot", path)


def short(value: Any) -> Any:
    """Floats to six digits, in lists too."""
    if isinstance(value, (list, tuple)):
        return [short(part) for part in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def numbers(name: str, value: str, most: int) -> tuple[int, ...]:
    """1,8,64 -> (1, 8, 64). Raises ConfigError."""
    try:
        found = tuple(int(part) for part in value.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1 or max(found) > most:
        allowed = f"whole numbers from 1 to {most}, separated by commas, e.g. 1,8,64"
        raise choice_error(ConfigError, name, value, allowed, "Pass such numbers.")
    return found
