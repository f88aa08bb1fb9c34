"""Many streams on a busy machine: every tool call comes through whole, and the same."""

import json
import multiprocessing
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lockstep import LLM
from tests.serve.test_end_to_end import MTP, SETTINGS, TOOLS, serving

CALLS = 500
OWNERS = ("Zorin", "Tavoli", "Kelmar", "Bosan", "Ferdo")


def burn(until: float) -> None:
    """Keeps one core busy."""
    while time.time() < until:
        sum(i * i for i in range(10_000))


@pytest.fixture
def busy() -> Any:
    """Two processes that take all they get of both cores."""
    context = multiprocessing.get_context("spawn")
    until = time.time() + 1800
    others = [context.Process(target=burn, args=(until,), daemon=True) for _ in range(2)]
    for other in others:
        other.start()
    yield
    for other in others:
        other.terminate()
        other.join()


@pytest.mark.slow
def test_500_streamed_tool_calls_beside_two_busy_processes(busy: Any) -> None:
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
                    for piece in choice.delta.tool_calls or []:
                        name += piece.function.name or ""
                        arguments += piece.function.arguments or ""
            assert (name, ends) == ("find_record", ["tool_calls"])
            assert json.loads(arguments) == {"owner": owner, "limit": limit}
            assert usage is not None and usage.completion_tokens > 10

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(call, range(CALLS)))
