"""An engine process of two ranks, one of which ends, stops or runs out of memory under load."""

import asyncio
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import LLM, SamplingParams
from lockstep.engine.async_engine import AsyncEngine, Stream
from lockstep.engine.process_transport import ProcessTransport
from lockstep.engine.token_update import TokenUpdate
from lockstep.scheduling.grammar import FillMasks
from lockstep.scheduling.request import Request
from lockstep.scheduling.schedule import Schedule
from lockstep.worker.executor import executor_of
from lockstep.worker.worker import LaunchedStep, Worker
from tests import engine_factories
from tests.engine_factories import EngineAndGrammars, Progress, run, wait_until_empty
from tests.forked_processes import second_rank
from tests.tiny_model import TWO_LAYERS, make_model

ROWS = 2
REQUESTS = 6
STEP_SECONDS = 60.0
SHORT = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
LONG = replace(SHORT, max_tokens=100)
SETTINGS: dict[str, Any] = {
    "max_model_len": 2048,
    "max_num_seqs": ROWS,
    "num_gpu_blocks": ROWS * 33,
}
STEPS_BEFORE = 10
"""Decode steps before a rank runs out of memory."""

pytestmark = pytest.mark.slow


def exhaust_memory(worker: Worker) -> None:
    """Let a later step of the second rank raise what a full GPU raises."""
    if not worker.group.index:
        return
    execute = worker.launch
    steps = 0

    def launch(schedule: Schedule, fill_masks: FillMasks) -> list[LaunchedStep]:
        nonlocal steps
        steps += bool(schedule.decode)
        if steps > STEPS_BEFORE:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return execute(schedule, fill_masks)

    worker.launch = launch  # type: ignore[method-assign]


def short_of_memory(settings: dict[str, Any], path: Path, progress: Progress) -> EngineAndGrammars:
    """Return an engine whose second rank runs out of memory, and a sound one after it.

    path: exists once an engine was made.
    """
    engine_and_grammars = engine_factories.plain(settings, progress)
    if not path.exists():
        path.touch()
        executor_of(engine_and_grammars[0]).collective_rpc(exhaust_memory)
    return engine_and_grammars


def make_request(number: int) -> Request:
    """Return a request; the first ROWS are long and occupy all rows when the rank ends."""
    params = LONG if number < ROWS else SHORT
    prompt = [5 + (number * 31 + i * i) % 300 for i in range(40)]
    return Request(f"request {number}", prompt, replace(params, seed=number), seed=number)


async def answer(stream: Stream) -> tuple[list[int], TokenUpdate]:
    """Return (a stream's tokens, its last update)."""
    tokens: list[int] = []
    async for update in stream:
        tokens += update.token_ids
    return tokens, update


async def answers_while(client: AsyncEngine, end: Callable[[], None]) -> list[Any]:
    """Send the requests, end a rank while the first ones run, and return all answers."""
    streams = [client.stream(make_request(number)) for number in range(REQUESTS)]
    begun = [(await anext(aiter(stream))).token_ids for stream in streams[:ROWS]]
    end()
    rest = await asyncio.gather(*map(answer, streams))
    begun += [[]] * (REQUESTS - ROWS)
    return [(first + tokens, last) for first, (tokens, last) in zip(begun, rest, strict=True)]


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("memory", "rank 1 of 2 .*CUDA out of memory"),
        (signal.SIGKILL, "rank 1 of 2 .*ended by SIGKILL"),
        (signal.SIGSTOP, "rank 1 of 2 .*has not answered for"),
    ],
    ids=["memory", "kill", "stop"],
)
def test_all_requests_are_answered_after_a_rank_has_ended(
    fault: Any, cause: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = []
    model = make_model(tmp_path / "model", **TWO_LAYERS)  # few exchanges, for busy machines
    settings = {**SETTINGS, "model": str(model), "load_format": "dummy"}
    llm = LLM(**settings)
    for number in range(REQUESTS):
        request = make_request(number)
        params = replace(request.params, detokenize=False)
        (output,) = llm.generate({"prompt_token_ids": request.prompt_token_ids}, params)
        expected.append(output.outputs[0].token_ids)
    settings |= {"tensor_parallel_size": 2}
    make = partial(engine_factories.plain, settings)
    if fault == "memory":
        make = partial(short_of_memory, settings, tmp_path / "made")
    transport = ProcessTransport(make, STEP_SECONDS)
    client = AsyncEngine(transport)
    client.start()

    def end() -> None:
        if fault != "memory":
            assert transport.pid is not None
            os.kill(second_rank(transport.pid), fault)

    try:
        actual = run(answers_while(client, end))
        assert {last.finish_reason for _, last in actual} == {"length"}
        assert [tokens for tokens, _ in actual] == expected
        assert wait_until_empty(client).restarts_total == 1
    finally:
        client.shutdown()
    (line,) = (text for text in caplog.messages if "restarting it" in text)
    assert re.search(cause, line)
