"""Responses that are made in the background, through the official client."""

import asyncio
from typing import Any

import openai
import pytest

from lockstep.serve.app import create_app
from lockstep.serve.requests.service import Limits, Service
from tests.serve.api_calls import fetch, post

PATH = "/v1/responses"


async def ended(client: Any, response_id: str) -> Any:
    """Return a response once it has ended."""
    for _ in range(2000):
        result = await client.responses.retrieve(response_id)
        if result.status not in ("queued", "in_progress"):
            return result
        await asyncio.sleep(0.001)
    raise AssertionError(result)


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 20))


def test_a_response_is_made_while_nobody_waits(server: Any) -> None:
    async def work() -> None:
        async with server.openai() as client:
            begun = await client.responses.create(model="tiny", input="the", background=True)
            assert (begun.status, begun.background, begun.output) == ("queued", True, [])
            whole = await ended(client, begun.id)
            assert (whole.status, whole.output_text) == ("completed", "hello fox")
            again = await client.responses.create(
                model="tiny", input="go on", previous_response_id=begun.id
            )
            assert again.background is False
            assert (await client.responses.cancel(begun.id)).status == "completed"
            await client.responses.delete(begun.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(begun.id)

    run(work())
    assert server.client.aborted == []


def test_a_stream_is_taken_up_again(server: Any) -> None:
    """The reader leaves in the middle, and gets the rest, and all of it, later."""
    server.client.step = 1

    async def work() -> None:
        async with server.openai() as client:
            stream = await client.responses.create(
                model="tiny", input="the", background=True, stream=True
            )
            first = []
            async for event in stream:
                first.append(event)
                if event.type == "response.output_text.delta":
                    break
            await stream.close()
            response_id = first[0].response.id
            assert [event.type for event in first[:3]] == [
                "response.created",
                "response.queued",
                "response.in_progress",
            ]
            rest = await client.responses.retrieve(
                response_id, stream=True, starting_after=first[-1].sequence_number
            )
            later = [event async for event in rest]
            events = first + later
            assert [event.sequence_number for event in events] == list(range(len(events)))
            assert events[-1].type == "response.completed"
            deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
            assert "".join(deltas) == events[-1].response.output_text == "hello fox"
            assert (await ended(client, response_id)).status == "completed"
            replay = await client.responses.retrieve(response_id, stream=True)
            assert [event async for event in replay] == events
            none = await client.responses.retrieve(
                response_id, stream=True, starting_after=len(events)
            )
            assert [event async for event in none] == []

    run(work())
    assert server.client.aborted == []


def test_cancelling_ends_the_request(server: Any, processor: Any) -> None:
    server.client.hang = True
    server.client.answer = lambda request: processor.tokenizer.encode("hello")

    async def work() -> None:
        async with server.openai() as client:
            begun = await client.responses.create(model="tiny", input="the", background=True)
            while (await client.responses.retrieve(begun.id)).status == "queued":
                await asyncio.sleep(0.001)
            assert (await client.responses.cancel(begun.id)).status == "cancelled"
            assert (await ended(client, begun.id)).status == "cancelled"
            assert (await client.responses.cancel(begun.id)).status == "cancelled"
            events = await client.responses.retrieve(begun.id, stream=True)
            assert [event async for event in events][-1].type == "response.incomplete"

    run(work())
    assert server.client.aborted == [request.id for request in server.client.requests]


def test_a_failure_is_kept(server: Any) -> None:
    server.client.error = KeyError(1)

    async def work() -> None:
        async with server.openai() as client:
            begun = await client.responses.create(model="tiny", input="the", background=True)
            whole = await ended(client, begun.id)
            assert whole.status == "failed" and "internal error" in whole.error.message
            events = await client.responses.retrieve(begun.id, stream=True)
            assert [event async for event in events][-1].type == "response.failed"

    run(work())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"store": False}, "background"),
        ({"input": "the fox " * 600}, "input"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_what_is_refused(server: Any, body: dict[str, Any], param: str) -> None:
    response = post(server, PATH, **{"input": "x", "background": True, **body})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert not server.client.requests


def test_events_are_kept_of_the_background_alone(server: Any) -> None:
    place = f"{PATH}/{post(server, PATH, input='x').json()['id']}"
    for query, param in (("stream=true", "stream"), ("starting_after=3", "starting_after")):
        response = fetch(server, "GET", f"{place}?{query}")
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_what_is_kept_is_bounded(server: Any, processor: Any) -> None:
    """In number, in bytes, events among them, and in age."""

    async def work(limits: Limits) -> list[int]:
        service = Service(server.client, processor, "tiny", "ls-test", limits)
        server.app = create_app(service)
        async with server.openai() as client, server.http() as http:
            ids = []
            for _ in range(4):
                begun = await client.responses.create(model="tiny", input="the", background=True)
                ids.append(begun.id)
                while service.num_active:
                    await asyncio.sleep(0.001)
            return [(await http.get(f"{PATH}/{one}")).status_code for one in ids]

    assert run(work(Limits())) == [200] * 4
    assert run(work(Limits(max_stored_responses=2))) == [404, 404, 200, 200]
    few = run(work(Limits(max_stored_bytes=12_000)))
    assert (few[0], few[-1]) == (404, 200)
    assert run(work(Limits(stored_seconds=-1))) == [404] * 4
