"""Background responses through the official client."""

import asyncio
from typing import Any

import openai
import pytest

from lockstep.serve.app import create_app
from lockstep.serve.requests.service import Limits, Service
from tests.serve.api_calls import fetch, post

PATH = "/v1/responses"


async def wait_until_ended(client: Any, response_id: str) -> Any:
    """Return a response once it has ended."""
    for _ in range(2000):
        result = await client.responses.retrieve(response_id)
        if result.status not in ("queued", "in_progress"):
            return result
        await asyncio.sleep(0.001)
    raise AssertionError(result)


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 20))


def test_background_response_completes(server: Any) -> None:
    async def work() -> None:
        async with server.openai() as client:
            begun = await client.responses.create(model="tiny", input="the", background=True)
            assert (begun.status, begun.background, begun.output) == ("queued", True, [])
            full = await wait_until_ended(client, begun.id)
            assert (full.status, full.output_text) == ("completed", "hello fox")
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


def test_background_stream_resumes(server: Any) -> None:
    """The reader leaves in the middle, and later gets the rest, and all events."""
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
            assert (await wait_until_ended(client, response_id)).status == "completed"
            replay = await client.responses.retrieve(response_id, stream=True)
            assert [event async for event in replay] == events
            none = await client.responses.retrieve(
                response_id, stream=True, starting_after=len(events) - 1
            )
            assert [event async for event in none] == []

    run(work())
    assert server.client.aborted == []


def test_cancel_ends_background_request(server: Any, processor: Any) -> None:
    server.client.hang = True
    server.client.answer = lambda request: processor.tokenizer.encode("hello")

    async def work() -> None:
        async with server.openai() as client:
            begun = await client.responses.create(model="tiny", input="the", background=True)
            while (await client.responses.retrieve(begun.id)).status == "queued":
                await asyncio.sleep(0.001)
            assert (await client.responses.cancel(begun.id)).status == "cancelled"
            assert (await wait_until_ended(client, begun.id)).status == "cancelled"
            assert (await client.responses.cancel(begun.id)).status == "cancelled"
            events = await client.responses.retrieve(begun.id, stream=True)
            assert [event async for event in events][-1].type == "response.incomplete"

    run(work())
    assert server.client.aborted == [request.id for request in server.client.requests]


def test_failure_of_background_response_is_stored(server: Any) -> None:
    server.client.error = KeyError(1)

    async def work() -> None:
        async with server.openai() as client:
            begun = await client.responses.create(model="tiny", input="the", background=True)
            full = await wait_until_ended(client, begun.id)
            assert full.status == "failed" and "internal error" in full.error.message
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
def test_invalid_fields_are_refused(server: Any, body: dict[str, Any], param: str) -> None:
    response = post(server, PATH, **{"input": "x", "background": True, **body})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert not server.client.requests


def test_only_background_responses_store_events(server: Any) -> None:
    index = f"{PATH}/{post(server, PATH, input='x').json()['id']}"
    for query, param in (("stream=true", "stream"), ("starting_after=3", "starting_after")):
        response = fetch(server, "GET", f"{index}?{query}")
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_stored_background_responses_are_bounded(server: Any, processor: Any) -> None:
    """In number, in bytes (events included), and in age."""

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
