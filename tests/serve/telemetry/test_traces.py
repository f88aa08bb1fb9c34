"""A span for every request, as collectors receive it, exported without delaying requests."""

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from lockstep.errors import ConfigError
from lockstep.serve.app import create_app
from lockstep.serve.requests.service import Service
from lockstep.serve.settings import ServerSettings
from lockstep.serve.telemetry.traces import CLOSE_SECONDS, SPAN_NAME, SpanRecorder, otlp_exporter
from tests.serve.api_calls import fetch
from tests.serve.server_process import PATIENCE
from tests.serve.span_collector import PARENT, TRACE, TRACED

BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "n": 2, "temperature": 0.5, "seed": 1}


@pytest.fixture
def spans(server: Any, processor: Any) -> Iterator[Any]:
    """Return a function that returns the spans of the finished requests."""
    exporter = InMemorySpanExporter()
    with closing(SpanRecorder(exporter)) as traces:
        service = Service(server.client, processor, "tiny", "ls-test", on_record=[traces.record])
        server.app = create_app(service)

        def found() -> Any:
            traces._provider.force_flush()
            return exporter.get_finished_spans()

        yield found


def test_span_attributes(server: Any, spans: Any) -> None:
    began = time.time_ns()
    answer = fetch(server, "POST", "/v1/completions", headers=TRACED, json=BODY).json()
    (span,) = spans()
    assert (span.name, span.kind, span.status.status_code) == (
        SPAN_NAME,
        SpanKind.SERVER,
        StatusCode.UNSET,
    )
    assert span.context.trace_id == TRACE and span.parent.span_id == PARENT
    assert began - 10**7 < span.start_time <= span.end_time <= time.time_ns() + 10**7
    received = dict(span.attributes)
    assert 0 < received.pop("gen_ai.latency.e2e") < 60
    usage = answer["usage"]
    details = usage["completion_tokens_details"]
    drafted = sum(details[f"{how}_prediction_tokens"] for how in ("accepted", "rejected"))
    assert received == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.id": answer["id"],
        "gen_ai.request.model": "tiny",
        "gen_ai.request.n": 2,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": tuple(c["finish_reason"] for c in answer["choices"]),
        "gen_ai.usage.num_sequences": 2,
        "gen_ai.usage.prompt_tokens": usage["prompt_tokens"],
        "gen_ai.usage.completion_tokens": usage["completion_tokens"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 2,
        "lockstep.usage.draft_tokens": drafted,
        "lockstep.usage.accepted_tokens": details["accepted_prediction_tokens"],
        "http.request.header.x-request-id": "mine",
    }


@pytest.mark.parametrize("traced", ["", "no trace", f"00-{0:032x}-{PARENT:016x}-01", "x" * 600])
def test_request_without_trace_starts_one(server: Any, spans: Any, traced: str) -> None:
    fetch(server, "POST", "/v1/completions", headers={"traceparent": traced}, json=BODY)
    (span,) = spans()
    assert span.parent is None and span.context.trace_id not in (0, TRACE)


def test_span_of_failed_request(server: Any, spans: Any) -> None:
    """A completion that fails ends the response, and so the other completions."""
    server.client.error = ZeroDivisionError("not foreseen")
    assert fetch(server, "POST", "/v1/completions", json=BODY).status_code == 500
    (span,) = spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["gen_ai.response.finish_reasons"] == ("error", "abort")


def test_span_of_aborted_request(server: Any, spans: Any) -> None:
    server.client.hang = True
    server.client.answer = lambda request: [5, 6]

    async def leave() -> None:
        async with server.http() as http:
            ask = http.post("/v1/completions", json={**BODY, "max_tokens": 400})
            await asyncio.wait_for(ask, 0.3)

    with pytest.raises(TimeoutError):
        asyncio.run(leave())
    (span,) = spans()
    assert span.attributes["gen_ai.response.finish_reasons"] == ("abort", "abort")
    assert span.status.status_code is StatusCode.UNSET


def test_missing_collector_delays_nothing(
    server: Any, processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one that accepts connections and never answers."""
    monkeypatch.setattr("lockstep.serve.telemetry.traces.CLOSE_SECONDS", CLOSE_SECONDS / 6)
    before = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        exporter = otlp_exporter(f"http://127.0.0.1:{silent.getsockname()[1]}")
        traces = SpanRecorder(exporter)
        service = Service(server.client, processor, "tiny", "ls-test", on_record=[traces.record])
        server.app = create_app(service)
        began = time.monotonic()
        for _ in range(20):
            assert fetch(server, "POST", "/v1/completions", json=BODY).status_code == 200
        requested = time.monotonic() - began
        began = time.monotonic()
        traces.close()
        closed = time.monotonic() - began
    exporter.shutdown()  # else it would try again, and say so after the tests
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert requested < 10
    assert closed < CLOSE_SECONDS / 6 + 1


@pytest.mark.parametrize(
    ("endpoint", "sent_to"),
    [
        ("http://host:4318", "http://host:4318/v1/traces"),
        ("https://host/", "https://host/v1/traces"),
        ("http://host:4318/v1/traces", "http://host:4318/v1/traces"),
        ("http://host/own/path", "http://host/own/path"),
    ],
)
def test_otlp_endpoint(endpoint: str, sent_to: str) -> None:
    assert ServerSettings(otlp_traces_endpoint=endpoint).otlp_traces_endpoint == endpoint
    assert otlp_exporter(endpoint)._endpoint == sent_to


@pytest.mark.parametrize("endpoint", ["grpc://host:4317", "host:4318", "", "http://", "http://a b"])
def test_invalid_otlp_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="otlp_traces_endpoint.*allowed.*--otlp-traces-endpoint"):
        ServerSettings(otlp_traces_endpoint=endpoint)


def test_missing_opentelemetry_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install '.\[otel\]'"):
        otlp_exporter("http://host:4318")
