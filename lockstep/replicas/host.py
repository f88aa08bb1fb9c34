"""Replica's side: an engine that takes calls of several clients and reports to each of them."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, cast

from lockstep.engine.async_engine import Loss, Receiver, Transport
from lockstep.engine.engine_loop import Delivery
from lockstep.engine.messages import Began, ChangedBlocks, Compiled, Heartbeat, Updates
from lockstep.errors import EngineDeadError
from lockstep.replicas.messages import (
    Call,
    Hello,
    OtherNumerics,
    Query,
    ReplicaReport,
    Restarting,
)
from lockstep.scheduling.grammar import Grammar
from lockstep.scheduling.request import Request

log = logging.getLogger("lockstep.replicas")

HEARTBEAT_SECONDS = 0.5
"""Interval between two heartbeats of a replica."""
UNREAD_SECONDS = 30.0
"""Time after which a client that reads no reports counts as gone, since they take memory."""


@dataclass(frozen=True)
class RequestedGrammar:
    """Grammar that only the engine's process compiles. recipe: what it is compiled from."""

    recipe: object


@dataclass
class _OpenCall:
    """Call that has not ended. ended: it has its last update, or the engine was lost."""

    client: str
    tag: str
    ended: asyncio.Event


class _Outbox:
    """Reports that a client has not read. oldest: time.monotonic() of the first; inf for none."""

    def __init__(self) -> None:
        self.oldest = inf
        self._reports: list[ReplicaReport] = []
        self._changed = asyncio.Event()

    def put(self, report: ReplicaReport) -> None:
        """Queue a report."""
        self.oldest = min(self.oldest, time.monotonic())
        self._reports.append(report)
        self._changed.set()

    def close(self) -> None:
        """Drop the reports, and let take() return none."""
        self._reports = []
        self._changed.set()

    async def take(self) -> list[ReplicaReport]:
        """Wait for reports, and return all of them; none once the outbox is closed."""
        await self._changed.wait()
        self._changed.clear()
        reports, self._reports, self.oldest = self._reports, [], inf
        return reports


