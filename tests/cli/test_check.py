"""An interrupted check reports what it has compared, and that it is incomplete."""

import io
import itertools
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lockstep.check import Interrupted
from lockstep.check.matrix import setups, tokens
from lockstep.check.matrix.setups import Setup
from lockstep.check.report.report import Report, Tally
from lockstep.cli import app
from lockstep.cli.check import _outputs_tables, _sections_table
from lockstep.errors import ConfigError
from tests.tiny_model import TWO_LAYERS, make_model

SETUP = Setup("none", 0, "cold", "none")
PATIENCE = 120.0


class TerminalReader(threading.Thread):
    """Thread that reads a terminal until it is closed, so that the writer never blocks."""

    def __init__(self, terminal: int) -> None:
        super().__init__(daemon=True)
        self._terminal = terminal
        self.text = ""
        self.second_scenario = threading.Event()
        self.start()

    def run(self) -> None:
        """Collect the text; one scenario is compared once the bar shows a second one."""
        while new := self._read():
            self.text += new.decode(errors="replace")
            if len(set(re.findall(r"scenario \d+", self.text))) == 2:
                self.second_scenario.set()

    def _read(self) -> bytes:
        try:
            return os.read(self._terminal, 4096)
        except OSError:
            return b""


MATRIX = ["--sections", "tokens,cache"]
"""Options for the sections of the matrix; a size without scenarios runs it alone."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the arguments that choose a tiny model with random weights."""
    folder = make_model(tmp_path_factory.mktemp("tiny") / "model", **TWO_LAYERS)
    return ["--load-format", "dummy", str(folder)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "signals", [pytest.param([signal.SIGINT], marks=pytest.mark.slow), [signal.SIGTERM] * 2]
)
def test_signal_ends_a_check_with_its_report(
    signals: list[int], tiny: list[str], tmp_path: Path
) -> None:
    """timeout sends SIGTERM twice. The second shard begins with scenarios."""
    page = tmp_path / "page.html"
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "lockstep", "check", *tiny, *MATRIX, "--quick"]
    with subprocess.Popen(
        [*command, "--shard", "2/2", "--report", str(page)],
        stdout=subprocess.PIPE,
        stderr=slave,
        text=True,
        env={**os.environ, "TERM": "xterm"},
    ) as process:
        os.close(slave)
        reader = TerminalReader(master)
        assert reader.second_scenario.wait(PATIENCE), reader.text
        for number in signals:
            process.send_signal(number)
        out, _ = process.communicate(timeout=PATIENCE)
    reader.join(PATIENCE)
    os.close(master)
    assert process.returncode == 130 and "Traceback" not in reader.text + out
    verdict = re.search(
        r"Stopped early: (\d+) of (\d+) scenarios and 0 of 22 matrix cases were run", out
    )
    assert verdict is not None, out
    assert 1 <= int(verdict[1]) <= int(verdict[2])
    assert verdict[0] in page.read_text() and "All outputs equal" not in page.read_text()


