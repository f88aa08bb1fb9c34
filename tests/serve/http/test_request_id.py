"""The request id, as sent or generated, is in every response and in the log."""

import asyncio
import logging
import re
from typing import Any

import openai
import pytest

from lockstep.serve.app import create_app
from lockstep.serve.http.access import AccessRules
from lockstep.serve.http.request_context import REQUEST_CONTEXT, RequestContext
from lockstep.serve.requests.service import Service

GENERATED_ID = re.compile(r"[0-9a-f]{32}")
BODY = {"model": "tiny", "prompt": "hello"}


def request(
    server: Any, method: str, path: str, headers: Any = (), body: dict[str, Any] | None = None
) -> Any:
    """Return the response to one request."""

    async def work() -> Any:
        async with server.http() as http:
            return await http.request(method, path, headers=list(headers), json=body)

    return asyncio.run(work())


@pytest.mark.parametrize("sent_id", ["a", "0f:9_x.y/z+=@-", "x" * 128])
def test_valid_request_id_is_returned(server: Any, sent_id: str) -> None:
    answer = request(server, "POST", "/v1/completions", [("X-Request-Id", sent_id)], BODY)
    assert answer.status_code == 200 and answer.headers.get_list("x-request-id") == [sent_id]


@pytest.mark.parametrize(
    "sent_id",
    [[], [""], ["x" * 129], ["a b"], ["a\tb"], ["a;b"], ["é"], ["<a>"], ["one", "two"]],
)
def test_invalid_request_id_is_replaced(server: Any, sent_id: list[str]) -> None:
    headers = [(b"X-Request-Id", value.encode("latin-1")) for value in sent_id]
    (actual,) = request(server, "GET", "/health", headers).headers.get_list("x-request-id")
    assert GENERATED_ID.fullmatch(actual)


def test_errors_have_the_request_id(server: Any, processor: Any) -> None:
    headers = [("X-Request-Id", "mine")]
    cases = [
        ("POST", "/v1/completions", 400, {**BODY, "temperature": -1}),
        ("POST", "/v1/completions", 400, None),
        ("GET", "/nowhere", 404, None),
        ("POST", "/v1/completions", 500, BODY),
    ]
    server.client.error = ZeroDivisionError("not foreseen")
    for method, path, status, body in cases:
        answer = request(server, method, path, headers, body)
        assert (answer.status_code, answer.headers["x-request-id"]) == (status, "mine")
    service = Service(server.client, processor, "tiny", "ls-test")
    server.app = create_app(service, AccessRules(keys=("secret",)))
    answer = request(server, "POST", "/v1/completions", headers, BODY)
    assert (answer.status_code, answer.headers["x-request-id"]) == (401, "mine")


def test_messages_use_anthropic_header(server: Any) -> None:
    body = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    headers = [("X-Request-Id", "mine")]
    answer = request(server, "POST", "/v1/messages", headers, body)
    assert (answer.headers["request-id"], answer.headers["x-request-id"]) == ("mine", "mine")
    assert "request-id" not in request(server, "GET", "/health", headers).headers


@pytest.mark.parametrize(
    ("path", "is_theirs"),
    [
        ("/v1/messages", True),
        ("/v1/messages/nothing", True),
        ("/llm/v1/messages", True),
        ("/v1/messagesx", False),
        ("/other/v1/messages", False),
        ("/v1/models/v1/messages", False),
    ],
)
def test_error_format_follows_the_route(
    server: Any, processor: Any, path: str, is_theirs: bool
) -> None:
    """A path that contains the route's name elsewhere does not count."""
    service = Service(server.client, processor, "tiny", "ls-test")
    server.app = create_app(service, AccessRules(root_path="/llm"))
    for headers in ([("Host", "test")], [("Host", "test"), ("Content-Encoding", "gzip")]):
        answer = request(server, "POST", path, headers, {})
        assert answer.status_code in (400, 404, 405, 415)
        assert ("request-id" in answer.headers) == is_theirs
        assert (answer.json().get("type") == "error") == is_theirs


def test_official_client_reads_request_id(server: Any) -> None:
    async def work() -> Any:
        async with server.openai() as client:
            return await client.completions.create(**BODY, extra_headers={"X-Request-Id": "mine"})

    result = asyncio.run(work())
    assert isinstance(result, openai.types.Completion) and result._request_id == "mine"


def test_logs_have_request_context(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    seen = []

    class Watch(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            seen.append((record.getMessage(), REQUEST_CONTEXT.get()))
            return True

    server.client.error = ZeroDivisionError("not foreseen")
    caplog.handler.addFilter(Watch())
    request(server, "POST", "/v1/completions", [("X-Request-Id", "mine")], BODY)
    request(server, "POST", "/v1/completions", [], {**BODY, "stream": True})
    (first, caller), (_, other) = seen
    assert "a request failed" in first and caller == RequestContext("mine", {})
    assert other is not None and GENERATED_ID.fullmatch(other.request_id)


def test_trace_headers() -> None:
    parent = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    headers = [(b"traceparent", parent), (b"TraceState", b"a=1"), (b"other", b"x")]
    assert RequestContext.from_headers(headers).trace == {
        "traceparent": parent.decode(),
        "tracestate": "a=1",
    }
    assert (
        RequestContext.from_headers([(b"tracestate", b"x" * 513), (b"traceparent", b"")]).trace
        == {}
    )
    assert (
        RequestContext.from_headers([(b"traceparent", parent), (b"traceparent", parent)]).trace
        == {}
    )
