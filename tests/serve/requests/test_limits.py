"""Queue limits, timeouts and faults of the service."""

import asyncio
import json

import pytest

from lockstep.serve.app import create_app
from lockstep.serve.requests.service import Limits, Service
from tests.serve.api_calls import CHAT_PATH, TEXT_PATH, fetch, post


def limited(server, processor, **limits):
    """Replace the server's limits; return the service."""
    service = Service(server.client, processor, "tiny", "ls-test", Limits(**limits))
    server.app = create_app(service)
    return service


def test_full_queue_is_429(server, processor):
    service = limited(server, processor, max_running=2, max_queued=1)
    response = post(server, TEXT_PATH, n=4)
    assert response.status_code == 429 and response.headers["retry-after"] == "1"
    assert response.json()["error"]["code"] == "queue_full"
    assert "4" not in service.fingerprint and not server.client.requests
    assert post(server, TEXT_PATH, n=3, max_tokens=40).status_code == 200
    assert post(server, TEXT_PATH, n=3, max_tokens=40).status_code == 200, "room was given back"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
def test_request_timeout(server, path, stream):
    server.client.hang = True
    server.client.answer = lambda request: [5]
    response = post(server, path, timeout=0.05, stream=stream)
    if stream:
        assert response.status_code == 200
        *_, last, done = [x for x in response.text.split("\n\n") if x]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert done == "data: [DONE]"
    else:
        assert response.status_code == 504
        error = response.json()["error"]
    assert error["code"] == "timeout" and "after 1 tokens" in error["message"]
    assert server.client.aborted == [r.id for r in server.client.requests]


def test_server_timeout_bounds_request_timeout(server, processor):
    limited(server, processor, max_seconds=0.05)
    server.client.hang = True
    server.client.answer = lambda request: [5]
    assert post(server, TEXT_PATH, timeout=50).status_code == 504


@pytest.mark.parametrize("timeout", [0, -1, "soon", 1e9, float("nan")])
def test_invalid_timeouts_are_refused(server, timeout):
    body = json.dumps({"prompt": "x", "timeout": timeout})
    headers = {"Content-Type": "application/json"}
    response = fetch(server, "POST", TEXT_PATH, content=body, headers=headers)
    assert response.status_code == 400 and response.json()["error"]["param"] == "timeout"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
def test_failed_row_fails_the_response(server, processor, path, stream):
    """The response and its record end with finish_reason error and a valid JSON error object."""
    records = []
    service = Service(server.client, processor, "tiny", "ls-test", on_record=[records.append])
    server.app = create_app(service)
    server.client.nan_after = 3
    response = post(server, path, stream=stream, max_tokens=40)
    assert response.status_code == 200
    lines = [x[6:] for x in response.text.split("\n\n") if x.startswith("data: {")]
    chunks = [json.loads(line) for line in lines] if stream else [response.json()]
    ends = [c for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert [(c["finish_reason"], c["error"]) for c in ends] == [("error", "the model gave NaN")]
    assert [record.error for record in records] == ["the model gave NaN"]


def test_hanging_step_is_unhealthy(server, processor):
    limited(server, processor, max_step_seconds=5.0)
    assert fetch(server, "GET", "/health").status_code == 200
    server.client.stalled_for = 6.0
    response = fetch(server, "GET", "/health")
    assert response.status_code == 503 and "6 s" in response.text
    assert post(server, TEXT_PATH).status_code == 503
    server.client.stalled_for = 0.0
    assert post(server, TEXT_PATH).status_code == 200


def test_shutdown_refuses_and_ends_requests(server, processor):
    """New requests are refused, running ones end with an error event."""
    service = limited(server, processor)
    server.client.hang = True
    server.client.answer = lambda request: [5]

    async def run():
        async with server.http() as client:
            body = {"prompt": "x", "stream": True, "max_tokens": 40}
            task = asyncio.create_task(client.post(TEXT_PATH, json=body))
            while not server.client.requests:
                await asyncio.sleep(0)
            service.stop_admission()
            refused = await client.post(TEXT_PATH, json=body)
            health = await client.get("/health")
            service.end_all()
            return refused, health, await task

    refused, health, streamed = asyncio.run(run())
    assert refused.status_code == 503 and refused.headers["retry-after"]
    assert health.status_code == 503
    *_, last, done = [x for x in streamed.text.split("\n\n") if x]
    assert "shutting down" in last and done == "data: [DONE]"
    assert server.client.aborted


def test_internal_errors_are_not_disclosed(server, caplog):
    """The client gets an error number, and the log the details."""
    server.client.error = KeyError("secret path")
    response = post(server, TEXT_PATH)
    assert response.status_code == 500
    message = response.json()["error"]["message"]
    assert "secret" not in message and "KeyError" not in message
    number = message.split()[2].rstrip(";")
    assert number in caplog.text and "secret path" in caplog.text
