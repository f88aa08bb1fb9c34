"""Clients of a replica that go away, come again or do not read their reports."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from lockstep.engine.messages import Began, Compiled, Heartbeat, Submit, Updates
from lockstep.errors import EngineDeadError
from lockstep.replicas import host as host_module
from lockstep.replicas.host import ReplicaHost
from lockstep.replicas.messages import Call, Hello, Query
from tests.engine.test_process_transport import FakeTransport, make_request, one_token

HELLO = Hello("ls-1", 4, 8)


class Reader:
    """Client of a host with one call."""

    def __init__(self, host: ReplicaHost, name: str, tag: str = "1") -> None:
        self.host = host
        self.name = name
        self.reports: AsyncIterator[Sequence[Any]] = host.reports(Query(name))
        self.call = Call(name, tag=tag, request=Submit.of([make_request(name)]).requests[0])

    async def begin(self) -> "asyncio.Task[list[Any]]":
        """Read the first report, and start a call named as the client."""
        assert await anext(self.reports) == [HELLO]

        async def run() -> list[Any]:
            return [refusal async for refusal in self.host.run(self.call)]

        task = asyncio.create_task(run())
        await asyncio.sleep(0)
        return task

    async def next(self) -> list[Any]:
        """Return the next reports but heartbeats."""
        while True:
            reports = [one for one in await anext(self.reports) if not isinstance(one, Heartbeat)]
            if reports:
                return reports


@pytest.fixture
def transport() -> Any:
    result: Any = FakeTransport()
    result.restarting = False
    result.stalled_for = 0.0
    return result


def run(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work, 20))


def test_a_client_that_does_not_read_loses_its_calls(
    transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "HEARTBEAT_SECONDS", 0.01)
    monkeypatch.setattr(host_module, "UNREAD_SECONDS", 0.2)

    async def work() -> None:
        host = ReplicaHost(transport, HELLO)
        host.start()
        slow = Reader(host, "slow")
        quick = Reader(host, "quick")
        unread = await slow.begin()
        read = await quick.begin()
        reading = asyncio.create_task(quick.next())
        assert await unread == [], "it ends without an update"
        assert transport.sent == ["slow.1", "quick.1", "abort slow.1"]
        with pytest.raises(StopAsyncIteration):
            await slow.next()
        with pytest.raises(EngineDeadError, match="the client slow does not read its reports"):
            await anext(host.run(slow.call))
        transport.receiver.deliver([("quick.1", one_token(5))])
        (updates,) = await reading
        assert isinstance(updates, Updates) and not read.done()
        host._heartbeats.cancel()

    run(work())


def test_a_client_that_goes_away_leaves_nothing(transport: Any) -> None:
    async def work() -> None:
        host = ReplicaHost(transport, HELLO)
        host.start()
        client = Reader(host, "gone")
        call = await client.begin()
        await client.reports.aclose()  # type: ignore[attr-defined]
        # Updates of a step that ran meanwhile.
        transport.receiver.deliver([("gone.1", one_token(5))])
        assert await call == []
        await asyncio.sleep(0)
        assert not host._outboxes and not host._calls
        assert transport.sent == ["gone.1", "abort gone.1"]
        host._heartbeats.cancel()

    run(work())


def test_a_client_that_comes_again_gets_its_reports(transport: Any) -> None:
    """The end of its earlier stream, whenever that comes, does not end the new one."""

    async def work() -> None:
        host = ReplicaHost(transport, HELLO)
        host.start()
        first = Reader(host, "client")
        second = Reader(host, "client", "2")
        lost = await first.begin()
        waiting = asyncio.create_task(first.next())
        await asyncio.sleep(0)
        call = await second.begin()
        assert await lost == []
        with pytest.raises(StopAsyncIteration):
            await waiting
        await first.reports.aclose()  # type: ignore[attr-defined]
        transport.receiver.begun(["client.2"])
        transport.receiver.compiled(["client.2", "nobody.1"])
        transport.receiver.deliver([("client.2", one_token(5))])
        began, compiled, updates = await second.next()
        assert (began, compiled) == (Began(["2"]), Compiled(["2"]))
        assert [tag for tag, _ in updates.updates] == ["2"] and not call.done()
        host._heartbeats.cancel()

    run(work())
