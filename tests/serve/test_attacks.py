"""Slow attacks on a whole server: it keeps running, others are served, nothing leaks."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.server_process import PATIENCE, served

pytestmark = pytest.mark.slow
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "count"}]
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Path, httpx.Client]]:
    path = tmp_path / "s"
    with served(path) as (_, client):
        yield path, client


def figure(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith(f"lockstep:{name}{{")]
    return float(line.split()[-1])


def until_idle(client: httpx.Client) -> None:
    deadline = time.monotonic() + PATIENCE
    while any(figure(client, name) for name in GAUGES):
        assert time.monotonic() < deadline, {name: figure(client, name) for name in GAUGES}
        time.sleep(0.1)


def open_request(path: Path, **body: Any) -> socket.socket:
    """Return a connection with a request whose response is not read."""
    sent = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(sent)}\r\n"
    result = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    result.connect(str(path))
    result.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + sent)
    return result


def test_unread_streams_are_released(server: tuple[Path, httpx.Client]) -> None:
    """Their clients leave with everything unread; pages are freed, and others are served."""
    path, client = server
    body = {"messages": USER, "stream": True, "n": 8, "max_tokens": 300, "ignore_eos": True}
    unread = [open_request(path, **body, logprobs=True, top_logprobs=20) for _ in range(100)]
    for _ in range(50):
        assert client.get("/health").text == "ok"
        time.sleep(0.2)
    for one in unread:
        one.close()
    until_idle(client)
    response = client.post(CHAT, json={"messages": USER, "max_tokens": 4})
    assert response.status_code == 200


def test_ambiguous_grammars_end_with_an_error(server: tuple[Path, httpx.Client]) -> None:
    """They end before a step takes so long that the engine counts as lost."""
    _, client = server
    grammar = 'start: e\ne: e "1" e | e e | "1" | "2"'
    ends = client.post("/tokenize", json={"prompt": "<|im_end|><|endoftext|>"}).json()["tokens"]
    body = {
        "messages": USER,
        "structured_outputs": {"grammar": grammar},
        "max_tokens": 1000,
        "logit_bias": {str(token): -100 for token in ends},
    }
    result: list[httpx.Response] = []

    def ask() -> None:
        result.append(client.post(CHAT, json=body, timeout=PATIENCE))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for one in threads:
        one.start()
    plain = client.post(CHAT, json={"messages": USER, "max_tokens": 4})
    assert plain.status_code == 200
    for one in threads:
        one.join()
    reasons = {choice["finish_reason"] for one in result for choice in one.json()["choices"]}
    assert reasons == {"error"}
    assert figure(client, "engine_restarts_total") == 0
    until_idle(client)
