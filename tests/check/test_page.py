"""The page is one file that asks the network for nothing, and says what the report says."""

import re
from html.parser import HTMLParser

import pytest

from lockstep.check.exercised import Exercised
from lockstep.check.matrix import PHASES, Setup
from lockstep.check.page import MAX_FAILURES, page, write_page
from lockstep.check.report import Failure, Report, Tally

VOID = {"meta", "br"}


class Balanced(HTMLParser):
    """Fails where tags are not closed in their order."""

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
        Tally(Setup("told", 7, "world", "none"), 5, 0, 1.0, f"world {i}") for i in range(40)
    ]
    tallies.append(Tally(Setup("told", 7, "sampling", "none"), 1, 0, 1.0, "top_k, alone"))
    setup = Setup("mtp", 3, "cold", "none")
    failed = [
        Failure(
            setup, "alone", f"request {i}", "min_p", 4, "token <b> instead of 2", "norm", "f.json"
        )
        for i in range(failures)
    ]
    return Report(
        "quick", "cpu/fp32", tallies, failed, {"drafted": 12345}, used=Exercised(), seed=6
    )


def test_a_sound_report() -> None:
    text = page(report(), ["lockstep", "check", "--seed", "6"])
    said = read(text)
    for part in ("All answers equal", "12,345", "20/20", "mtp K=3", "top_k"):
        assert part in said, part
    assert "40 worlds of seed 6, 200 answers" in said and "lockstep check --seed 6" in said
    assert "op sample" in said, "what was not exercised is named"
    assert text.count("<svg") == 3, "a picture a graph mode, and the worlds"


def test_differences_are_listed_and_bounded() -> None:
    said = read(page(report(MAX_FAILURES + 7), ["lockstep"]))
    assert "Differences found" in said and "19/20" in said
    assert "token <b> instead of 2; norm" in said, "escaped, so it reads as it is"
    assert "lockstep check --replay f.json" in said and "and 7 more" in said
    assert f"request {MAX_FAILURES - 1} " in said.replace(",", " ")
    assert f"request {MAX_FAILURES + 1}," not in said


@pytest.mark.parametrize(("failures", "title"), [(0, "Ended early"), (3, "Differences found")])
def test_an_interruption_is_said(failures: int, title: str) -> None:
    ended = report(failures)
    ended.interrupted = True
    ended.worlds_due = 60
    ended.cases_due = 429
    said = read(page(ended, ["lockstep"]))
    assert title in said and "All answers equal" not in said
    assert "Ended early: 40 of 60 worlds and 120 of 429 cases of the matrix were done." in said


@pytest.mark.parametrize("failures", [0, 3])
def test_it_is_self_contained_and_fits_a_phone_and_paper(failures: int) -> None:
    text = page(report(failures), ["lockstep"])
    assert not re.search(r"https?://|<script|<link|<img|url\(", text)
    for part in ("width=device-width", "prefers-color-scheme: dark", "@media print"):
        assert part in text
    widths = [int(width) for width in re.findall(r'<svg viewBox="0 0 (\d+)', text)]
    assert max(widths) <= 350


def test_it_is_written(tmp_path) -> None:
    path = tmp_path / "report.html"
    write_page(path, report(), ["lockstep"])
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
