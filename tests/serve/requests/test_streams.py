"""A stream is independent of how late it is read, and a burst loses nothing."""

import asyncio
import json
from collections.abc import Awaitable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.engine.token_update import TokenUpdate
from lockstep.serve.http.event_stream import EventStream
from lockstep.serve.openai.chat import ChatWriter
from lockstep.serve.openai.completions import ID_PREFIX, CompletionWriter
from lockstep.serve.openai.protocol import ChatRequest, CompletionRequest
from lockstep.serve.requests.response_writer import ResponseWriter
from lockstep.serve.requests.service import Service
from tests.serve.api_calls import CALL, TOOLS, USER
from tests.serve.fake_client import FakeClient

TEXTS = ["hello fox", CALL, "Look:\n\n" + CALL + "\n" + CALL, "naïve 日本語 🦊 done", "a <tool_ca"]


def service_of(processor: Any, text: str, step: int) -> Service:
    eos = processor.tokenizer.fast.token_to_id("<|im_end|>")
    client = FakeClient(lambda request: [*processor.tokenizer.encode(text), eos])
    client.step = step
    return Service(client, processor, "tiny", "ls-test")


async def events(started: Awaitable[ResponseWriter], delays: list[int]) -> list[Any]:
    """Return the chunks of a response. Other tasks get delays[i] turns before the next read."""
    writer = await started
    result: list[Any] = []
    stream = writer.stream()
    while True:
        has_others = len(asyncio.all_tasks()) > 1
        for _ in range(delays[len(result) % len(delays)] if has_others else 0):
            await asyncio.sleep(0)
        try:
            chunks = await anext(stream)
        except StopAsyncIteration:
            break
        result += [{**chunk, "id": "", "created": 0} for chunk in chunks]
    writer.close()
    return json.loads(json.dumps(result), object_hook=_without_ids)


def _without_ids(value: dict[str, Any]) -> dict[str, Any]:
    return {k: "" if k == "id" else v for k, v in value.items()}


@pytest.mark.default_cases("True")
@settings(max_examples=30, deadline=None)
@given(
    text=st.sampled_from(TEXTS),
    step=st.integers(1, 40),
    n=st.sampled_from([1, 1, 2, 5]),
    stop=st.sampled_from([None, ["lo f"], ["zzz", "日"]]),
    logprobs=st.booleans(),
    delays=st.lists(st.sampled_from([0, 0, 1, 3, 400]), min_size=1, max_size=12),
)
@pytest.mark.parametrize("chat", [True, False])
def test_events_are_independent_of_read_delays(
    processor, chat, text, step, n, stop, logprobs, delays
):
    options: dict[str, Any] = {
        "stream": True,
        "n": n,
        "stop": stop,
        "seed": 1,
        "max_tokens": 200,
        "stream_options": {"include_usage": True, "continuous_usage_stats": n == 1},
    }

    def start() -> Awaitable[ResponseWriter]:
        service = service_of(processor, text, step)
        if chat:
            body = ChatRequest(messages=USER, tools=TOOLS, logprobs=logprobs, **options)
            return ChatWriter.start(service, body)
        scores = 1 if logprobs else None
        return CompletionWriter.start(
            service, CompletionRequest(prompt="the", logprobs=scores, echo=True, **options)
        )

    prompt_reader = asyncio.run(events(start(), [0]))
    slow_reader = asyncio.run(events(start(), delays))
    for index in range(n):
        assert choices_of(slow_reader, index) == choices_of(prompt_reader, index)
        assert len([c for c in choices_of(slow_reader, index) if c["finish_reason"]]) == 1
        assert choices_of(slow_reader, index)[-1]["finish_reason"]
    assert slow_reader[-1] == prompt_reader[-1] and slow_reader[-1]["choices"] == []
    if n == 1:
        assert slow_reader == prompt_reader
    for chunk in slow_reader[:-1]:
        (choice,) = chunk["choices"]
        if chat and not choice["finish_reason"]:
            assert choice["delta"], "held-back text is no empty delta"


def choices_of(chunks: list[Any], index: int) -> list[Any]:
    """Return the choices of one completion."""
    return [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]


@pytest.mark.parametrize("n", [1, 16])
def test_late_read_burst_keeps_tool_calls(processor, n):
    """The engine sends all updates before the first chunk is read."""
    body = ChatRequest(messages=USER, tools=TOOLS, stream=True, n=n, max_tokens=200)
    chunks = asyncio.run(events(ChatWriter.start(service_of(processor, CALL, 1), body), [5000]))
    ends = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert ends == ["tool_calls"] * n
    for index in range(n):
        deltas = [c["delta"] for c in choices_of(chunks, index)]
        arguments = "".join(
            call["function"]["arguments"] for d in deltas for call in d.get("tool_calls", ())
        )
        assert json.loads(arguments) == {"city": 'Rio "x"', "n": 3}


def test_tool_call_id_is_stable(processor):
    """A call keeps the id of its first delta."""
    body = ChatRequest(messages=USER, tools=TOOLS, stream=True, max_tokens=200)

    async def run() -> list[str]:
        writer = await ChatWriter.start(service_of(processor, CALL + CALL, 3), body)
        result = [
            call["id"]
            async for chunks in writer.stream()
            for chunk in chunks
            for call in chunk["choices"][0]["delta"].get("tool_calls", ())
            if "id" in call
        ]
        writer.close()
        return result

    first, second = asyncio.run(run())
    assert first != second


def test_unread_stream_aborts_the_request(processor):
    """The client disconnects before the first byte, and the request still ends in the engine."""
    service = service_of(processor, "hello fox", 1)
    service.client.hang = True
    service.client.answer = lambda request: [5]

    async def run() -> None:
        body = ChatRequest(messages=USER, stream=True, max_tokens=200)
        writer = await ChatWriter.start(service, body)

        async def send(message: Any) -> None:
            raise OSError("gone")

        async def receive() -> Any:
            return {"type": "http.disconnect"}

        scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
        with pytest.raises((OSError, ExceptionGroup)):
            await EventStream.from_source(writer)(scope, receive, send)

    asyncio.run(run())
    assert service.client.aborted == [r.id for r in service.client.requests]
    assert not service._active


def test_deltas_are_immutable(processor):
    """A delta that was read stays the same while more arrive."""
    service = service_of(processor, "hello lazy fox", 1)

    async def run() -> None:
        body = CompletionRequest(prompt="the", max_tokens=50)
        active = await service.submit(body, ID_PREFIX, is_small=True)
        seen = []
        async for deltas in active:
            seen += [(delta, repr(delta)) for delta in deltas]
        active.close()
        assert len(seen) > 3
        assert all(repr(delta) == text for delta, text in seen)
        assert [delta.update.num_tokens for delta, _ in seen] == list(range(1, len(seen) + 1))

    asyncio.run(run())


def test_updates_after_the_end_are_dropped(processor):
    """A faulty engine cannot repeat a finish reason."""
    service = service_of(processor, "hello fox", 3)

    async def twice(request: Any) -> Any:
        for _ in range(3):
            yield TokenUpdate([5], None, "length", None, request.metrics)

    service.client.updates = twice
    body = ChatRequest(messages=USER, stream=True)
    chunks = asyncio.run(events(ChatWriter.start(service, body), [0]))
    assert [c["choices"][0]["finish_reason"] for c in chunks].count("length") == 1
