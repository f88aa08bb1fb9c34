"""A span for every request, as collectors get it, and none that a request waits for."""

import asyncio
import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from lockstep.errors import ConfigError
from lockstep.serve.app import create_app
from lockstep.serve.service import Service
from lockstep.serve.settings import ServerSettings
from lockstep.serve.traces import CLOSE_SECONDS, SPAN, Traces, otlp_exporter
from tests.serve.asking import fetch
from tests.serve.process import PATIENCE, served

TRACE = 0x4BF92F3577B34DA6A3CE929D0E0E4736
PARENT = 0x00F067AA0BA902B7
TRACED = {"traceparent": f"00-{TRACE:032x}-{PARENT:016x}-01", "X-Request-Id": "mine"}
ASKED = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "n": 2, "temperature": 0.5, "seed": 1}


@pytest.fixture
def spans(server: Any, processor: Any) -> Iterator[Any]:
    """`spans()` are those of the requests that have ended."""
    exporter = InMemorySpanExporter()
    with closing(Traces(exporter)) as traces:
        service = Service(server.client, processor, "tiny", "ls-test", on_record=[traces.record])
        server.app = create_app(service)

        def found() -> Any:
            traces._provider.force_flush()
            return exporter.get_finished_spans()

        yield found


def test_a_span_tells_of_its_request(server: Any, spans: Any) -> None:
    began = time.time_ns()
    answer = fetch(server, "POST", "/v1/completions", headers=TRACED, json=ASKED).json()
    (span,) = spans()
    assert (span.name, span.kind, span.status.status_code) == (
        SPAN,
        SpanKind.SERVER,
        StatusCode.UNSET,
    )
    assert span.context.trace_id == TRACE and span.parent.span_id == PARENT
    assert began - 10**7 < span.start_time <= span.end_time <= time.time_ns() + 10**7
    told = dict(span.attributes)
    assert 0 < told.pop("gen_ai.latency.e2e") < 60
    usage = answer["usage"]
    details = usage["completion_tokens_details"]
    drafted = sum(details[f"{how}_prediction_tokens"] for how in ("accepted", "rejected"))
    assert told == {
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
def test_what_names_no_trace_begins_one(server: Any, spans: Any, traced: str) -> None:
    fetch(server, "POST", "/v1/completions", headers={"traceparent": traced}, json=ASKED)
    (span,) = spans()
    assert span.parent is None and span.context.trace_id not in (0, TRACE)


def test_a_request_that_failed_says_so(server: Any, spans: Any) -> None:
    """One completion that fails ends the answer, and with it the others."""
    server.client.error = ZeroDivisionError("not foreseen")
    assert fetch(server, "POST", "/v1/completions", json=ASKED).status_code == 500
    (span,) = spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["gen_ai.response.finish_reasons"] == ("error", "abort")


def test_a_request_whose_client_left_was_aborted(server: Any, spans: Any) -> None:
    server.client.hang = True
    server.client.answer = lambda request: [5, 6]

    async def leave() -> None:
        async with server.http() as http:
            ask = http.post("/v1/completions", json={**ASKED, "max_tokens": 400})
            await asyncio.wait_for(ask, 0.3)

    with pytest.raises(TimeoutError):
        asyncio.run(leave())
    (span,) = spans()
    assert span.attributes["gen_ai.response.finish_reasons"] == ("abort", "abort")
    assert span.status.status_code is StatusCode.UNSET


@pytest.fixture
def collector() -> Iterator[Any]:
    """A collector: `url`, `paths` that were asked for, and `spans` that came."""
    found = SimpleNamespace(spans=[], paths=[])

    class Collect(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            sent = ExportTraceServiceRequest.FromString(body)
            found.paths.append(self.path)
            for resource in sent.resource_spans:
                for scope in resource.scope_spans:
                    found.spans += [(resource.resource, span) for span in scope.spans]
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            return

    http = ThreadingHTTPServer(("127.0.0.1", 0), Collect)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    found.url = f"http://127.0.0.1:{http.server_port}"
    yield found
    http.shutdown()
    thread.join()
    http.server_close()


def values(attributes: Any) -> dict[str, Any]:
    """OTLP's attributes as plain values."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


def test_a_server_sends_spans_and_writes_json(collector: Any, tmp_path: Path) -> None:
    """The command, its engine in a process: latencies of the engine, and the ids of both sides."""
    options = ["--max-model-len", "512", "--max-num-seqs", "2", "--enable-log-requests"]
    options += ["--log-format", "json", "--otlp-traces-endpoint", collector.url]
    body = {"prompt": "def read(path):", "max_tokens": 12, "ignore_eos": True, "temperature": 0}
    with served(tmp_path / "s", *options) as (running, client):
        answer = client.post("/v1/completions", json=body, headers=TRACED)
        refused = client.post("/v1/completions", json={**body, "best_of": 3}, headers=TRACED)
        assert (answer.status_code, refused.status_code) == (200, 400)
        running.send_signal(signal.SIGTERM)
        lines = running.stderr.read().splitlines()
    assert collector.paths == ["/v1/traces"]
    ((resource, span),) = collector.spans
    assert values(resource.attributes)["service.name"] == "lockstep"
    assert int.from_bytes(span.trace_id) == TRACE and int.from_bytes(span.parent_span_id) == PARENT
    told = values(span.attributes)
    assert told["gen_ai.request.id"] == answer.json()["id"]
    assert told["gen_ai.usage.completion_tokens"] == 12
    assert told["lockstep.usage.draft_tokens"] > 0
    parts = [f"gen_ai.latency.time_in_{name}" for name in ("queue", "model_prefill")]
    first = told["gen_ai.latency.time_to_first_token"]
    assert sum(told[name] for name in parts) == pytest.approx(first)
    assert 0 < first < first + told["gen_ai.latency.time_in_model_decode"]
    assert first + told["gen_ai.latency.time_in_model_decode"] <= told["gen_ai.latency.e2e"]
    (line,) = [json.loads(line) for line in lines if line.startswith('{"time"')]
    assert (line["logger"], line["message"]) == ("lockstep.requests", "ended")
    assert (line["request_id"], line["id"]) == ("mine", answer.json()["id"])


def test_nobody_waits_for_a_collector_that_is_gone(
    server: Any, processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor for one that takes connections and never answers."""
    monkeypatch.setattr("lockstep.serve.traces.CLOSE_SECONDS", CLOSE_SECONDS / 6)
    before = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        exporter = otlp_exporter(f"http://127.0.0.1:{silent.getsockname()[1]}")
        traces = Traces(exporter)
        service = Service(server.client, processor, "tiny", "ls-test", on_record=[traces.record])
        server.app = create_app(service)
        began = time.monotonic()
        for _ in range(20):
            assert fetch(server, "POST", "/v1/completions", json=ASKED).status_code == 200
        asked = time.monotonic() - began
        began = time.monotonic()
        traces.close()
        closed = time.monotonic() - began
    exporter.shutdown()  # else it would try again, and say so after the tests
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert asked < 10
    assert closed < CLOSE_SECONDS / 6 + 1


@pytest.mark.parametrize(
    ("given", "sent_to"),
    [
        ("http://host:4318", "http://host:4318/v1/traces"),
        ("https://host/", "https://host/v1/traces"),
        ("http://host:4318/v1/traces", "http://host:4318/v1/traces"),
        ("http://host/own/path", "http://host/own/path"),
    ],
)
def test_where_spans_go(given: str, sent_to: str) -> None:
    assert ServerSettings(otlp_traces_endpoint=given).otlp_traces_endpoint == given
    assert otlp_exporter(given)._endpoint == sent_to


@pytest.mark.parametrize("given", ["grpc://host:4317", "host:4318", "", "http://", "http://a b"])
def test_what_is_no_endpoint(given: str) -> None:
    with pytest.raises(ConfigError, match="otlp_traces_endpoint.*allowed.*--otlp-traces-endpoint"):
        ServerSettings(otlp_traces_endpoint=given)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'lockstep-llm\[otel\]'"):
        otlp_exporter("http://host:4318")
