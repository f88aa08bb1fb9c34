"""Tests of concurrent streams: each is complete, and no resource leaks."""

import asyncio
import contextlib
import json
import multiprocessing
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from lockstep import LLM
from lockstep.engine.process_transport import ProcessTransport
from lockstep.llm import processor_of
from lockstep.text.settings import TextSettings
from tests.engine_factories import PATIENCE, plain, wait_until_empty
from tests.serve.live_server import MTP, SETTINGS, TOOLS, listening, serving
from tests.waiting import wait_until

CALLS = 500
OWNERS = ("Zorin", "Tavoli", "Kelmar", "Bosan", "Ferdo")


def burn(until: float) -> None:
    """Keep one core busy."""
    while time.time() < until:
        sum(i * i for i in range(10_000))


@pytest.fixture
def busy() -> Any:
    """Run two processes that use all time of both cores."""
    context = multiprocessing.get_context("spawn")
    until = time.time() + 1800
    rest = [context.Process(target=burn, args=(until,), daemon=True) for _ in range(2)]
    for other in rest:
        other.start()
    yield
    for other in rest:
        other.terminate()
        other.join()


@pytest.mark.slow
def test_500_streamed_tool_calls_on_a_busy_machine(busy: Any) -> None:
    settings = {**SETTINGS, "max_num_seqs": 8}
    with serving(LLM(speculative_config=MTP, **settings)) as server:
        patient = server.ask.with_options(timeout=600)

        def call(number: int) -> None:
            rng = random.Random(number)
            owner = OWNERS[number % len(OWNERS)]
            limit = number % 40
            text = f"Find the record where owner is {owner} and limit is {limit}."
            stream = patient.chat.completions.create(
                model="lockstep",
                messages=[{"role": "user", "content": text}],
                tools=TOOLS,
                temperature=0,
                max_tokens=80,
                stream=True,
                stream_options={"include_usage": True},
            )
            name = ""
            arguments = ""
            ends = []
            usage = None
            for chunk in stream:
                if rng.random() < 0.05:
                    time.sleep(rng.random() / 10)
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    ends += [choice.finish_reason] if choice.finish_reason else []
                    for part in choice.delta.tool_calls or []:
                        name += part.function.name or ""
                        arguments += part.function.arguments or ""
            assert (name, ends) == ("find_record", ["tool_calls"])
            assert json.loads(arguments) == {"owner": owner, "limit": limit}
            assert usage is not None and usage.completion_tokens > 10

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(call, range(CALLS)))


STREAMS = 200
PROMPTS = ("1, 2, 3,", "def read(path):", "Once upon a time", "SELECT owner FROM")


@contextlib.contextmanager
def in_thread() -> Iterator[SimpleNamespace]:
    """Yield the server over an engine in a thread."""
    with serving(LLM(**LOAD)) as result:
        yield result


@contextlib.contextmanager
def in_process() -> Iterator[SimpleNamespace]:
    """Yield the server over an engine in its own process."""
    transport = ProcessTransport(partial(plain, LOAD), PATIENCE)
    processor = processor_of(transport.facts, TextSettings())
    with listening(transport, processor, transport.facts.fingerprint) as result:
        yield result


LOAD: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 16, "num_gpu_blocks": 60}


async def one_stream(client: httpx.AsyncClient, number: int) -> str | None:
    """Return the text of a stream read to its end, or None for one that is abandoned."""
    rng = random.Random(number)
    leaves = rng.choice((None, None, 0, 1, 5))
    body = {
        "prompt": PROMPTS[number % len(PROMPTS)],
        "max_tokens": 40,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "n": 2 if leaves == 5 else 1,
    }
    text = ""
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        if leaves == 0:
            return None
        async for line in answer.aiter_lines():
            if leaves is not None and len(text) > leaves:
                return None
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    return text


@pytest.mark.slow
@pytest.mark.parametrize("open_server", [in_thread, in_process])
def test_200_streams_with_abandoned_ones(open_server: Any) -> None:
    """No row, page, stream or task leaks, and other streams change no answer."""
    with open_server() as server:

        async def work() -> list[str | None]:
            limits = httpx.Limits(max_connections=STREAMS)
            async with httpx.AsyncClient(
                base_url=server.url, trust_env=False, timeout=600, limits=limits
            ) as client:
                return await asyncio.gather(*(one_stream(client, i) for i in range(STREAMS)))

        idle = len(asyncio.all_tasks(server.loop))
        texts = asyncio.run(work())
        full: dict[int, set[str]] = {}
        for number, text in enumerate(texts):
            if text is not None:
                full.setdefault(number % len(PROMPTS), set()).add(text)
        assert sum(text is not None for text in texts) > STREAMS / 4
        assert all(len(actual) == 1 for actual in full.values())
        wait_until_empty(server.engine)
        assert not server.service._active
        wait_until(lambda: len(asyncio.all_tasks(server.loop)) == idle)
