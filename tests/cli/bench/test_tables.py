"""Number formats of bench tables, and output for people or programs."""

import io
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from lockstep.bench import Figures
from lockstep.cli.bench.tables import digits, figures_table
from lockstep.cli.show import print_result

FIGURES = Figures(
    requests=2,
    prompt_tokens=512,
    tokens=64,
    wall_tokens_per_s=183.5,
    wall_deviation=0.0,
    wall_cv=0.0,
    decode_tokens_per_s=265.9,
    decode_deviation=0.0,
    decode_cv=0.0,
    ms_per_step=7.52,
    ttft_ms=115.3,
    acceptance_length=1.0,
    acceptance_rate=0.0,
    runs=1,
)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1053.4, "1,053"), (895.2, "895"), (12.63, "12.6"), (0.01264, "0.0126"), (4.0, "4"), (0, "0")],
)
def test_digits(value: float, shown: str) -> None:
    assert digits(value) == shown


@pytest.mark.parametrize("runs", [1, 5])
def test_single_run_has_no_deviation(runs: int) -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(figures_table(replace(FIGURES, runs=runs), None, None))
    assert ("deviation" in out.getvalue()) == (runs > 1)


class Terminal(io.StringIO):
    """Standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stdout", "requested", "printed"),
    [(io.StringIO, False, True), (Terminal, False, False), (Terminal, True, True)],
)
def test_json_is_printed_unless_stdout_is_a_terminal(
    stdout: type[io.StringIO], requested: bool, printed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = stdout()
    monkeypatch.setattr(sys, "stdout", out)
    print_result({"a": 1}, requested)
    assert out.getvalue() == '{"a": 1}\n' * printed
