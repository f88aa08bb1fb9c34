"""lockstep probe: a correct stub has no findings, and each misbehaviour is named."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from lockstep.cli import app
from lockstep.errors import ConfigError
from lockstep.probe.http import _events
from lockstep.probe.report import ServerReport
from lockstep.probe.run import Limits, probe_server
from lockstep.probe.sections import SECTIONS, drift, speed
from lockstep.probe.texts import collapse, first_difference, loop_at_end, variation
from tests.probe.wrong_server import WORDS, wrong_server

ROOT = Path(__file__).parents[2]
LIMITS = Limits(requests=400, seconds=120, timeout=20, minutes=0, context=None)
KEY = "sk-very-secret"


def probe(url: str, *names: str, limits: Limits = LIMITS, key: str | None = None) -> ServerReport:
    return probe_server(url, key, None, limits, names or tuple(SECTIONS))


def findings(report: ServerReport) -> dict[str, str]:
    """Return the severity of each finding by its name."""
    return {f.name: f.severity for section in report.sections for f in section.findings}


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ("probe", *words), catch_exceptions=False)


@pytest.fixture(scope="module")
def correct() -> Iterator[ServerReport]:
    """Return the report of the stub without a misbehaviour."""
    with pytest.MonkeyPatch.context() as patch:
        # Figures of speed are noise on a busy machine.
        patch.setattr(speed, "VARIES", 1e9)
        with wrong_server("") as (url, _):
            yield probe(url)


def test_correct_server_has_no_findings(correct: ServerReport) -> None:
    assert not findings(correct)
    sections = {section.name: section for section in correct.sections}
    assert sections.keys() == SECTIONS.keys()
    figures = {name: section.figures for name, section in sections.items()}
    assert figures["tools"]["clean"] == "60 of 60"
    assert figures["determinism"]["identical answers"] == "24 of 24"
    assert figures["json"]["answers that match their schema"] == "8 of 8"
    assert figures["sampling"]["equal answers of equal seeds"] == "6 of 6"
    assert figures["needle"]["found"] == "10 of 10"
    assert 3500 < figures["needle"]["longest prompt, tokens"] <= 4096
    assert figures["logprobs"]["positions checked"] == 6 * 24
    assert figures["stop"]["answers with stop strings"] == 8
    assert correct.requests == sum(section.requests for section in sections.values()) + 1
    assert correct.requests < 300, "a probe sends a few hundred requests at most"
    assert correct.verdict == f"stub: no fault in {correct.requests} requests; not complete: Drift"


WRONG = [
    ("batch", "determinism", "answers differ among 32 others", "fault"),
    ("prefix", "determinism", "answers differ after a prefix hit", "fault"),
    ("abort", "determinism", "answers differ after an abort of its neighbours", "fault"),
    ("stream", "determinism", "answers differ streamed", "fault"),
    ("stop string", "stop", "an answer contains its stop string", "fault"),
    ("sum", "logprobs", "probabilities add up to more than 1", "fault"),
    ("unsorted", "logprobs", "top_logprobs are not sorted", "fault"),
    ("not the top", "logprobs", "a greedy answer's token is not the most likely one", "fault"),
    ("tool arguments", "tools", "arguments of a call are not JSON", "fault"),
    ("tool markup", "tools", "markup of tool calls is in the content", "fault"),
    ("schema", "json", "json_schema is accepted and not kept", "fault"),
    ("seed without effect", "sampling", "all seeds give the same answer", "fault"),
    ("seed that does not repeat", "sampling", "a seed does not repeat its answer alone", "warning"),
    ("loop", "repetition", "an answer ends in a loop", "warning"),
    ("cascade", "repetition", "the vocabulary of an answer collapses", "warning"),
    ("lost needle", "needle", "the fact is lost in longer prompts", "warning"),
    ("cut prompt", "needle", "a long prompt is cut without an error", "fault"),
]


@pytest.mark.parametrize(("wrong", "section", "name", "severity"), WRONG, ids=[w[0] for w in WRONG])
def test_wrong_answers_are_named(wrong: str, section: str, name: str, severity: str) -> None:
    """Only the misbehaviour's own section is run; the log-probabilities give the logit gap."""
    names = ("logprobs", section) if section == "determinism" else (section,)
    with wrong_server(wrong) as (url, _):
        report = probe(url, *names)
    assert findings(report).get(name) == severity, report.verdict
    assert name in report.verdict or severity == "warning"


