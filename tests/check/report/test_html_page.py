"""The HTML page is self-contained, and shows the contents of the report."""

import re
from html.parser import HTMLParser

import pytest

from lockstep.check.matrix.setups import PHASES, Setup
from lockstep.check.report.coverage import Coverage
from lockstep.check.report.html_page import MAX_FAILURES, page, write_page
from lockstep.check.report.report import Failure, Report, Tally
from lockstep.check.scenarios.covering import CoveringPlan
from lockstep.check.scenarios.met_tuples import MetTuples
from tests.check.scenarios.test_covering import small_table

VOID = {"meta", "br"}


class Balanced(HTMLParser):
    """Parser that fails if tags are not closed in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(text: str) -> str:
    parser = Balanced()
    parser.feed(text)
    parser.close()
    assert not parser.open
    return " ".join(parser.text)


def report(failures: int = 0) -> Report:
    tallies = [
        Tally(Setup("mtp", 3, phase, graph), 20, int(failures > 0), 1.0)
        for phase in PHASES
        for graph in ("full", "none")
    ]
    tallies += [
        Tally(Setup("oracle", 7, "scenario", "none"), 5, 0, 1.0, f"scenario {i}") for i in range(40)
    ]
    tallies.append(Tally(Setup("oracle", 7, "sampling", "none"), 1, 0, 1.0, "top_k, alone"))
    setup = Setup("mtp", 3, "cold", "none")
    failed = [
        Failure(
            setup, "alone", f"request {i}", "min_p", 4, "token <b> instead of 2", "norm", "f.json"
        )
        for i in range(failures)
    ]
    return Report(
        "quick", "cpu/fp32", tallies, failed, {"draft tokens": 12345}, coverage=Coverage(), seed=6
    )


def test_a_sound_report() -> None:
    html = page(report(), ["lockstep", "check", "--seed", "6"])
    text = read(html)
    for part in ("All outputs equal", "12,345", "20/20", "mtp K=3", "top_k"):
        assert part in text, part
    assert "40 scenarios of seed 6, 200 outputs" in text and "lockstep check --seed 6" in text
    assert "op sample" in text, "what was not exercised is named"
    assert html.count("<svg") == 3, "one picture per graph mode, and one of the scenarios"


def test_differences_are_listed_and_bounded() -> None:
    text = read(page(report(MAX_FAILURES + 7), ["lockstep"]))
    assert "Differences found" in text and "19/20" in text
    assert "token <b> instead of 2; norm" in text, "escaped, so it reads as it is"
    assert "lockstep check --replay f.json" in text and "and 7 more" in text
    assert f"request {MAX_FAILURES - 1} " in text.replace(",", " ")
    assert f"request {MAX_FAILURES + 1}," not in text


@pytest.mark.parametrize(("failures", "title"), [(0, "Stopped early"), (3, "Differences found")])
def test_interruption_is_reported(failures: int, title: str) -> None:
    ended = report(failures)
    ended.interrupted = True
    ended.planned = {"matrix cases": 429, "scenarios": 60}
    text = read(page(ended, ["lockstep"]))
    assert title in text and "All outputs equal" not in text
    assert "Stopped early: 40 of 60 scenarios and 120 of 429 matrix cases were run." in text


@pytest.mark.parametrize("failures", [0, 3])
def test_it_is_self_contained_and_fits_a_phone_and_paper(failures: int) -> None:
    html = page(report(failures), ["lockstep"])
    assert not re.search(r"https?://|<script|<link|<img|url\(", html)
    for part in ("width=device-width", "prefers-color-scheme: dark", "@media print"):
        assert part in html
    widths = [int(width) for width in re.findall(r'<svg viewBox="0 0 (\d+)', html)]
    assert max(widths) <= 350


def test_it_is_written(tmp_path) -> None:
    path = tmp_path / "report.html"
    write_page(path, report(), ["lockstep"])
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_page_lists_the_combinations_of_features() -> None:
    report = Report("quick")
    plan = CoveringPlan(small_table(), 2, 0, 1, 2)
    report.tuples = MetTuples(plan)
    rows = plan.scenario(0).rows()
    report.tuples.plan(rows)
    report.tuples.add(dict(plan.values.names[n] for n in rows[0]))
    text = page(report, ["lockstep", "check"])
    assert f"{report.tuples.num_met:,} of {report.tuples.num_feasible:,} pairs" in text
    assert "they do not fit: 1" in text and "not planned at this size" in text
    tuples = report.to_json()["feature_tuples"]
    assert 0 < tuples["met"] < tuples["of"] and tuples["unmet_values"]
