"""Rules of every generating route: API keys, sizes, queue, timeouts and disconnects."""

import asyncio
import threading
from typing import Any

import pytest

from lockstep.serve.app import create_app
from lockstep.serve.http.access import AccessRules
from lockstep.serve.requests.body_models import MAX_FIELDS
from lockstep.serve.requests.service import Limits, Service
from lockstep.text.grammars.structured_output import compile_structured_output
from tests.serve.api_calls import fetch
from tests.serve.fake_client import post_and_disconnect

USER = [{"role": "user", "content": "the fox"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "the fox"},
    "/v1/responses": {"input": "the fox"},
    "/v1/messages": {"messages": USER, "max_tokens": 50},
}
COUNTED: dict[str, dict[str, Any]] = {
    **ROUTES,
    "/v1/messages/count_tokens": {"messages": USER},
    "/v1/responses/resp_1/cancel": {},
}


def send(server: Any, path: str, headers: dict[str, str] | None = None, **more: Any) -> Any:
    return fetch(server, "POST", path, json={**COUNTED[path], **more}, headers=headers)


def message_of(answer: Any) -> str:
    result: str = answer.json()["error"]["message"]
    return result


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("path", COUNTED)
@pytest.mark.parametrize(
    ("headers", "known"),
    [
        ({}, False),
        ({"Authorization": "Bearer wrong"}, False),
        ({"x-api-key": "wrong"}, False),
        ({"x-api-key": ""}, False),
        ({"Authorization": "Basic right"}, False),
        ({"Authorization": "Bearer right"}, True),
        ({"x-api-key": "right"}, True),
    ],
)
def test_api_keys(server: Any, processor: Any, path: str, headers: Any, known: bool) -> None:
    service = Service(server.client, processor, "tiny", "ls-test")
    server.app = create_app(service, AccessRules(keys=("other", "right")))
    result = send(server, path, headers)
    assert (result.status_code != 401) == known
    if not known:
        assert "x-api-key" in message_of(result) and not server.client.requests
        assert (result.json().get("type") == "error") == ("/v1/messages" in path)


@pytest.mark.parametrize("path", COUNTED)
def test_too_large_bodies_are_refused(server: Any, processor: Any, path: str) -> None:
    service = Service(server.client, processor, "tiny", "ls-test")
    server.app = create_app(service, AccessRules(max_body_bytes=200))
    result = send(server, path, metadata={"x": "y" * 500})
    assert result.status_code == 413 and "larger" in message_of(result)

    async def pieces() -> Any:
        for _ in range(10):
            yield b" " * 50

    unannounced = fetch(server, "POST", path, content=pieces())
    assert unannounced.status_code == (413 if COUNTED[path] else 404)


@pytest.mark.parametrize("path", ROUTES)
def test_number_of_fields_is_limited(server: Any, path: str) -> None:
    """Each field costs time, known or not."""
    many = {f"field_{number}": number for number in range(MAX_FIELDS)}
    result = send(server, path, **many)
    assert result.status_code == 400
    assert f"fields; allowed: at most {MAX_FIELDS}" in message_of(result)


OTHERS: dict[str, tuple[str, ...]] = {
    "/v1/chat/completions": (),
    "/v1/completions": ("max_completion_tokens", "reasoning_effort", "chat_template_kwargs"),
    "/v1/responses": ("max_tokens", "max_completion_tokens", "reasoning_effort", "stop"),
    "/v1/messages": ("max_completion_tokens", "reasoning_effort", "stop", "n"),
}
"""For each route, fields of other routes that it does not have."""
SAMPLED = ("min_p", "logit_bias", "frequency_penalty", "bad_words", "guided_regex", "ignore_eos")


@pytest.mark.parametrize("path", OTHERS)
def test_fields_of_other_routes_are_refused(server: Any, path: str) -> None:
    sampled = SAMPLED if path in ("/v1/responses", "/v1/messages") else ()
    for name in (*OTHERS[path], *sampled):
        result = send(server, path, **{name: 5})
        assert result.status_code == 400 and message_of(result).startswith(f"{name}=5"), name
    harmless = {"frequency_penalty": 0, "n": 1, "logit_bias": {}, "presence_penalty": 0.0}
    result = send(server, path, **harmless)
    assert result.status_code == 200, result.text
    assert "x-lockstep-ignored-fields" not in result.headers


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        ("/v1/responses", "max_output_tokens", 0),
        ("/v1/messages", "stop_sequences", ["x"] * 17),
        ("/v1/messages", "stop_sequences", ["x" * 300]),
    ],
)
def test_errors_name_the_sent_field(server: Any, path: str, name: str, value: Any) -> None:
    result = send(server, path, **{name: value})
    assert result.status_code == 400 and message_of(result).startswith(name), result.text


@pytest.mark.parametrize("path", ROUTES)
def test_full_queue_is_429(server: Any, processor: Any, path: str) -> None:
    limits = Limits(max_running=0, max_queued=0)
    server.app = create_app(Service(server.client, processor, "tiny", "ls-test", limits))
    result = send(server, path)
    assert result.status_code == 429 and result.headers["retry-after"]
    assert not server.client.requests


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_request_timeout(server: Any, path: str, stream: bool) -> None:
    server.client.hang = True
    server.client.answer = lambda request: request.prompt_token_ids[:1]
    result = send(server, path, timeout=0.3, stream=stream)
    assert result.status_code == (200 if stream else 504)
    assert "time was up after 1 tokens" in result.text
    assert server.client.aborted == [r.id for r in server.client.requests]


@pytest.mark.parametrize("path", ROUTES)
def test_dead_engine_is_503(server: Any, path: str) -> None:
    server.client.alive = False
    assert send(server, path).status_code == 503


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_disconnected_client_aborts_the_request(server: Any, path: str, stream: bool) -> None:
    """The request is aborted, so its pages are freed and nothing is stored."""
    server.client.hang = True
    server.client.answer = lambda request: request.prompt_token_ids[:1]

    body = {**ROUTES[path], "stream": stream}
    asyncio.run(post_and_disconnect(server, path, body, requests=1))
    (request,) = server.client.requests
    assert server.client.aborted == [request.id]
    assert fetch(server, "GET", f"/v1/responses/{request.id}").status_code == 404


def test_requests_without_grammar_do_not_wait_for_compilation(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many grammars are being compiled, and however long that takes."""
    free = threading.Event()

    def slow(expected: Any, compiler: Any) -> Any:
        assert free.wait(30)
        return compile_structured_output(expected, compiler)

    monkeypatch.setattr("lockstep.text.processor.compile_structured_output", slow)

    async def run() -> None:
        async with server.http() as client:
            body = {"prompt": "x", "guided_choice": ["hello fox"]}
            retained = [
                asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(50)
            ]
            for path in ("/v1/completions", "/tokenize"):
                result = await asyncio.wait_for(client.post(path, json={"prompt": "x"}), 20)
                assert result.status_code == 200
            assert not any(task.done() for task in retained)
            free.set()
            assert {(await task).status_code for task in retained} == {200}

    asyncio.run(run())
