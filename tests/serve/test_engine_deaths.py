"""Requests of all APIs over HTTP while their engine is killed: no error, no different answer."""

import asyncio
import json
import os
import re
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.live_server import CALL, TOOLS
from tests.serve.server_process import PATIENCE, engine_of, served
from tests.serve.test_engine_process import counters
from tests.waiting import wait_until

SERVER = """
import sys
import lockstep.serve.engine_factory
from tests import engine_factories

lockstep.serve.engine_factory.engine_factory = engine_factories.fails_on_signals
from lockstep.__main__ import main

sys.argv = ["lockstep", *sys.argv[1:]]
main()
"""
FORKS = "from tests.forked_processes import fork_engines\n\nfork_engines()\n"
"""Lines before SERVER for which a new engine imports nothing."""
OPTIONS = ["--max-model-len", "1024", "--max-num-seqs", "16", "--speculative-config"]
OPTIONS += ['{"method": "mtp", "num_speculative_tokens": 3}', "--step-timeout", "5"]
WAYS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGUSR1, signal.SIGUSR2)
"""The last two let a step raise, and hang."""
GPU_WAYS = (signal.SIGHUP, signal.SIGKILL, signal.SIGSTOP, signal.SIGUSR1)
"""The first one causes a fault of CUDA."""
KILL_SECONDS = 5.0
VARYING = {"id", "call_id", "created", "created_at", "completed_at", "seed", "usage"}
"""Fields of answers that differ between two equal requests, or that depend on drafts."""
TEXT: dict[str, Any] = {"prompt": "def read(path):", "temperature": 1.0, "max_tokens": 40}
LONG = {**TEXT, "max_tokens": 120, "ignore_eos": True}
FLAT_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {**LONG, "stream": True, "logprobs": 2}),
    ("/v1/completions", {**TEXT, "n": 2, "stop": [" =", "):"], "logprobs": 1, "echo": True}),
    ("/v1/completions", {**TEXT, "structured_outputs": {"regex": "[a-f]{4}(-[0-9]{3}){6}"}}),
    ("/v1/completions", {**TEXT, "prompt": "1, 2, 3,", "priority": -1, "presence_penalty": 1.0}),
    ("/v1/chat/completions", {"messages": CALL, "tools": TOOLS, "max_tokens": 60}),
    ("/v1/chat/completions", {"messages": CALL, "tools": TOOLS, "stream": True, "max_tokens": 60}),
    ("/v1/responses", {"input": CALL, "tools": FLAT_TOOLS, "max_output_tokens": 60}),
    ("/v1/messages", {"messages": CALL, "max_tokens": 40}),
]


def request_of(number: int) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a request; all kinds alternate."""
    path, body = REQUESTS[number % len(REQUESTS)]
    seeded = path.startswith(("/v1/completions", "/v1/chat"))
    return path, {**body, "model": "lockstep", **({"seed": number} if seeded else GREEDY)}


GREEDY = {"temperature": 0}
"""For the APIs that have no seed."""


def stable(value: Any) -> Any:
    """Return an answer without the fields that vary."""
    if isinstance(value, dict):
        return {name: stable(item) for name, item in value.items() if name not in VARYING}
    return [stable(item) for item in value] if isinstance(value, list) else value


def joined(text: str) -> Any:
    """Return the events of a stream as one value: deltas come in pieces of any size."""
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert text.rstrip().endswith("data: [DONE]"), text[-300:]
    result: dict[str, Any] = {"text": "", "calls": "", "scores": [], "ends": []}
    for event in events:
        assert "error" not in event, event
        for choice in event["choices"]:
            delta = choice.get("delta") or {}
            result["text"] += (choice.get("text") or "") + (delta.get("content") or "")
            for call in delta.get("tool_calls") or ():
                function = call["function"]
                result["calls"] += (function.get("name") or "") + (function.get("arguments") or "")
            if scores := choice.get("logprobs"):
                result["scores"] += zip(scores["tokens"], scores["token_logprobs"], strict=True)
            result["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return result


async def answer(client: httpx.AsyncClient, number: int, arrivals: list[float]) -> Any:
    """Return a comparable answer to a request. arrivals: gets the times of a stream's events."""
    path, body = request_of(number)
    async with client.stream("POST", path, json=body) as response:
        text = ""
        async for part in response.aiter_text():
            text += part
            if body.get("stream"):
                arrivals.append(time.monotonic())
    assert response.status_code == 200, text
    return joined(text) if body.get("stream") else stable(json.loads(text))


