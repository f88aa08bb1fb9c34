"""A stream says the same however late it is read, and a burst loses nothing."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.engine.token_update import TokenUpdate
from lockstep.serve.app import EventStream
from lockstep.serve.openai.chat import ChatAnswer
from lockstep.serve.openai.completions import CompletionAnswer
from lockstep.serve.openai.protocol import ChatRequest, CompletionRequest
from lockstep.serve.requests.service import Asked, Service
from tests.serve.api_calls import CALL, TOOLS, USER
from tests.serve.fake_client import FakeClient

TEXTS = ["hello fox", CALL, "Look:\n\n" + CALL + "\n" + CALL, "naïve 日本語 🦊 done", "a <tool_ca"]


def service_of(processor: Any, text: str, step: int) -> Service:
    eos = processor.tokenizer.fast.token_to_id("<|im_end|>")
    client = FakeClient(lambda request: [*processor.tokenizer.encode(text), eos])
    client.step = step
    return Service(client, processor, "tiny", "ls-test")


async def events(answer: Any, delays: list[int]) -> list[Any]:
    """The answer's chunks; before those behind the i-th are read, everybody else has delays[i]
    turns."""
    await answer.start()
    found = []
    stream = answer.stream()
    while True:
        anybody = len(asyncio.all_tasks()) > 1
        for _ in range(delays[len(found) % len(delays)] if anybody else 0):
            await asyncio.sleep(0)
        try:
            chunks = await anext(stream)
        except StopAsyncIteration:
            break
        found += [{**chunk, "id": "", "created": 0} for chunk in chunks]
    answer.close()
    return json.loads(json.dumps(found), object_hook=_without_ids)


def _without_ids(value: dict[str, Any]) -> dict[str, Any]:
    return {k: "" if k == "id" else v for k, v in value.items()}


@settings(max_examples=60, deadline=None)
@given(
    text=st.sampled_from(TEXTS),
    step=st.integers(1, 40),
    n=st.sampled_from([1, 1, 2, 5]),
    stop=st.sampled_from([None, ["lo f"], ["zzz", "日"]]),
    logprobs=st.booleans(),
    delays=st.lists(st.sampled_from([0, 0, 1, 3, 400]), min_size=1, max_size=12),
)
@pytest.mark.parametrize("chat", [True, False])
def test_every_delay_gives_the_same_events(processor, chat, text, step, n, stop, logprobs, delays):
    options: dict[str, Any] = {
        "stream": True,
        "n": n,
        "stop": stop,
        "seed": 1,
        "max_tokens": 200,
        "stream_options": {"include_usage": True, "continuous_usage_stats": n == 1},
    }

    def make() -> Any:
        service = service_of(processor, text, step)
        if chat:
            body = ChatRequest(messages=USER, tools=TOOLS, logprobs=logprobs, **options)
            return ChatAnswer(service, body)
        scores = 1 if logprobs else None
        return CompletionAnswer(
            service, CompletionRequest(prompt="the", logprobs=scores, echo=True, **options)
        )

    prompt_reader = asyncio.run(events(make(), [0]))
    slow_reader = asyncio.run(events(make(), delays))
    for index in range(n):
        assert own(slow_reader, index) == own(prompt_reader, index)
        assert len([c for c in own(slow_reader, index) if c["finish_reason"]]) == 1
        assert own(slow_reader, index)[-1]["finish_reason"]
    assert slow_reader[-1] == prompt_reader[-1] and slow_reader[-1]["choices"] == []
    if n == 1:
        assert slow_reader == prompt_reader
    for chunk in slow_reader[:-1]:
        (choice,) = chunk["choices"]
        if chat and not choice["finish_reason"]:
            assert choice["delta"], "held-back text is no empty delta"


def own(chunks: list[Any], index: int) -> list[Any]:
    """The choices of one completion."""
    return [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]


@pytest.mark.parametrize("n", [1, 16])
def test_a_burst_read_late_loses_no_call(processor, n):
    """All updates have come before the first chunk is read."""
    body = ChatRequest(messages=USER, tools=TOOLS, stream=True, n=n, max_tokens=200)
    chunks = asyncio.run(events(ChatAnswer(service_of(processor, CALL, 1), body), [5000]))
    ends = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert ends == ["tool_calls"] * n
    for index in range(n):
        deltas = [c["delta"] for c in own(chunks, index)]
        arguments = "".join(
            call["function"]["arguments"] for d in deltas for call in d.get("tool_calls", ())
        )
        assert json.loads(arguments) == {"city": 'Rio "x"', "n": 3}


def test_streamed_and_whole_ids_do_not_change_while_read(processor):
    """A call has the id under which it began, in every piece."""
    body = ChatRequest(messages=USER, tools=TOOLS, stream=True, max_tokens=200)

    async def run() -> list[str]:
        answer = ChatAnswer(service_of(processor, CALL + CALL, 3), body)
        await answer.start()
        found = [
            call["id"]
            async for chunks in answer.stream()
            for chunk in chunks
            for call in chunk["choices"][0]["delta"].get("tool_calls", ())
            if "id" in call
        ]
        answer.close()
        return found

    first, second = asyncio.run(run())
    assert first != second


def test_a_stream_nobody_reads_is_closed(processor):
    """The client is gone before the first byte: the request ends in the engine all the same."""
    service = service_of(processor, "hello fox", 1)
    service.client.hang = True
    service.client.answer = lambda request: [5]

    async def run() -> None:
        answer = ChatAnswer(service, ChatRequest(messages=USER, stream=True, max_tokens=200))
        await answer.start()

        async def send(message: Any) -> None:
            raise OSError("gone")

        async def receive() -> Any:
            return {"type": "http.disconnect"}

        scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
        with pytest.raises((OSError, ExceptionGroup)):
            await EventStream.of(answer)(scope, receive, send)

    asyncio.run(run())
    assert service.client.aborted == [r.id for r in service.client.requests]
    assert not service._runs


def test_pieces_do_not_change(processor):
    """What was handed out stays as it was while more comes."""
    service = service_of(processor, "hello lazy fox", 1)

    async def run() -> None:
        body = CompletionRequest(prompt="the", max_tokens=50)
        asked = Asked(["the"], body.params(processor))
        run = await service.start("cmpl", body, 1, lambda: asked, True)
        seen = []
        async for pieces in run:
            seen += [(piece, repr(piece)) for piece in pieces]
        run.close()
        assert len(seen) > 3
        assert all(repr(piece) == before for piece, before in seen)
        assert [piece.text.num_tokens for piece, _ in seen] == list(range(1, len(seen) + 1))

    asyncio.run(run())


def test_an_update_after_the_end_is_not_sent(processor):
    """An engine that says more than it should cannot repeat a finish reason."""
    service = service_of(processor, "hello fox", 3)

    async def twice(request: Any) -> Any:
        for _ in range(3):
            yield TokenUpdate([5], None, "length", None, request.metrics)

    service.client.updates = twice
    body = ChatRequest(messages=USER, stream=True)
    chunks = asyncio.run(events(ChatAnswer(service, body), [0]))
    assert [c["choices"][0]["finish_reason"] for c in chunks].count("length") == 1
