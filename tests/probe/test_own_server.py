"""lockstep probe against Lockstep's own server with the bundled model: no fault."""

import pytest

from lockstep import LLM
from lockstep.probe.run import Limits, probe_server
from lockstep.probe.sections import SECTIONS, determinism, logprobs
from tests.bundled_model import make_engine
from tests.serve.live_server import SETTINGS, serving


def test_own_server_repeats_its_answers(engine: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer and shorter answers than users get; the slow test has all of them."""
    monkeypatch.setattr(determinism, "MAX_TOKENS", 6)
    monkeypatch.setattr(determinism, "CONCURRENT", 2)
    monkeypatch.setattr(determinism, "QUESTIONS", determinism.QUESTIONS[:1])
    monkeypatch.setattr(logprobs, "PROMPTS", logprobs.PROMPTS[:1])
    limits = Limits(requests=100, seconds=120, timeout=60, minutes=0, context=None)
    with serving(engine) as server:
        report = probe_server(
            server.url, None, None, limits, ("protocol", "logprobs", "determinism")
        )
    assert report.count("fault") == report.count("warning") == 0, report.verdict
    figures = {section.name: section.figures for section in report.sections}
    assert figures["determinism"]["identical answers"] == "6 of 6"
    assert not any(section.stopped for section in report.sections)


@pytest.mark.slow
def test_own_server_has_no_fault() -> None:
    """Run all sections; the small model may loop and miss facts, which are warnings."""
    limits = Limits(requests=400, seconds=1800, timeout=120, minutes=0.2, context=800)
    with serving(make_engine("mtp", **SETTINGS)) as server:
        report = probe_server(server.url, None, None, limits, tuple(SECTIONS))
    assert report.count("fault") == 0, report.verdict
    figures = {section.name: section.figures for section in report.sections}
    assert figures["determinism"]["identical answers"] == "24 of 24"
    assert figures["sampling"]["equal answers of equal seeds"] == "6 of 6"
    assert figures["json"]["answers that match their schema"] == "8 of 8"