async def answers(
    socket: Path,
    numbers: Sequence[int],
    streams: int,
    goes_on: Callable[[], bool] = lambda: False,
    arrivals: list[float] | None = None,
) -> Any:
    """Return the answers to all requests, of which `streams` run at once.

    goes_on: go on with requests from the first one while it returns True. arrivals: see answer().
    """
    times = [] if arrivals is None else arrivals
    transport = httpx.AsyncHTTPTransport(uds=str(socket))
    pending = list(reversed(numbers))
    result: list[tuple[int, Any]] = []

    async def work(client: httpx.AsyncClient) -> None:
        while pending or goes_on():
            number = pending.pop() if pending else numbers[len(result) % len(numbers)]
            result.append((number, await answer(client, number, times)))

    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", timeout=4 * PATIENCE
    ) as client:
        await asyncio.gather(*(work(client) for _ in range(streams)))
    return result


def kill(running: Any, client: httpx.Client, way: signal.Signals, seconds: float) -> float:
    """End the engine of a server in one way, once it has served for some seconds, and return the
    time.
    """
    served_before = counters(client)[GENERATED]
    wait_until(lambda: client.get("/health").status_code == 200)
    wait_until(lambda: counters(client)[GENERATED] > served_before)
    time.sleep(seconds)
    os.kill(engine_of(running), way)
    return time.monotonic()


def pauses(deaths: Sequence[tuple[signal.Signals, float]], arrivals: Sequence[float]) -> str:
    """Return the seconds without any event after each kind of death: median and maximum."""
    ends = [*(begin for _, begin in deaths[1:]), arrivals[-1]]
    by_way: dict[signal.Signals, list[float]] = {}
    for (way, begin), end in zip(deaths, ends, strict=True):
        times = [begin, *(one for one in arrivals if begin < one < end)]
        gap = max((after - before for before, after in pairwise(times)), default=end - begin)
        by_way.setdefault(way, []).append(gap)
    return ", ".join(
        f"{way.name} {statistics.median(gaps):.1f} ({max(gaps):.1f})"
        for way, gaps in by_way.items()
    )


GENERATED = 'lockstep:generation_tokens_total{model_name="lockstep"}'
RESUMED = 'lockstep:requests_resumed_total{model_name="lockstep"}'
RESTARTS = 'lockstep:engine_restarts_total{model_name="lockstep"}'


def assert_equal(actual: Sequence[tuple[int, Any]], expected: dict[int, Any]) -> None:
    """Assert that all answers are the expected ones."""
    different = [(number, got) for number, got in actual if got != expected[number]]
    assert not different, f"{len(different)} differ: {different[0]} {expected[different[0][0]]}"


def test_answers_survive_the_death_of_their_engine(tmp_path: Path) -> None:
    """Kill the engine once, while one request of each kind runs."""
    path = tmp_path / "s"
    numbers = range(len(REQUESTS))
    with served(path, *OPTIONS, code=FORKS + SERVER) as (running, client):
        expected = dict(asyncio.run(answers(path, numbers, len(numbers))))
        # Counters are those of the last heartbeat: tokens of these answers must not count as new.
        time.sleep(0.6)
        before = counters(client)

        async def killed() -> Any:
            task = asyncio.create_task(answers(path, numbers, len(numbers)))
            await asyncio.to_thread(kill, running, client, signal.SIGKILL, 0)
            return await task

        assert_equal(asyncio.run(killed()), expected)
        time.sleep(0.6)  # two heartbeats
        after = counters(client)
        assert after[RESTARTS] == 1 and after[RESUMED] > before[RESUMED]
        assert client.get("/health").text == "ok"


