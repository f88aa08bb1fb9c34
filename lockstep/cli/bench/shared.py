"""Bounds, options and parsers that several benchmarks share."""

from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.errors import ConfigError, choice_error
from lockstep.settings import check_writable

MAX_CONTEXT = 1 << 20
"""Maximum tokens of a row: of its prompt, its output, or its cache."""
MAX_ROWS = 1 << 16
"""Maximum rows of a kernel call, and maximum tokens of a row."""
MAX_RUNS = 10_000
"""Maximum runs of a measurement, and maximum warm-up runs."""
Json = Annotated[
    bool,
    typer.Option(
        "--json", help="print only one JSON object; by default a pipe gets it after the table"
    ),
]
Temperature = Annotated[float, typer.Option(min=0.0, max=100.0, help="0: greedy")]


def check_plot(path: Path) -> None:
    """Raise ConfigError if the path is not a PNG file that can be written."""
    if path.suffix.lower() != ".png":
        allowed = "a name that ends in .png"
        raise choice_error(ConfigError, "plot", str(path), allowed, "Name another file.")
    check_writable("plot", path)


def round_floats(value: Any) -> Any:
    """Round floats to six significant digits, also in lists."""
    if isinstance(value, (list, tuple)):
        return [round_floats(element) for element in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def parse_counts(name: str, value: str, max_count: int) -> tuple[int, ...]:
    """Parse an option such as 1,8,64. Raises ConfigError; name: the option in the message."""
    try:
        counts = tuple(int(part) for part in value.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1 or max(counts) > max_count:
        allowed = f"whole numbers from 1 to {max_count}, separated by commas, e.g. 1,8,64"
        raise choice_error(ConfigError, name, value, allowed, "Pass such numbers.")
    return counts
