"""Log lines: escape_line text of clients, request ids, and repeated lines."""

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lockstep.outputs import RequestMetrics
from lockstep.serve.http.request_context import REQUEST_CONTEXT, RequestContext
from lockstep.serve.telemetry.logs import (
    LOGGERS,
    MAX_CHARACTERS,
    MAX_LINES,
    REPEAT_SECONDS,
    REQUEST_LOGGER,
    LineFilter,
    configure_logs,
    escape_line,
    log_request,
)
from tests.serve.telemetry.records import finished_record

FORGED = "a\nERROR forged\r\x1b[31m\u2028end é"
ESCAPED = "a\\nERROR forged\\r\\x1b[31m\\u2028end é"
Lines = Callable[[], list[str]]


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Iterator[Lines]:
    """Yield a function that returns new log lines; restore the loggers afterwards."""
    before = {name: logging.getLogger(name).handlers for name in LOGGERS}
    uvicorn = logging.getLogger("uvicorn.error")
    level = uvicorn.level
    uvicorn.setLevel(logging.NOTSET)  # a server that another test ran in this process set its own
    yield lambda: capsys.readouterr().err.splitlines()
    uvicorn.setLevel(level)
    for name, handlers in before.items():
        logging.getLogger(name).handlers = handlers
    logging.getLogger(REQUEST_LOGGER).setLevel(logging.NOTSET)


@pytest.fixture
def caller() -> Iterator[RequestContext]:
    """Set the request context of all log lines."""
    result = RequestContext("my-id", {})
    token = REQUEST_CONTEXT.set(result)
    yield result
    REQUEST_CONTEXT.reset(token)


def record(message: str, *args: object, name: str = "lockstep.serve") -> logging.LogRecord:
    return logging.LogRecord(name, logging.WARNING, "file", 1, message, args, None)


def test_log_message_is_escaped_to_one_line() -> None:
    line = record("fields were ignored: %s", FORGED)
    assert LineFilter().filter(line)
    assert line.getMessage() == f"fields were ignored: {ESCAPED}"
    assert len(escape_line("x" * 10**6)) < MAX_CHARACTERS + 10


@pytest.mark.parametrize("form", ["text", "json"])
def test_every_logger_writes_single_lines(lines: Lines, form: Any) -> None:
    """Also loggers below those of the server."""
    configure_logs(form)
    for name in ("lockstep.serve", "lockstep.engine", "uvicorn.error", "opentelemetry.sdk"):
        logging.getLogger(name).warning("%s wrote %s", name, FORGED)
        (line,) = lines()
        received = json.loads(line)["message"] if form == "json" else line
        assert received.endswith(f"{name} wrote {ESCAPED}")


def test_repeated_lines_are_written_once(lines: Lines) -> None:
    configure_logs()
    for _ in range(5):
        logging.getLogger("lockstep.serve").warning("invalid")
    logging.getLogger("lockstep.serve").warning("something else")
    assert [line.split(": ")[1] for line in lines()] == ["invalid", "something else"]


def test_number_of_distinct_lines_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client with new names in every request neither fills the disk nor hides errors."""
    now = 1000.0
    monkeypatch.setattr("lockstep.serve.telemetry.logs.time.monotonic", lambda: now)
    one = LineFilter()

    def lines(level: int) -> list[logging.LogRecord]:
        results = [
            logging.LogRecord("lockstep.serve", level, "", 0, f"line {n}", (), None)
            for n in range(3 * MAX_LINES)
        ]
        return [line for line in results if one.filter(line)]

    written = lines(logging.WARNING)
    assert len(written) == MAX_LINES
    assert "no more lines" in written[-1].msg
    assert "no more lines" not in written[-2].msg
    assert len(lines(logging.ERROR)) == MAX_LINES
    assert lines(logging.WARNING) == []
    now += REPEAT_SECONDS
    assert len(lines(logging.WARNING)) == MAX_LINES


def test_access_lines_are_not_deduplicated() -> None:
    one = LineFilter()
    for _ in range(3):
        line = record('%s - "%s %s"', "client", "GET", "/x\ny", name="uvicorn.access")
        assert one.filter(line) and "\n" not in line.getMessage()


def test_log_line_names_the_request(lines: Lines, caller: RequestContext) -> None:
    configure_logs("json")
    try:
        raise ValueError("no\nsuch")
    except ValueError:
        logging.getLogger("lockstep.serve").exception("it failed")
    (line,) = lines()
    message = json.loads(line)
    assert message.pop("exception").endswith("ValueError: no\nsuch")
    assert message.pop("time").endswith("Z")
    assert message == {
        "level": "error",
        "logger": "lockstep.serve",
        "message": "it failed",
        "request_id": "my-id",
    }


def test_traceback_cannot_forge_lines(lines: Lines, caller: RequestContext) -> None:
    configure_logs()
    try:
        raise ValueError("no\n2026-01-01T00:00:00.000Z ERROR lockstep: forged")
    except ValueError:
        logging.getLogger("lockstep.serve").exception("it failed")
    first, *rest = lines()
    assert first.endswith(" ERROR lockstep.serve: it failed request_id=my-id")
    assert rest and all(line.startswith("    ") for line in rest)


def test_record_latencies() -> None:
    assert finished_record().latencies == {
        "e2e": 2.25,
        "queue": 0.5,
        "first_token": 1.0,
        "prefill": 0.5,
        "decode": 1.25,
        "inference": 1.75,
    }
    waited = finished_record(metrics=(RequestMetrics(arrival_time=10.0),))
    assert waited.latencies == {"e2e": 2.25}


def test_finished_requests_are_logged(lines: Lines, caller: RequestContext) -> None:
    configure_logs("json", log_requests=True)
    log_request(finished_record())
    log_request(finished_record())
    log_request(finished_record(error="its time was up"))
    first, second, third = (json.loads(line) for line in lines())
    assert first["message"] == second["message"] == "ended"
    assert third["message"] == "ended early: its time was up"
    assert first["request_id"] == "my-id" and first["id"] == "cmpl-1"
    assert (first["prompt_tokens"], first["completion_tokens"]) == (7, 4)
    assert first["finish_reasons"] == "length,abort" and first["queue_seconds"] == 0.5


def test_finished_requests_are_not_logged_by_default(lines: Lines) -> None:
    configure_logs("text")
    log_request(finished_record())
    assert lines() == []
