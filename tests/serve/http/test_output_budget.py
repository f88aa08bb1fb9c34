"""Unread output is limited and dropped with a reason, and never delays other streams."""

import asyncio
from typing import Any

import pytest

from lockstep.serve.app import create_app
from lockstep.serve.http.errors import UnreadError
from lockstep.serve.http.output_budget import OutputBudget, delta_bytes
from lockstep.serve.openai.completions import ID_PREFIX
from lockstep.serve.openai.protocol import CompletionRequest
from lockstep.serve.requests.active_request import MAX_BATCH_DELTAS, ActiveRequest
from lockstep.serve.requests.service import Limits, Service
from tests.serve.api_calls import TEXT_PATH, fetch

NUM_TOKENS = 200


def test_owner_above_its_limit_is_dropped() -> None:
    budget: OutputBudget[str] = OutputBudget(max_bytes=10, max_total_bytes=25)
    assert budget.add("a", 10) is None
    assert budget.add("a", 1) == "a"
    budget.release("a", 5)
    assert budget.total_bytes == 6


def test_largest_owner_is_dropped_above_total_limit() -> None:
    budget: OutputBudget[str] = OutputBudget(max_bytes=10, max_total_bytes=25)
    for name, size in (("a", 9), ("b", 10), ("c", 6)):
        assert budget.add(name, size) is None
    assert budget.add("c", 1) == "b"
    budget.forget("b")
    budget.release("b", 10)
    budget.forget("b")
    assert budget.total_bytes == 16
    assert budget.add("c", 1) is None


def service_of(server: Any, processor: Any, **limits: int) -> Service:
    server.client.answer = lambda request: [5] * NUM_TOKENS
    service = Service(server.client, processor, "tiny", "ls-test", Limits(**limits))
    server.app = create_app(service)
    return service


async def submit(service: Service, **fields: Any) -> ActiveRequest:
    body = CompletionRequest(prompt=[5], max_tokens=NUM_TOKENS, **fields)
    return await service.submit(body, ID_PREFIX, is_small=True)


async def run_engine() -> None:
    """Yield to the event loop until the engine has sent all updates."""
    for _ in range(10 * NUM_TOKENS):
        await asyncio.sleep(0)


def test_unread_stream_is_ended(server: Any, processor: Any) -> None:
    service = service_of(server, processor, max_output_bytes=20_000)

    async def run() -> None:
        unread = await submit(service, stream=True)
        await run_engine()
        assert server.client.aborted == [unread.requests[0].id], "its pages are free"
        assert service.output_budget.total_bytes == 0
        with pytest.raises(Exception, match="wait to be read. Stream it and read it as it comes"):
            async for _ in unread:
                raise AssertionError("unread output was dropped")
        unread.close()

    asyncio.run(run())
    assert service.output_budget.total_bytes == 0


def test_dropped_last_delta_is_an_error(server: Any, processor: Any) -> None:
    """The last delta exceeds the limit after generation has ended: an error, no empty response."""

    async def generate(**limits: int) -> tuple[ActiveRequest, int]:
        service = service_of(server, processor, **limits)
        unread = await submit(service, stream=True)
        await run_engine()
        return unread, service.output_budget.total_bytes

    async def run() -> None:
        complete, size = await generate()
        assert sum([len(deltas) async for deltas in complete]) > 1
        dropped, rest = await generate(max_output_bytes=size - 1)
        assert rest == 0
        with pytest.raises(UnreadError):
            await anext(aiter(dropped))

    asyncio.run(run())


def test_complete_response_is_not_ended_again(server: Any, processor: Any) -> None:
    """A shutdown does not change a response that is complete but not read."""
    service = service_of(server, processor)

    async def run() -> None:
        complete = await submit(service, stream=True)
        await run_engine()
        service.end_all()
        tokens = [
            token
            async for deltas in complete
            for delta in deltas
            for token in delta.update.token_ids
        ]
        assert len(tokens) == NUM_TOKENS
        complete.close()

    asyncio.run(run())


def test_read_stream_releases_memory(server: Any, processor: Any) -> None:
    service = service_of(server, processor, max_output_bytes=20_000)
    body = {"prompt": "x", "max_tokens": NUM_TOKENS, "stream": True}
    response = fetch(server, "POST", TEXT_PATH, json=body)
    assert response.text.endswith("data: [DONE]\n\n")
    assert "wait to be read" not in response.text
    assert service.output_budget.total_bytes == 0


@pytest.mark.parametrize("logprobs", [None, 5])
def test_response_without_stream_is_limited(
    server: Any, processor: Any, logprobs: int | None
) -> None:
    service = service_of(server, processor, max_output_bytes=80_000)
    body = {"prompt": "x", "max_tokens": NUM_TOKENS, "logprobs": logprobs}
    response = fetch(server, "POST", TEXT_PATH, json=body)
    assert response.status_code == (200 if logprobs is None else 400)
    if logprobs is not None:
        assert response.json()["error"]["code"] == "answer_not_read"
        assert server.client.aborted
    assert service.output_budget.total_bytes == 0


def test_unread_streams_are_ended_before_read_ones(server: Any, processor: Any) -> None:
    service = service_of(server, processor, max_total_output_bytes=100_000)

    async def run() -> None:
        unread = [await submit(service, stream=True) for _ in range(4)]
        await run_engine()
        assert service.output_budget.total_bytes <= 100_000
        active = await submit(service, stream=True)
        num_tokens = 0
        async for deltas in active:
            num_tokens += sum(len(delta.update.token_ids) for delta in deltas)
        assert num_tokens == NUM_TOKENS
        for request in (*unread, active):
            request.close()

    asyncio.run(run())
    assert service.output_budget.total_bytes == 0


def test_long_queue_is_read_in_batches(server: Any, processor: Any) -> None:
    """Other tasks run between the batches of a slow reader."""
    service = service_of(server, processor)

    async def run() -> None:
        late = await submit(service, stream=True)
        await run_engine()
        num_turns = 0

        async def other_task() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other_task())
        deltas = [delta async for batch in late for delta in batch]
        assert len(deltas) > NUM_TOKENS // 4
        assert num_turns >= len(deltas) // MAX_BATCH_DELTAS
        task.cancel()
        late.close()

    asyncio.run(run())


def test_delta_bytes_grow_with_tokens_and_logprobs() -> None:
    assert delta_bytes(1, 0) < delta_bytes(2, 0) < delta_bytes(2, 1)
    assert delta_bytes(4, 4 * 20) > 10 * delta_bytes(4, 0)