def usage_of(pid: int) -> tuple[int, int]:
    """Return (open descriptors, resident KiB) of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    (resident,) = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")]
    return len(os.listdir(f"/proc/{pid}/fd")), int(resident)


def gauges(client: httpx.Client) -> dict[str, float]:
    """Return the requests and the share of pages that the engine has now."""
    pattern = r"^lockstep:(num_requests_\w+|kv_cache_usage_perc){.*} (\S+)$"
    pairs = re.findall(pattern, client.get("/metrics").text, re.MULTILINE)
    return {name: float(value) for name, value in pairs}


def survive(
    folder: Path,
    ways: Sequence[signal.Signals],
    seconds: float,
    num_requests: int,
    *options: str,
    times: int = 2,
) -> None:
    """Kill the engine in these ways every KILL_SECONDS, `times` each at least, under 50 streams.

    An engine that starts for longer is killed once it has served for half a second.
    """
    path = folder / "s"
    different = range(100)
    numbers = [number % len(different) for number in range(num_requests)]
    with served(path, *OPTIONS, *options, code=SERVER, log=folder / "log") as (running, client):
        expected = dict(asyncio.run(answers(path, different, 50)))
        time.sleep(1)
        descriptors, memory = usage_of(running.pid)
        deaths: list[tuple[signal.Signals, float]] = []
        arrivals: list[float] = []
        is_killing = True

        async def killed() -> Any:
            nonlocal is_killing
            task = asyncio.create_task(answers(path, numbers, 50, lambda: is_killing, arrivals))
            begun = time.monotonic()
            while time.monotonic() < begun + seconds or len(deaths) < times * len(ways):
                due = time.monotonic() + KILL_SECONDS
                way = ways[len(deaths) % len(ways)]
                deaths.append((way, await asyncio.to_thread(kill, running, client, way, 0.5)))
                await asyncio.sleep(max(due - time.monotonic(), 0))
            is_killing = False
            return await task

        begun = time.monotonic()
        actual = asyncio.run(killed())
        took = time.monotonic() - begun
        time.sleep(1)
        after = counters(client)
        usage = usage_of(running.pid)
        print(
            f"{len(actual)} requests in {took:.0f} s, {len(deaths)} deaths, "
            f"{after[RESTARTS]:.0f} restarts, {after[RESUMED]:.0f} requests went on, "
            f"seconds of pause: {pauses(deaths, arrivals)}; "
            f"descriptors {descriptors} -> {usage[0]}, memory {memory >> 10} -> "
            f"{usage[1] >> 10} MiB"
        )
        assert len(actual) >= num_requests
        assert_equal(actual, expected)
        assert after[RESUMED] > len(deaths)
        assert usage[0] <= descriptors and usage[1] < memory + (32 << 10)
        assert client.get("/health").text == "ok"
        remaining = gauges(client)
        assert remaining and not any(remaining.values())
        engine_of(running)  # one engine is left


@pytest.mark.slow
def test_thousand_requests_while_the_engine_is_killed_every_five_seconds(tmp_path: Path) -> None:
    """50 streams for at least two minutes and 1,000 requests."""
    survive(tmp_path, WAYS, 120, 1000, "--device", "cpu")


@pytest.mark.gpu
def test_requests_outlive_faults_of_a_gpu(tmp_path: Path) -> None:
    """CUDA refuses all work of a process after such a fault, so a new engine has to start."""
    options = ["--device", "cuda", "--num-gpu-blocks", "400", "--cuda-graph-mode", "none"]
    survive(tmp_path, GPU_WAYS, 0, 400, *options, times=1)