class ReplicaHost:
    """Engine of a replica, from start() to stop(), which belong to an event loop.

    A lost engine ends all calls: their clients go on elsewhere. The calls of a client end with the
    stream of its reports.

    transport: to the engine; it may restart a lost one. make_grammar: compiles grammars where the
    transport takes compiled ones.
    """

    def __init__(
        self,
        transport: Transport,
        hello: Hello,
        make_grammar: Callable[[Any], Grammar] | None = None,
    ) -> None:
        self.transport = transport
        self.hello = hello
        self._make_grammar = make_grammar
        self._loop: asyncio.AbstractEventLoop
        self._lock = threading.Lock()
        self._calls: dict[str, _OpenCall] = {}
        self._outboxes: dict[str, _Outbox] = {}
        self._fault: str | None = None
        self._heartbeats: asyncio.Task[None]

    def start(self) -> None:
        """Start the engine."""
        self._loop = asyncio.get_running_loop()
        self.transport.start(
            Receiver(
                deliver=self._deliver,
                begun=lambda ids: self._report_calls(ids, Began),
                lost=self._lose,
                ended=self._close,
                blocks=lambda events: self._post_to_all(ChangedBlocks(events)),
                compiled=lambda ids: self._report_calls(ids, Compiled),
            )
        )
        self._heartbeats = self._loop.create_task(self._send_heartbeats())

    def stop(self) -> None:
        """Stop the engine after its current step. Any thread may call it."""
        self.transport.stop()

    def check(self) -> None:
        """Raise EngineDeadError if the engine has ended and is not restarted."""
        if self._fault is not None:
            raise EngineDeadError(f"the engine has stopped: {self._fault}.")

    async def run(self, call: Call) -> AsyncIterator[OtherNumerics]:
        """Run a call until it ends. Yield OtherNumerics to refuse it.

        A caller that cancels the iterator aborts the call.

        Raises EngineDeadError where the engine has ended, or the client does not read its reports.
        """
        self.check()
        if call.client not in self._outboxes:
            raise EngineDeadError(f"the client {call.client} does not read its reports.")
        if call.numerics not in ("", self.hello.numerics) and not call.allow_other_numerics:
            yield OtherNumerics(self.hello.numerics)
            return
        request = self._request(call)
        opened = _OpenCall(call.client, call.tag, asyncio.Event())
        with self._lock:
            self._calls[request.id] = opened
            self.transport.submit([request])
        try:
            await opened.ended.wait()
        finally:
            with self._lock:
                if self._calls.pop(request.id, None) is not None:
                    self.transport.abort(request.id)

    async def reports(self, query: Query) -> AsyncIterator[Sequence[ReplicaReport]]:
        """Yield the reports for a client, all that wait at once, until it goes away.

        They end where the client comes again, or leaves them unread for UNREAD_SECONDS.
        """
        self._drop_client(query.client)
        outbox = self._outboxes[query.client] = _Outbox()
        try:
            yield [self.hello]
            while reports := await outbox.take():
                yield reports
        finally:
            if self._outboxes.get(query.client) is outbox:
                self._drop_client(query.client)

    async def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes."""
        self.transport.reset_prefix_cache()

    def _request(self, call: Call) -> Request:
        """Return the engine's request: its id is that of the call, and is not used again."""
        request = call.request.request()
        recipe = call.request.grammar
        if recipe is not None:
            compiled = self._make_grammar(recipe) if self._make_grammar else None
            request.grammar = compiled or cast(Grammar, RequestedGrammar(recipe))
        return replace(request, id=f"{request.id}.{call.tag}")

    def _drop_client(self, client: str) -> None:
        """End the reports and the calls of a client, if it has any."""
        if (outbox := self._outboxes.pop(client, None)) is not None:
            outbox.close()
        with self._lock:
            calls = [opened for opened in self._calls.values() if opened.client == client]
        self._end(calls)

    def _post(self, reports: Iterable[tuple[str, ReplicaReport]]) -> None:
        """Queue reports of clients, from any thread."""

        def put(items: Sequence[tuple[str, ReplicaReport]]) -> None:
            for client, report in items:
                if client in self._outboxes:
                    self._outboxes[client].put(report)

        self._loop.call_soon_threadsafe(put, list(reports))

    def _post_to_all(self, report: ReplicaReport) -> None:
        """Queue a report for all clients, from any thread."""

        def put() -> None:
            for outbox in self._outboxes.values():
                outbox.put(report)

        self._loop.call_soon_threadsafe(put)

    def _deliver(self, updates: Sequence[Delivery]) -> None:
        """Report the updates of a step to the clients of its calls."""
        by_client: dict[str, list[Delivery]] = {}
        ended: list[_OpenCall] = []
        with self._lock:
            for request_id, item in updates:
                opened = self._calls.get(request_id)
                if opened is None:
                    continue
                by_client.setdefault(opened.client, []).append((opened.tag, item))
                if isinstance(item, Exception) or item.finish_reason is not None:
                    ended.append(self._calls.pop(request_id))
        self._post((client, Updates(items)) for client, items in by_client.items())
        self._end(ended)

    def _report_calls(
        self, request_ids: Sequence[str], report: Callable[[list[str]], Began | Compiled]
    ) -> None:
        """Report to each client which of its calls these requests are.

        report: Began or Compiled.
        """
        by_client: dict[str, list[str]] = {}
        with self._lock:
            for request_id in request_ids:
                if request_id in self._calls:
                    opened = self._calls[request_id]
                    by_client.setdefault(opened.client, []).append(opened.tag)
        self._post((client, report(tags)) for client, tags in by_client.items())

    def _lose(
        self, forget: Callable[[], None], request_ids: object = None, failed: bool = True
    ) -> Loss:
        """End all calls, since the engine is lost and will be restarted."""
        with self._lock:
            forget()
            calls = list(self._calls.values())
            self._calls.clear()
        self._report_loss("its engine was lost", calls)
        # The clients count the requests that go on.
        return Loss(0, 0, len(calls))

    def _close(self, why: str, is_unexpected: bool) -> None:
        """End all calls, since the engine has ended for good."""
        self._fault = why
        with self._lock:
            calls = list(self._calls.values())
            self._calls.clear()
        self._report_loss(why, calls)

    def _report_loss(self, why: str, calls: Sequence[_OpenCall]) -> None:
        self._post_to_all(Restarting(why))
        self._end(calls)

    def _end(self, calls: Sequence[_OpenCall]) -> None:
        for opened in calls:
            self._loop.call_soon_threadsafe(opened.ended.set)

    async def _send_heartbeats(self) -> None:
        """Report the engine's counters to all clients, as long as an engine runs."""
        while self._fault is None:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            for client, outbox in list(self._outboxes.items()):
                if time.monotonic() - outbox.oldest > UNREAD_SECONDS:
                    log.warning("the client %s does not read its reports: its calls end", client)
                    self._drop_client(client)
            if not self.transport.restarting:
                report = Heartbeat(self.transport.stats(), self.transport.stalled_for)
                for outbox in self._outboxes.values():
                    outbox.put(report)
