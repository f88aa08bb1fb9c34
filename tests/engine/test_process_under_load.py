"""The bundled model's engine process, killed or stopped while it is full and more requests wait."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from lockstep import LLM, SamplingParams
from lockstep.engine.async_engine import ENGINE_RESTARTED, AsyncEngine, Stream
from lockstep.engine.process_transport import ProcessTransport
from lockstep.engine.token_update import TokenUpdate
from lockstep.scheduling.request import Request
from tests import engine_factories
from tests.engine_factories import run, wait_until_empty

REQUESTS = 16
ROWS = 4
STEP_SECONDS = 5.0
READY_SECONDS = 5.0
"""Within so many seconds of its readiness, an engine has answered what waited for it."""
SHORT = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
LONG = replace(SHORT, max_tokens=3000)
DRAFTING = {"method": "mtp", "num_speculative_tokens": 3}
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.slow),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def prompt(number: int) -> list[int]:
    """The token ids of a request's prompt, no two alike."""
    return [300 + (number * 31 + i * i) % 1000 for i in range(40)]


def ask(number: int) -> Request:
    """The first ROWS requests are long; their rows are taken when the engine is lost."""
    params = LONG if number < ROWS else SHORT
    return Request(f"request {number}", prompt(number), replace(params, seed=number), seed=number)


@pytest.fixture(scope="module", params=DEVICES)
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Those of the engine, whose cache leaves room for a second engine on a GPU."""
    return {
        "device": request.param,
        "max_model_len": 4096,
        "max_num_seqs": ROWS,
        "num_gpu_blocks": ROWS * 65,
    }


@pytest.fixture(scope="module")
def expected(settings: dict[str, Any]) -> list[list[int]]:
    """What LLM.generate answers the requests that wait: each alone, without drafts."""
    llm = LLM(**settings)
    found = []
    for number in range(ROWS, REQUESTS):
        (answer,) = llm.generate(
            {"prompt_token_ids": prompt(number)}, replace(SHORT, seed=number, detokenize=False)
        )
        found.append(answer.outputs[0].token_ids)
    return found


@pytest.fixture(scope="module")
def client(settings: dict[str, Any], expected: list[list[int]]) -> Iterator[AsyncEngine]:
    """The engine in its process, drafting; `expected` has compiled what it needs by then."""
    make = partial(engine_factories.plain, settings | {"speculative_config": DRAFTING})
    found = AsyncEngine(ProcessTransport(make, STEP_SECONDS))
    found.start()
    yield found
    found.shutdown()


async def answer(stream: Stream) -> tuple[list[int], TokenUpdate, float]:
    """A stream's tokens, its last update, and when that came."""
    tokens: list[int] = []
    async for update in stream:
        tokens += update.token_ids
    return tokens, update, time.monotonic()


async def ready_again(client: AsyncEngine) -> float:
    """When the engine that follows a lost one is ready."""
    while not client.restarting:
        await asyncio.sleep(0.002)
    while client.restarting:
        await asyncio.sleep(0.002)
    return time.monotonic()


async def lose(client: AsyncEngine, end: Callable[[int], None]) -> tuple[Any, float]:
    """Loses the engine with all rows taken; what came of each request, and when it was ready."""
    streams = [client.stream(ask(number)) for number in range(REQUESTS)]
    for stream in streams[:ROWS]:
        await anext(aiter(stream))
    watched = asyncio.create_task(ready_again(client))
    end(client.transport.pid)
    found = await asyncio.gather(*map(answer, streams))
    return found, await watched


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_what_waits_is_answered_as_ever(
    client: AsyncEngine, expected: list[list[int]], sent: signal.Signals
) -> None:
    before = wait_until_empty(client)
    begun = time.monotonic()
    found, ready = run(lose(client, lambda pid: os.kill(pid, sent)))
    for _, last, _ in found[:ROWS]:
        assert (last.finish_reason, last.error) == ("error", ENGINE_RESTARTED)
    assert [tokens for tokens, _, _ in found[ROWS:]] == expected
    assert {last.finish_reason for _, last, _ in found[ROWS:]} == {"length"}
    slowest = max(when for _, _, when in found[ROWS:]) - ready
    print(f"{sent.name}: ready after {ready - begun:.2f} s, all answered {slowest:.2f} s later")
    assert slowest < READY_SECONDS
    if sent == signal.SIGSTOP:
        assert ready - begun > STEP_SECONDS, "a stopped process is noticed by its silence"
    after = wait_until_empty(client)
    assert after.restarts_total == before.restarts_total + 1
