"""The bundled model's engine process, killed or stopped while it is full and more requests wait:
all are answered as without."""

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
from lockstep.engine.async_engine import AsyncEngine, Stream
from lockstep.engine.process_transport import ProcessTransport
from lockstep.engine.token_update import TokenUpdate
from lockstep.scheduling.request import Request
from tests import engine_factories
from tests.engine_factories import run, wait_until_empty

REQUESTS = 16
ROWS = 4
STEP_SECONDS = 5.0
READY_SECONDS = 20.0
"""Time limit, from readiness, to answer all requests."""
SHORT = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
LONG = replace(SHORT, max_tokens=120)
DRAFTING = {"method": "mtp", "num_speculative_tokens": 3}
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.slow),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def prompt(number: int) -> list[int]:
    """Return the token ids of a request's prompt, all different."""
    return [300 + (number * 31 + i * i) % 1000 for i in range(40)]


def params_of(number: int) -> SamplingParams:
    """Return a request's parameters; the first ROWS are long and occupy all rows when the engine
    is lost."""
    return replace(LONG if number < ROWS else SHORT, seed=number)


def make_request(number: int) -> Request:
    """Return a request."""
    return Request(f"request {number}", prompt(number), params_of(number), seed=number)


@pytest.fixture(scope="module", params=DEVICES)
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the engine's settings, whose cache leaves memory for a second engine on a GPU."""
    return {
        "device": request.param,
        "max_model_len": 4096,
        "max_num_seqs": ROWS,
        "num_gpu_blocks": ROWS * 65,
    }


@pytest.fixture(scope="module")
def expected(settings: dict[str, Any]) -> list[list[int]]:
    """Return LLM.generate's answers to the requests, each alone and without drafts."""
    llm = LLM(**settings)
    results = []
    for number in range(REQUESTS):
        (answer,) = llm.generate(
            {"prompt_token_ids": prompt(number)}, replace(params_of(number), detokenize=False)
        )
        results.append(answer.outputs[0].token_ids)
    return results


@pytest.fixture(scope="module")
def client(settings: dict[str, Any], expected: list[list[int]]) -> Iterator[AsyncEngine]:
    """Yield the engine in its process, with drafts; `expected` has compiled its kernels by then."""
    make = partial(engine_factories.plain, settings | {"speculative_config": DRAFTING})
    result = AsyncEngine(ProcessTransport(make, STEP_SECONDS))
    result.start()
    yield result
    result.shutdown()


async def answer(stream: Stream) -> tuple[list[int], TokenUpdate, float]:
    """Return (a stream's tokens, its last update, the time of that update)."""
    tokens: list[int] = []
    async for update in stream:
        tokens += update.token_ids
    return tokens, update, time.monotonic()


async def time_of_readiness(client: AsyncEngine) -> float:
    """Return the time when the engine that replaces a lost one is ready."""
    while not client.restarting:
        await asyncio.sleep(0.002)
    while client.restarting:
        await asyncio.sleep(0.002)
    return time.monotonic()


async def lose_engine(client: AsyncEngine, end: Callable[[int], None]) -> tuple[Any, float]:
    """End the engine with all rows in use; return (each request's answer, time of readiness)."""
    streams = [client.stream(make_request(number)) for number in range(REQUESTS)]
    begun = [(await anext(aiter(stream))).token_ids for stream in streams[:ROWS]]
    watched = asyncio.create_task(time_of_readiness(client))
    end(client.transport.pid)
    rest = await asyncio.gather(*map(answer, streams))
    begun += [[]] * (REQUESTS - ROWS)
    result = [(first + tokens, *more) for first, (tokens, *more) in zip(begun, rest, strict=True)]
    return result, await watched


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_all_requests_are_answered_after_a_restart(
    client: AsyncEngine, expected: list[list[int]], sent: signal.Signals
) -> None:
    before = wait_until_empty(client)
    begun = time.monotonic()
    actual, ready = run(lose_engine(client, lambda pid: os.kill(pid, sent)))
    assert [tokens for tokens, _, _ in actual] == expected
    assert {last.finish_reason for _, last, _ in actual} == {"length"}
    slowest = max(when for _, _, when in actual) - ready
    print(f"{sent.name}: ready after {ready - begun:.2f} s, all answered {slowest:.2f} s later")
    assert slowest < READY_SECONDS
    if sent == signal.SIGSTOP:
        assert ready - begun > STEP_SECONDS, "a stopped process is noticed by its silence"
    after = wait_until_empty(client)
    assert after.restarts_total == before.restarts_total + 1
    assert after.resumed_total == before.resumed_total + ROWS
