"""The server and its engine process from outside: kills, restarts, signals."""

import json
import os
import signal
import statistics
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.server_process import PATIENCE, engine_of, is_gone, served
from tests.waiting import wait_until

LONG = {"prompt": "1, 2,", "max_tokens": 1900, "ignore_eos": True, "stream": True}
RUNS = {**LONG, "max_tokens": 300, "logprobs": 1, "seed": 3, "temperature": 1.0}
SHORT = {"prompt": "def read(path):", "max_tokens": 30, "seed": 5, "temperature": 1.0}
HELD = {**SHORT, "structured_outputs": {"regex": "[a-f]{8}"}}
BEHIND = {**SHORT, "structured_outputs": {"regex": "[g-k]{8}"}}
"""Request whose grammar is compiled once the previous one has a row, since there is one row."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Any]:
    """Yield (the server's process, a client), with one row."""
    options = ["--max-model-len", "2048", "--max-num-seqs", "1", "--shutdown-timeout", "80"]
    with served(tmp_path / "s", *options) as result:
        yield result


def completion_text(client: httpx.Client, body: dict[str, Any]) -> str:
    """Return the text of a completion."""
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def choices_of(lines: Iterable[str]) -> tuple[str, list[Any], list[Any], Any]:
    """Return (text, tokens, log-probabilities, finish reason) of a stream's events."""
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert not any("error" in event for event in events)
    choices = [event["choices"][0] for event in events]
    scores = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    return (
        "".join(choice["text"] for choice in choices),
        [token for one in scores for token in one["tokens"]],
        [score for one in scores for score in one["token_logprobs"]],
        choices[-1]["finish_reason"],
    )


def counters(client: httpx.Client) -> dict[str, float]:
    """Return the totals of /metrics."""
    lines = client.get("/metrics").text.splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in pairs if "_total" in name}


@pytest.mark.slow
def test_killed_engine_restarts_and_interrupt_ends_gracefully(server: Any) -> None:
    """Requests, also those that arrive during the restart, get the same answers as without it. Then
    Ctrl-C lets answers finish."""
    running, client = server
    bodies = (SHORT, HELD, BEHIND)
    expected = [completion_text(client, body) for body in bodies]
    with client.stream("POST", "/v1/completions", json=RUNS) as run:
        streamed = choices_of(run.iter_lines())
    time.sleep(0.6)  # two pulses
    before = counters(client)
    engine = engine_of(running)
    waiting: list[Future[str]] = []
    pool = ThreadPoolExecutor(len(bodies))
    with pool, client.stream("POST", "/v1/completions", json=RUNS) as run:
        lines = run.iter_lines()
        received = [next(lines)]
        waiting = [pool.submit(completion_text, client, body) for body in bodies]
        wait_until(lambda: num_waiting(client) == len(bodies))
        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: client.get("/health").status_code == 503)
        waiting.append(pool.submit(completion_text, client, SHORT))
        health = watch_restart(client)
        received += lines
        assert [future.result(PATIENCE) for future in waiting] == [*expected, expected[0]]
    assert choices_of(received) == streamed
    assert health == {"the engine is restarting. Requests wait for it."}
    time.sleep(0.6)
    after = counters(client)
    assert all(after[name] >= value for name, value in before.items())
    assert after['lockstep:engine_restarts_total{model_name="lockstep"}'] == 1
    resumed = after['lockstep:requests_resumed_total{model_name="lockstep"}']
    assert resumed == 1, "one had a row, and the others waited, with a compiled grammar or without"

    engine = engine_of(running)
    body = {**LONG, "max_tokens": 100}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.killpg(running.pid, signal.SIGINT)
        result = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert result[-1]["choices"][0]["finish_reason"] == "length"
    begun = time.monotonic()
    assert running.wait(PATIENCE) == 0
    assert time.monotonic() - begun < 30, "it does not wait when nothing runs"
    wait_until(lambda: is_gone(engine))
    assert "KeyboardInterrupt" not in running.stderr.read()


def watch_restart(client: httpx.Client) -> set[str]:
    """Return the states of /health until it is ok again; every reply comes quickly."""
    seen: set[str] = {client.get("/health").text} - {"ok"}
    times: list[float] = []
    while True:
        began = time.monotonic()
        answer = client.get("/health")
        times.append(time.monotonic() - began)
        if answer.status_code == 200 and seen:
            break
        if answer.status_code != 200:
            seen.add(answer.text)
        assert sum(times) < PATIENCE
        time.sleep(0.02)
    assert statistics.median(times) < 0.1, "half of them; other processes may hold up one"
    return seen


@pytest.mark.slow
def test_engine_ends_with_its_server(server: Any) -> None:
    running, client = server
    engine = engine_of(running)
    with client.stream("POST", "/v1/completions", json=LONG) as answer:
        next(answer.iter_lines())
        assert not is_gone(engine)
        running.kill()
        wait_until(lambda: is_gone(engine))


@pytest.mark.slow
def test_sigterm_finishes_accepted_requests(server: Any) -> None:
    """The running request and the waiting ones are answered before the server ends."""
    running, client = server
    bodies = [{**SHORT, "max_tokens": 120, "ignore_eos": True, "seed": seed} for seed in range(6)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        requested = [pool.submit(completion_text, client, body) for body in bodies]
        wait_until(lambda: num_waiting(client) == len(bodies) - 1)
        running.send_signal(signal.SIGTERM)
        assert all(one.result(PATIENCE) for one in requested)
    assert running.wait(PATIENCE) == 0


def num_waiting(client: httpx.Client) -> float:
    """Return the number of waiting requests."""
    lines = client.get("/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith("lockstep:num_requests_waiting{")]
    return float(line.rsplit(" ", 1)[1])
