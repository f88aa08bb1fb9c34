"""Gateways of other projects in front of two servers: balance, prefixes, streams, a lost server.

`make test-gateways` installs the gateways into build/gateways and runs this.
"""

import asyncio
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateways.fleet import BIN, MODEL, PAGE, Fleet, Server, gateway, two_servers, wait_for

pytestmark = pytest.mark.slow
WORDS = "record owner limit clock square prime letter garden river number window paper".split()
NUM_STREAMS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert BIN.exists(), "no gateways here; install them: make test-gateways"
    return tmp_path_factory.mktemp("gateways")


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[list[Server]]:
    with two_servers(folder) as result:
        yield result


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


def cached(response: Any) -> int:
    return int(response["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("kind", ["vllm-router", "smg"])
def test_round_robin_balances_and_changes_no_answer(
    kind: str, servers: list[Server], folder: Path
) -> None:
    messages = [{"role": "user", "content": "List the first 12 primes."}]
    with gateway(kind, "round_robin", servers, folder) as fleet:
        before = fleet.finished()
        answers = [fleet.chat(messages, 24) for _ in range(8)]
        after = fleet.finished()
    with httpx.Client(base_url=servers[0].url, timeout=60) as client:
        direct = Fleet(servers, client).chat(messages, 24)
    assert [b - a for a, b in zip(before, after, strict=True)] == [4, 4]
    for answer in answers:
        assert answer["choices"][0]["message"] == direct["choices"][0]["message"]
        assert answer["system_fingerprint"] == direct["system_fingerprint"]


@pytest.mark.parametrize(
    ("kind", "policy"),
    [("vllm-router", "cache_aware"), ("vllm-router", "kv_aware"), ("smg", "cache_aware")],
)
def test_chats_stay_where_their_prefix_is(
    kind: str, policy: str, servers: list[Server], folder: Path
) -> None:
    """The third turn hits pages of the turns before it."""
    rng = random.Random(f"{kind} {policy}")
    chats: list[list[dict[str, str]]] = [[] for _ in range(4)]
    with gateway(kind, policy, servers, folder) as fleet:
        before = fleet.finished()
        for turn in range(3):
            for chat in chats:
                chat.append({"role": "user", "content": words(rng, 50)})
                response = fleet.chat(chat)
                assert turn < 2 or cached(response) >= PAGE, response["usage"]
                chat.append(response["choices"][0]["message"] | {"role": "assistant"})
        after = fleet.finished()
    counts = [b - a for a, b in zip(before, after, strict=True)]
    assert sum(counts) == 12


def test_events_route_prompts_that_the_gateway_never_saw(
    servers: list[Server], folder: Path
) -> None:
    """Prompts go to one server directly. The gateway knows of them by KV events alone."""
    rng = random.Random(5)
    with gateway("vllm-router", "kv_aware", servers, folder) as fleet:
        for number in range(6):
            server = servers[number % 2]
            prompt = words(rng, 150)
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
            first = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
            assert cached(first) == 0
            time.sleep(0.5)  # until the gateway has the events
            before = fleet.finished()
            body["prompt"] = f"{prompt} and more"
            second = fleet.client.post("/v1/completions", json=body).json()
            after = fleet.finished()
            assert cached(second) >= first["usage"]["prompt_tokens"] // PAGE * PAGE - PAGE
            assert after[number % 2] == before[number % 2] + 1, "it went to the other server"


async def read_stream(client: httpx.AsyncClient, started: list[int], number: int) -> str:
    """Return how a long stream ended: complete, or how it broke."""
    messages = [{"role": "user", "content": f"Write a long story about number {number}."}]
    body = {
        "model": MODEL,
        "messages": messages,
        "max_tokens": 700,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
    }
    count = 0
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                return f"status {response.status_code}"
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return "complete"
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        return "error event"
                    count += 1
                    if count == 3:
                        started.append(number)
    except httpx.HTTPError as error:
        return type(error).__name__
    return "ends without [DONE]"


@pytest.mark.parametrize(
    ("kind", "policy"), [("vllm-router", "round_robin"), ("smg", "round_robin")]
)
def test_streams_of_a_lost_server_break_and_the_rest_goes_on(
    kind: str, policy: str, folder: Path, record_property: Any
) -> None:
    """Neither gateway continues a stream. It breaks visibly, and later requests are answered."""
    with two_servers(folder) as servers, gateway(kind, policy, servers, folder) as fleet:
        url = str(fleet.client.base_url)

        async def run() -> tuple[list[str], list[int]]:
            async with httpx.AsyncClient(base_url=url, timeout=120) as client:
                started: list[int] = []
                tasks = [
                    asyncio.create_task(read_stream(client, started, number))
                    for number in range(NUM_STREAMS)
                ]
                while len(started) < NUM_STREAMS:
                    assert not any(task.done() for task in tasks), "a stream was too short"
                    await asyncio.sleep(0.02)
                running = [int(server.metric("num_requests_running")) for server in servers]
                servers[0].kill()
                return list(await asyncio.gather(*tasks)), running

        ends, running = asyncio.run(run())
        assert running == [NUM_STREAMS // 2] * 2
        assert ends.count("complete") == running[1], ends
        broken = sorted(set(ends) - {"complete"})
        began = time.monotonic()
        statuses = [
            fleet.client.post(
                "/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 1}
            ).status_code
            for _ in range(10)
        ]
        record_property("broken streams", broken)
        record_property("statuses after the loss", statuses)
        record_property("seconds of ten requests", round(time.monotonic() - began, 2))
        assert statuses == [200] * 10, "the gateway sends nothing to the lost server, or retries"
        print(f"\n{kind}: {ends}, then {statuses}")


@pytest.mark.parametrize("kind", ["vllm-router", "smg"])
def test_streams_are_passed_on_as_they_come(kind: str, servers: list[Server], folder: Path) -> None:
    """The first event arrives long before the last one, and the text is that of a direct stream."""
    body = {
        "model": MODEL,
        "prompt": "def read(path):",
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
    }
    texts = {}
    with gateway(kind, "round_robin", servers, folder) as fleet:
        for url in (servers[0].url, str(fleet.client.base_url)):
            times = []
            parts = []
            began = time.monotonic()
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        times.append(time.monotonic())
                        parts.append(json.loads(line[6:])["choices"][0]["text"])
            texts[url] = "".join(parts)
            # A gateway that buffers a stream passes its first event on together with its last one.
            assert len(times) > 20 and times[0] - began < 0.5 * (times[-1] - began)
    assert len(set(texts.values())) == 1


def test_a_server_that_returns_is_used_again(folder: Path) -> None:
    """vllm-router notices by /health that a server is back on its old port."""
    with (
        two_servers(folder) as servers,
        gateway("vllm-router", "round_robin", servers, folder) as fleet,
    ):
        lost = servers[0]
        lost.kill()
        time.sleep(5)  # three health checks fail
        back = Server(folder, "server-back", lost.port, lost.events_port, lost.replay_port)
        servers[0] = back
        wait_for(f"{back.url}/health", back.process, back.log)
        deadline = time.monotonic() + 60
        while not back.metric("request_success_total") and time.monotonic() < deadline:
            fleet.chat([{"role": "user", "content": "hello"}])
            time.sleep(0.5)
        assert back.metric("request_success_total") > 0
