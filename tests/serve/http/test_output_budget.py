"""What waits for its readers: bounded, given up with a reason, and never in others' way."""

import asyncio
from typing import Any

import pytest

from lockstep.serve.app import create_app
from lockstep.serve.http.errors import UnreadError
from lockstep.serve.http.output_budget import Held, weight
from lockstep.serve.openai.protocol import CompletionRequest
from lockstep.serve.requests.service import PIECES_OF_A_TURN, Asked, Limits, Run, Service
from tests.serve.api_calls import TEXT_PATH, fetch

TOKENS = 200


def test_the_one_that_holds_too_much_gives_up() -> None:
    held: Held[str] = Held(most=10, most_of_all=25)
    assert held.add("a", 10) is None
    assert held.add("a", 1) == "a"
    held.take("a", 5)
    assert held.total == 6


def test_the_one_that_holds_most_gives_up_where_all_hold_too_much() -> None:
    held: Held[str] = Held(most=10, most_of_all=25)
    for name, size in (("a", 9), ("b", 10), ("c", 6)):
        assert held.add(name, size) is None
    assert held.add("c", 1) == "b"
    held.forget("b")
    held.take("b", 10)
    held.forget("b")
    assert held.total == 16
    assert held.add("c", 1) is None


def service_of(server: Any, processor: Any, **limits: int) -> Service:
    server.client.answer = lambda request: [5] * TOKENS
    service = Service(server.client, processor, "tiny", "ls-test", Limits(**limits))
    server.app = create_app(service)
    return service


async def started(service: Service, **fields: Any) -> Run:
    body = CompletionRequest(prompt="x", max_tokens=TOKENS, **fields)
    asked = Asked([[5]], body.params(service.processor))
    return await service.start("cmpl-", body, 1, lambda: asked, True)


async def until_told(service: Service) -> None:
    """Waits for all that the engine tells."""
    for _ in range(10 * TOKENS):
        await asyncio.sleep(0)


def test_a_stream_that_nobody_reads_is_given_up(server: Any, processor: Any) -> None:
    service = service_of(server, processor, held_bytes=20_000)

    async def run() -> None:
        unread = await started(service, stream=True)
        await until_told(service)
        assert server.client.aborted == [unread.job.requests[0].id], "its pages are free"
        assert service.held.total == 0
        with pytest.raises(Exception, match="wait to be read. Stream it and read it as it comes"):
            async for _ in unread:
                raise AssertionError("what nobody has read was dropped")
        unread.close()

    asyncio.run(run())
    assert service.held.total == 0


def test_an_answer_that_is_dropped_at_its_end_says_so(server: Any, processor: Any) -> None:
    """All of it has come, but its last piece was one too many: nobody takes it for an empty one."""

    async def held(**limits: int) -> tuple[Run, int]:
        service = service_of(server, processor, **limits)
        unread = await started(service, stream=True)
        await until_told(service)
        return unread, service.held.total

    async def run() -> None:
        whole, size = await held()
        assert sum([len(pieces) async for pieces in whole]) > 1
        dropped, rest = await held(held_bytes=size - 1)
        assert rest == 0
        with pytest.raises(UnreadError):
            await anext(aiter(dropped))

    asyncio.run(run())


def test_an_end_behind_the_end_is_none(server: Any, processor: Any) -> None:
    """What ends a service, or a deadline, does not break an answer that has come as a whole."""
    service = service_of(server, processor)

    async def run() -> None:
        late = await started(service, stream=True)
        await until_told(service)
        service.end_all()
        tokens = [token async for some in late for piece in some for token in piece.text.token_ids]
        assert len(tokens) == TOKENS
        late.close()

    asyncio.run(run())


def test_a_stream_that_is_read_holds_little(server: Any, processor: Any) -> None:
    service = service_of(server, processor, held_bytes=20_000)
    body = {"prompt": "x", "max_tokens": TOKENS, "stream": True}
    found = fetch(server, "POST", TEXT_PATH, json=body)
    assert found.text.endswith("data: [DONE]\n\n")
    assert "wait to be read" not in found.text
    assert service.held.total == 0


@pytest.mark.parametrize("logprobs", [None, 5])
def test_a_whole_answer_is_bounded(server: Any, processor: Any, logprobs: int | None) -> None:
    service = service_of(server, processor, held_bytes=80_000)
    body = {"prompt": "x", "max_tokens": TOKENS, "logprobs": logprobs}
    found = fetch(server, "POST", TEXT_PATH, json=body)
    assert found.status_code == (200 if logprobs is None else 400)
    if logprobs is not None:
        assert found.json()["error"]["code"] == "answer_not_read"
        assert server.client.aborted
    assert service.held.total == 0


def test_who_holds_most_makes_room_for_others(server: Any, processor: Any) -> None:
    """Those that read nothing give up; one that reads gets all of its answer."""
    service = service_of(server, processor, all_held_bytes=100_000)

    async def run() -> None:
        unread = [await started(service, stream=True) for _ in range(4)]
        await until_told(service)
        assert service.held.total <= 100_000
        reader = await started(service, stream=True)
        tokens = 0
        async for pieces in reader:
            tokens += sum(len(piece.text.token_ids) for piece in pieces)
        assert tokens == TOKENS
        for one in (*unread, reader):
            one.close()

    asyncio.run(run())
    assert service.held.total == 0


def test_a_long_wait_is_read_in_turns(server: Any, processor: Any) -> None:
    """A reader that finds thousands of pieces lets others work in between."""
    service = service_of(server, processor)

    async def run() -> None:
        late = await started(service, stream=True)
        await until_told(service)
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(others())
        pieces = [piece async for some in late for piece in some]
        assert len(pieces) > TOKENS // 4
        assert turns >= len(pieces) // PIECES_OF_A_TURN
        task.cancel()
        late.close()

    asyncio.run(run())


def test_weights_are_of_tokens_and_log_probabilities() -> None:
    assert weight(1, 0) < weight(2, 0) < weight(2, 1)
    assert weight(4, 4 * 20) > 10 * weight(4, 0)
