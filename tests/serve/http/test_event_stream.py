"""Comments in pauses of a stream: proxies see that it is alive, and clients ignore them."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lockstep.serve.http import event_stream
from lockstep.serve.requests.service import Limits, Service
from tests.serve.anthropic.test_messages import create
from tests.serve.api_calls import USER, fetch
from tests.serve.conftest import CURRENT_SERVICE

TEXT = "hello fox"


@pytest.fixture(params=[0.0, 60.0], ids=["plain", "resumable"])
def slow(server: Any, processor: Any, monkeypatch: pytest.MonkeyPatch, request: Any) -> Any:
    """Return a server that pauses before each token. Events of a resumable stream have ids."""
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_SECONDS", 0.01)
    server.client.step = 1
    updates = server.client.updates

    async def slow_updates(engine_request: Any) -> AsyncIterator[Any]:
        async for update in updates(engine_request):
            await asyncio.sleep(0.05)
            yield update

    server.client.updates = slow_updates
    limits = Limits(resume_seconds=request.param)
    CURRENT_SERVICE.replace(Service(server.client, processor, "tiny", "ls-test", limits))
    server.has_ids = request.param > 0
    return server


def test_pauses_have_comments(slow: Any) -> None:
    body = {"messages": USER, "stream": True}
    text = fetch(slow, "POST", "/v1/chat/completions", json=body).text
    before_first, rest = text.split("\n\n", 1)
    assert before_first.startswith("id: " if slow.has_ids else "data: ")
    lines = rest.split("\n")
    comments = [i for i, line in enumerate(lines) if line == ":"]
    assert len(comments) > 2
    # A blank line ends the comment only where no id is before it.
    assert all((lines[i + 1] == "") != slow.has_ids for i in comments)
    assert text.endswith("data: [DONE]\n\n")


def test_openai_library_ignores_comments(slow: Any) -> None:
    async def work() -> None:
        async with slow.openai() as client:
            chunks = await client.chat.completions.create(model="tiny", messages=USER, stream=True)
            texts = [c.choices[0].delta.content or "" async for c in chunks]
            assert "".join(texts) == TEXT
            events = await client.responses.create(model="tiny", input="the", stream=True)
            types = [event.type async for event in events]
            assert types[-1] == "response.completed"

    asyncio.run(work())


def test_anthropic_library_ignores_comments(slow: Any) -> None:
    *deltas, _, _, last = create(slow, stream=True)[2:]
    assert "".join(event.delta.text for event in deltas) == TEXT and last.type == "message_stop"