def test_json_says_that_a_check_was_interrupted(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal between two engines ends the check; the previous handler is restored."""
    previous_handler = signal.getsignal(signal.SIGTERM)
    run_engine = tokens._run_engine

    def signalled(*rest: Any) -> None:
        run_engine(*rest)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setitem(setups.SIZES, "quick", setups.Size(max_tokens=4, alone=2, companions=1))
    monkeypatch.setattr(tokens, "setups", lambda size, drafters, graphs: [SETUP, SETUP])
    monkeypatch.setattr(tokens, "_run_engine", signalled)
    arguments = ["check", *tiny, *MATRIX, "--quick", "--kv-cache-dtype", "all", "--json"]
    result = CliRunner().invoke(app, arguments)
    report = json.loads(result.stdout)
    assert result.exit_code == 130 and report["interrupted"] is True
    assert (report["cases"], report["failed"], len(report["engines"])) == (11, 0, 1)
    assert "11 of 22 matrix cases were run" in report["verdict"]
    assert signal.getsignal(signal.SIGTERM) == previous_handler


@pytest.mark.parametrize("differs", [False, True])
def test_interruption_ends_the_loop_over_formats(
    monkeypatch: pytest.MonkeyPatch, differs: bool
) -> None:
    """The second format is interrupted; a difference of the first decides the exit status."""
    formats = []

    def fake_run(size: str, settings: dict[str, Any], *rest: Any) -> Report:
        formats.append(settings["kv_cache_dtype"])
        report = Report(size, tallies=[Tally(SETUP, 5, 0, 1.0)])
        if len(formats) == 2:
            report.interrupted = True
            raise Interrupted(report)
        if differs:
            report.fail(SETUP, "alone", "token 1 instead of 2")
        return report

    monkeypatch.setattr(sys.modules["lockstep.cli.check"], "_run", fake_run)
    result = CliRunner().invoke(app, ["check", "--kv-cache-dtype", "all", "--json"])
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["interrupted"] for line in reports] == [False, True]
    assert result.exit_code == (1 if differs else 130) and len(formats) == 2


def test_all_formats_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit is that of the whole command; a format that is skipped leaves its share."""
    limits = []

    def fake_run(
        size: str, settings: dict[str, Any], options: dict[str, Any], *rest: Any
    ) -> Report:
        limits.append(options["seconds"])
        if len(limits) == 2:
            raise ConfigError("this format is not supported")
        return Report(size, tallies=[Tally(SETUP, 5, 0, 1.0)])

    monkeypatch.setattr(sys.modules["lockstep.cli.check"], "_run", fake_run)
    result = CliRunner().invoke(app, ["check", "--kv-cache-dtype", "all", "--seconds", "600"])
    assert result.exit_code == 0, result.output
    count = len(limits)
    expected = [600 / (count - index) for index in range(count)]
    # No time passes here, so each format may take an equal part of all that is left.
    assert limits == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("command", ["check.quality", "check"])
def test_signal_before_the_first_report(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def signalled(*rest: Any) -> None:
        signal.raise_signal(signal.SIGTERM)

    module = sys.modules["lockstep.cli." + command.removeprefix("check.")]
    monkeypatch.setattr(module, "_run", signalled)
    options = ["--text", __file__, "--kv-cache-dtype", "fp8"] if "quality" in command else []
    result = CliRunner().invoke(app, [*command.split("."), *options], catch_exceptions=False)
    assert result.exit_code == 130 and "equal" not in result.output


def test_tables_fit_80_columns() -> None:
    """The table has two drafters in two graph modes, and all columns."""
    phases = (*setups.PHASES, setups.SCENARIO)
    report = Report("quick")
    for drafting, graph in itertools.product(("oracle", "ngram"), ("none", "full")):
        for phase in (*phases, *setups.TESTS):
            report.add(Tally(Setup(drafting, 3, phase, graph), cases=120, failed=0, seconds=1.0))
        for rows in (1, 2, 7, 16, 64):
            setup = Setup(drafting, 3, setups.LOGITS, graph)
            report.add(Tally(setup, 128, 0, 1.0, f"{rows} rows"))
    report.omit("kernels", "kernels", "time was up")
    console = Console(width=80, file=io.StringIO())
    for table in (*_outputs_tables(report), _sections_table(report)):
        console.print(table)
    shown = console.file.getvalue()
    headings = shown.splitlines()[1]
    assert all(phase in headings for phase in phases) and "…" not in shown
    assert shown.count("120/120") == 4 * len(phases) and shown.count("128/128") == 4 * 5
    lines = [line.split() for line in shown.splitlines()]
    assert ["kernels", "not", "run", "0", "time", "was", "up"] in lines
    assert ["sampling", "passed", "480/480", "0"] in lines


def test_sections_of_a_tiny_model(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only the selected sections run; the report says why the others did not."""
    monkeypatch.setitem(setups.SIZES, "quick", setups.Size(max_tokens=4, alone=2, companions=1))
    page = tmp_path / "page.html"
    options = ["--quick", "--sections", "cache,capture", "--device", "cpu", "--report", str(page)]
    result = CliRunner().invoke(app, ["check", *tiny, *options, "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == 0
    states = {section["name"]: section["state"] for section in report["sections"]}
    assert states.pop("cache") == "passed" and set(states.values()) == {"not run"}
    reasons = {group["reason"]: group["parts"] for group in report["not_exercised"]}
    assert reasons["no GPU"] == ["captured CUDA graphs"]
    assert reasons["not selected by --sections"] == [
        *("kernels", "logits of other batches", "logits against transformers"),
        *("tests of distributions", "random scenarios", "matrix of tokens"),
    ]
    assert report["verdict"].endswith("Not run: kernels, logits, sampling, tokens, capture.")
    shown = page.read_text()
    assert "<dt>no GPU</dt><dd>captured CUDA graphs</dd>" in shown
    assert re.search("<th>cache</th><td[^>]*>passed<", shown)


def test_check_without_comparisons_is_no_success(tiny: list[str]) -> None:
    result = CliRunner().invoke(app, ["check", *tiny, "--sections", "capture", "--device", "cpu"])
    assert result.exit_code == 1 and "Nothing was compared." in result.stdout


def test_unknown_section_is_refused(tiny: list[str]) -> None:
    result = CliRunner().invoke(app, ["check", *tiny, "--sections", "tokens,speed"])
    message = "sections='speed' is not allowed; allowed: kernels, logits, sampling, tokens"
    assert message in str(result.exception)
    options = ["--replay", "file.json", "--sections", "tokens"]
    result = CliRunner().invoke(app, ["check", *tiny, *options])
    assert "--replay runs one file" in str(result.exception)