TRANSPORT = [
    ("html", "another content type"),
    ("broken stream", "an event of a stream is not a JSON object"),
    ("unfinished", "a stream ends without"),
    ("endless", "a stream has more than"),
    ("drip", "a reply takes longer than --timeout"),
    ("huge", "a reply has more than 16 MiB"),
    ("500", "the server answers with status 5xx"),
]


@pytest.mark.parametrize(("wrong", "name"), TRANSPORT, ids=[w[0] for w in TRANSPORT])
def test_broken_replies_are_named(wrong: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.probe.http.MAX_EVENTS", 500)
    limits = Limits(requests=12, seconds=60, timeout=1, minutes=0, context=None)
    with wrong_server(wrong) as (url, _):
        report = probe(url, "protocol", "stop", limits=limits)
    assert any(name in finding for finding in findings(report)), report.verdict


def test_numbers_without_a_bound_end_no_probe() -> None:
    """Integers of 400 digits have no float."""
    with wrong_server("large numbers") as (url, _):
        report = probe(url, "protocol", "logprobs", "speed", "needle")
    named = findings(report)
    assert named["usage lacks a count of tokens"] == "fault"
    assert named["an entry of logprobs lacks its token, logprob or top_logprobs"] == "fault"


def test_context_of_the_server_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.probe.sections.needle.MAX_CONTEXT", 2048)
    with wrong_server("large context") as (url, _):
        (section,) = probe(url, "needle").sections
    assert 1500 < section.figures["longest prompt, tokens"] <= 2048


def test_lone_surrogates_do_not_end_the_probe(tmp_path: Path) -> None:
    """They become U+FFFD, so that stop strings can be sent and the report be written."""
    path = tmp_path / "report.html"
    with wrong_server("surrogate") as (url, _):
        words = ("--url", url, "--sections", "stop,repetition", "--report", str(path))
        shown = run(*words)
    assert shown.exit_code == 1 and "an answer has broken characters" in shown.stdout
    assert "an answer has broken characters" in path.read_text()


def test_events_are_read_from_chunks_of_any_size() -> None:
    stream = b": ping\r\n\r\ndata: a\ndata: b\n\ndata:c\r\n\r\nid: 1\ndata: d"
    for size in (1, 2, 3, len(stream)):
        chunks = (stream[i : i + size] for i in range(0, len(stream), size))
        assert list(_events(chunks)) == [b"a\nb", b"c", b"d"]
    # Two seconds would be too short to copy the line again for each of its chunks.
    started = time.monotonic()
    assert list(_events(b"a" * 64 for _ in range(1 << 18))) == []
    assert time.monotonic() - started < 2


def test_metrics_without_an_end_are_read_in_one_pass() -> None:
    text = "vllm:spec_decode_num_draft_tokens{\n" * 20_000
    started = time.monotonic()
    assert drift.METRIC.findall(text) == [] and time.monotonic() - started < 2


@pytest.mark.parametrize("wrong", ["", "drift", "no metrics"])
def test_drift_over_minutes(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stub's metrics say that three of four drafts are accepted."""
    monkeypatch.setattr(drift, "INTERVAL", 0.02)
    limits = Limits(requests=400, seconds=60, timeout=20, minutes=0.005, context=None)
    with wrong_server(wrong) as (url, _):
        (section,) = probe(url, "drift", limits=limits).sections
    named = {finding.name for finding in section.findings} - {"the server slows down"}
    assert named == ({"answers change over time"} if wrong == "drift" else set())
    if wrong == "no metrics":
        assert "acceptance rate" in section.unsupported
    else:
        assert section.figures["acceptance rate, %"] == 75
    assert len(section.plots[0].series["answers"]) >= 4


def test_busy_server_is_asked_again() -> None:
    """Every first request gets 429 with Retry-After; no answer is lost."""
    with wrong_server("busy") as (url, state):
        report = probe(url, "sampling")
    assert not findings(report)
    assert report.sections[0].figures["equal answers of equal seeds"] == "6 of 6"
    assert state.requests > 2 * 12


def test_unsupported_feature_is_recognised_by_the_servers_error() -> None:
    with wrong_server("no tools") as (url, _):
        (tools,) = probe(url, "tools").sections
    assert tools.state == "not supported" and tools.requests == 4
    assert tools.unsupported == {"tools": "status 400: tools need --tool-parser"}


def test_field_that_gets_status_500_is_not_supported() -> None:
    """The failure is a fault as well."""
    with wrong_server("no schemas") as (url, _):
        report = probe(url, "json")
    protocol, section = report.sections
    assert "response_format json_schema" in section.unsupported
    assert [f.name for f in protocol.findings] == ["the server answers with status 5xx"]


def test_budget_of_requests_and_seconds() -> None:
    with wrong_server("") as (url, state):
        report = probe(url, limits=Limits(50, 60, 20, 0, None))
        assert state.requests + 1 == report.requests == 50
        stopped = {section.name: section.stopped for section in report.sections}
        assert stopped["protocol"] is None and "--requests" in str(stopped["sampling"])
        assert "not complete: Determinism" in report.verdict
        report = probe(url, limits=Limits(400, 0.5, 20, 0, None))
        assert report.seconds < 5 and any(s.stopped for s in report.sections)


def test_ctrl_c_leaves_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sections before it have their results; the status is 130."""

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(SECTIONS, "stop", SECTIONS["stop"]._replace(run=interrupt))
    with wrong_server("") as (url, _):
        shown = run("--url", url, "--sections", "logprobs,stop,needle", "--json")
    assert shown.exit_code == 130
    result = json.loads(shown.stdout)
    assert result["interrupted"] and result["requests"] == 8
    states = {section["name"]: section["state"] for section in result["sections"]}
    assert states == {"logprobs": "no findings", "stop": "not run", "needle": "not run"}


def test_ctrl_c_does_not_wait_for_running_requests() -> None:
    """A server that answers nothing for a minute does not hold the probe."""
    command = [
        sys.executable,
        "-m",
        "lockstep.probe",
        "--sections",
        "repetition",
        "--timeout",
        "60",
    ]
    with wrong_server("silent") as (url, state):
        with subprocess.Popen(
            [*command, "--url", url, "--json"], cwd=ROOT, stdout=subprocess.PIPE
        ) as running:
            deadline = time.monotonic() + 60
            while state.running < 2 and time.monotonic() < deadline:
                time.sleep(0.02)
            started = time.monotonic()
            running.send_signal(signal.SIGINT)
            output, _ = running.communicate(timeout=60)
        seconds = time.monotonic() - started
        state.wrong = ""
    assert running.returncode == 130 and json.loads(output)["interrupted"]
    assert seconds < 20


def test_key_is_sent_and_never_shown(tmp_path: Path) -> None:
    """The stub's error repeats the key that it expects."""
    path = tmp_path / "report.html"
    with wrong_server("", KEY) as (url, _):
        with pytest.raises(ConfigError, match="status 401") as refused:
            probe(url, "protocol", key="sk-other")
        words = ("--url", url, "--sections", "protocol,stop", "--report", str(path))
        shown = run(*words, "--api-key", KEY, "--json")
    assert "sk-other" not in str(refused.value)
    assert shown.exit_code == 0
    assert KEY not in shown.output + path.read_text()


def test_statuses_json_and_page(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    words = ("--sections", "logprobs,stop,needle", "--report", str(path))
    with wrong_server("") as (url, _), wrong_server("stop string") as (other, _):
        clean = run("--url", url, "--json", *words)
        both = run("--url", url, "--compare", other, "--json", *words)
    assert clean.exit_code == 0 and both.exit_code == 1
    result = json.loads(clean.stdout)
    assert (result["faults"], result["warnings"], result["model"]) == (0, 0, "stub")
    pair = json.loads(both.stdout)
    assert [server["faults"] for server in pair["servers"]] == [0, 1]
    assert ["Stop strings", "result", "no findings", "1 fault"] in pair["rows"]
    text = path.read_text()
    assert "Side by side" in text and "an answer contains its stop string" in text
    assert not re.search(r"<script|https?://(?!127\.0\.0\.1)", text), "no scripts, no network"
    for svg in re.findall(r"<svg.*?</svg>", text):
        ElementTree.fromstring(svg)
    assert text.count("<svg") == 2


def test_two_equal_servers_give_equal_answers() -> None:
    with wrong_server("") as (url, _), wrong_server("") as (other, _):
        words = ("--url", url, "--compare", other, "--sections", "determinism")
        shown = run(*words)
    assert "answers are identical." in shown.stdout
    assert shown.exit_code == 0


def test_warnings_count_with_strict() -> None:
    with wrong_server("seed that does not repeat") as (url, _):
        words = ("--url", url, "--sections", "sampling")
        assert run(*words).exit_code == 0
        assert run(*words, "--strict").exit_code == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--url", "ftp://a"), "url='ftp://a' is not allowed"),
        (("--url", "http://me:secret@host"), r"url='http://\.\.\.@host' is not allowed"),
        (("--url", "http://127.0.0.1:9"), "names no model: ConnectError.*Start the server"),
        (("--sections", "tools,speeed"), "sections='speeed' is not allowed; allowed: protocol"),
        (("--report", "/none/a.html"), "report='/none/a.html' is not allowed.*No such file"),
        (("--api-key", "a\nb"), "api_key is empty or has characters"),
        (("--requests", "0"), "requests='0' is not allowed"),
    ],
)
def test_invalid_options_are_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(*words)


def test_detectors_by_hand() -> None:
    unit = loop_at_end("a b c. " + "and so on, " * 8)
    assert unit is not None and sorted(unit) == sorted("and so on, ")
    assert loop_at_end("Once upon a time. " + "no. " * 20) is not None
    assert loop_at_end("1, 2, 3, 4, 5, 6, 7, 8, 9, 10") is None
    assert loop_at_end("ha" * 5) is None, "a short repetition is no loop"
    assert collapse(" ".join(WORDS * 2)) is None
    healthy = " ".join(f"w{i}" for i in range(60))
    assert collapse(healthy + " yes no" * 60) is not None
    assert first_difference("abc", "abd") == 2 and first_difference("ab", "abc") == 2
    assert first_difference("ab", "ab") is None
    assert variation([1.0, 3.0]) == pytest.approx(2**0.5 / 2)


WITHOUT_PACKAGES = """
import sys
names = "torch numpy tokenizers jinja2 llguidance fastapi uvicorn yaml safetensors"
sys.modules.update(dict.fromkeys([*names.split(), "huggingface_hub", "prometheus_client"]))
from lockstep.probe.__main__ import main
sys.argv = ["probe", *sys.argv[1:]]
main()
"""


def test_probe_runs_without_torch_and_the_engines_packages() -> None:
    with wrong_server("") as (url, _):
        words = ["--url", url, "--sections", "protocol,logprobs", "--json"]
        command = [sys.executable, "-c", WITHOUT_PACKAGES, *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["faults"] == 0
