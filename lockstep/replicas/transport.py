"""Transport to several replicas: it routes requests, and moves them where a replica goes away."""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from uuid import uuid4

from lockstep.cache.block_log import BlockEvent, BlocksCleared
from lockstep.engine.async_engine import SHUT_DOWN, Receiver
from lockstep.engine.engine_loop import Delivery
from lockstep.engine.kv_publisher import KVEventPublisher
from lockstep.engine.messages import (
    Began,
    ChangedBlocks,
    Compiled,
    EngineRequest,
    Heartbeat,
    Submit,
    Updates,
)
from lockstep.engine.stats import GAUGES, Stats
from lockstep.errors import NumericsError
from lockstep.replicas.messages import (
    Call,
    Hello,
    OtherNumerics,
    Query,
    ReplicaReport,
    Restarting,
    page_keys,
)
from lockstep.replicas.router import ReplicaRouter
from lockstep.scheduling.request import Request

log = logging.getLogger("lockstep.replicas")

DRAIN_SECONDS = 0.3
"""Time after which a removed replica that still reports counts as drained, and not as dead."""
RETRY_SECONDS = 0.2
"""Pause before a call is repeated that reached no replica."""
RECONNECT_SECONDS = 1.0
"""Time after which a replica that was lost is tried again, while it is still listed."""
SILENT_SECONDS = 2.0
"""Time without a heartbeat after which a replica counts as stalled."""


class ReplicaLostError(Exception):
    """Call or report that a replica did not complete, because it ended or cannot be reached."""


class Fleet(Protocol):
    """Connection to replicas. Its coroutines run in the event loop of a transport."""

    def start(self, router: ReplicaRouter) -> None:
        """Begin to update the router with the replicas that are present."""
        ...

    def run(self, call: Call) -> AsyncIterator[OtherNumerics]:
        """Run a call on the replica that the router chooses. Raises ReplicaLostError."""
        ...

    def reports(self, query: Query) -> AsyncIterator[Sequence[ReplicaReport]]:
        """Yield the reports of the replica that the query names. Raises ReplicaLostError."""
        ...

    async def reset_prefix_cache(self, query: Query) -> None:
        """Drop the cached prefixes of the replica that the query names."""
        ...

    def restart(self) -> None:
        """Begin to replace the replicas one after the other, from any thread."""
        ...

    def stop(self) -> None:
        """End the replicas, from any thread."""
        ...


@dataclass
class _OpenRequest:
    """Request that has not ended. call: the present one. numerics: fingerprint of the replica that
    computed its tokens so far; "" before the first. forces: the user forces tokens of it.
    """

    message: EngineRequest
    call: Call
    task: "asyncio.Task[None]"
    numerics: str
    forces: bool


@dataclass
class _Member:
    """Replica that is present. stats: since its start. last_report: time.monotonic(). publisher: of
    its cached blocks; None without events, or where all publishers are in use. hello: its first
    report, None before that.
    """

    reports: "asyncio.Task[None]"
    publisher: KVEventPublisher | None = None
    hello: Hello | None = None
    stats: Stats = field(default_factory=Stats)
    stalled_for: float = 0.0
    last_report: float = field(default_factory=time.monotonic)

    @property
    def numerics(self) -> str:
        """Return its fingerprint; "" before its first report."""
        return "" if self.hello is None else self.hello.numerics


class ReplicaTransport:
    """Transport of an AsyncEngine to replicas. See Transport.

    A replica that dies or leaves hands its requests to others: the AsyncEngine submits them again
    with the tokens that their clients have. A request goes on only where the numerics are those of
    its tokens. All other requests go to replicas with the numerics `numerics`, that of the answers'
    system_fingerprint. allow_other_numerics: both may go to any replica. publishers: publish the
    events of cached blocks, each those of one replica at a time; they have been started, and stop()
    closes them.
    """

    def __init__(
        self,
        fleet: Fleet,
        numerics: str,
        allow_other_numerics: bool = False,
        publishers: Sequence[KVEventPublisher] = (),
    ) -> None:
        self.router = ReplicaRouter()
        self.client_id = uuid4().hex[:12]
        self.moved_total: Counter[str] = Counter()
        self._fleet = fleet
        self._allow_other_numerics = allow_other_numerics
        self._publishers = publishers
        self._numerics = "" if allow_other_numerics else numerics
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._run_loop, name="lockstep-replicas", daemon=True
        )
        self._receiver: Receiver
        self._open: dict[str, _OpenRequest] = {}
        self._request_of: dict[str, str] = {}
        self._num_calls = 0
        self._members: dict[str, _Member] = {}
        self._stats_lock = threading.Lock()
        self._past_stats = Stats()
        # Counters of lost replicas that may come back: those report them again.
        self._lost_stats: dict[str, Stats] = {}
        self._resetting: asyncio.Future[Any] | None = None

    @property
    def stalled_for(self) -> float:
        """See Transport: the shortest stall of all replicas, since the others serve on."""
        now = time.monotonic()
        stalls = []
        for member in list(self._members.values()):
            silence = now - member.last_report
            stalls.append(member.stalled_for + (silence if silence > SILENT_SECONDS else 0.0))
        return min(stalls, default=0.0)

    @property
    def restarting(self) -> bool:
        """Return whether no replica serves now: requests wait for one."""
        return self.router.num_ready == 0

    def start(self, receiver: Receiver) -> None:
        """See Transport."""
        self._receiver = receiver
        self.router.on_change = lambda *ids: self._post(self._change, *ids)
        self.router.on_refuse = lambda *refused: self._post(self._refuse, *refused)
        self._thread.start()
        self._fleet.start(self.router)

    def stop(self) -> None:
        """See Transport."""
        self._post(self._cancel_all)
        self._fleet.stop()
        self._post(self._loop.stop)
        self._thread.join()
        for publisher in self._publishers:
            publisher.close()
        self._receiver.ended(SHUT_DOWN, False)

    def submit(self, requests: Sequence[Request]) -> None:
        """See Transport."""
        self._post(self._submit, Submit.of(requests).requests)

    def abort(self, request_id: str) -> None:
        """See Transport."""
        self._post(self._forget, [request_id])

    def reset_prefix_cache(self) -> None:
        """See Transport. Requests that are submitted later wait until all replicas have done it."""
        self._post(self._reset_prefix_cache)

    def stats(self) -> Stats:
        """See Transport; counters as of the last heartbeats, summed over all replicas."""
        with self._stats_lock:
            members = [member.stats for member in self._members.values()]
            parts = [self._past_stats, *self._lost_stats.values(), *members]
            total = total_of(parts)
            for stats in parts:
                stats.drain()
        return replace(
            total,
            kv_event_batches_total=sum(publisher.num_batches for publisher in self._publishers),
            kv_event_batches_dropped_total=sum(
                publisher.num_dropped for publisher in self._publishers
            ),
        )

    def restart_replicas(self) -> None:
        """Begin a rolling restart: replicas are replaced one after the other, and drained."""
        log.warning("rolling restart of %d replicas", len(self.router.replica_ids))
        self._fleet.restart()

    def replica_stats(self) -> dict[str, tuple[str, Stats]]:
        """Return (numerics, copy of the counters) of each present replica by its id."""
        with self._stats_lock:
            return {
                replica_id: (member.numerics, replace(member.stats))
                for replica_id, member in self._members.items()
            }

    def _post(self, function: Any, *arguments: Any) -> None:
        """Call a function in the transport's thread. A stopped transport ignores it."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        pending = asyncio.all_tasks(self._loop)
        for task in pending:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _cancel_all(self) -> None:
        self._forget(list(self._open))
        for member in self._members.values():
            member.reports.cancel()

    # Requests, in the transport's thread.

    def _submit(self, messages: Iterable[EngineRequest]) -> None:
        for message in messages:
            numerics, forces = self._known_facts(message)
            call = self._call(message, numerics, forces)
            task = self._loop.create_task(self._run(call))
            self._open[message.id] = _OpenRequest(message, call, task, numerics, forces)
            self._request_of[call.tag] = message.id

    def _known_facts(self, message: EngineRequest) -> tuple[str, bool]:
        """Return the numerics of a request's tokens, and whether the user forces tokens of it."""
        previous = self._open.get(message.id)
        if previous is None:
            return "", bool(message.params.forced_token_ids)
        return previous.numerics, previous.forces

    def _call(self, message: EngineRequest, numerics: str, forces: bool) -> Call:
        """Return a new call of a request."""
        params = message.params
        may_differ = self._allow_other_numerics and message.num_resumed and not forces
        if may_differ and message.grammar is None:
            # Other numerics may choose other tokens than those that the client has.
            params = params.clone(forced_mismatch="report")
        self._num_calls += 1
        return Call(
            self.client_id,
            router=self.router,
            tag=str(self._num_calls),
            numerics=(numerics if message.num_resumed else "") or self._numerics,
            allow_other_numerics=self._allow_other_numerics,
            request=replace(message, params=params),
            page_keys=page_keys(message),
        )

    async def _run(self, call: Call) -> None:
        """Run a call until it ends, is lost or is cancelled."""
        if self._resetting is not None:
            # Aborting this request must not cancel the reset, for which others wait.
            await asyncio.shield(self._resetting)
        try:
            async for refusal in self._fleet.run(call):
                hello = Hello(refusal.numerics, 1, 0)
                self.router.introduce(call.replica_id, hello)
                self._lose([call.tag], "refused", failed=False)
                return
        except ReplicaLostError as error:
            log.warning("replica %s: %s", call.replica_id or "(none)", error)
            await asyncio.sleep(RETRY_SECONDS)
            self._lose([call.tag], "lost", failed=True)
        except Exception as error:
            # No update would ever end the request.
            log.exception("a call of replica %s failed", call.replica_id or "(none)")
            if call.tag in self._request_of:
                self._fail(self._request_of[call.tag], error)
        finally:
            self.router.end(call.tag)

    def _fail(self, request_id: str, error: Exception) -> None:
        """End a request with an error."""
        self._forget([request_id])
        self._receiver.deliver([(request_id, error)])

    def _forget(self, request_ids: Collection[str]) -> None:
        """Cancel the calls of requests that have ended."""
        for request_id in request_ids:
            opened = self._open.pop(request_id, None)
            if opened is not None:
                self._detach(opened)

    def _detach(self, opened: _OpenRequest) -> None:
        """Cancel the call of a request; nothing that arrives for it has an effect any more."""
        self._request_of.pop(opened.call.tag, None)
        if opened.task is not asyncio.current_task(self._loop):
            opened.task.cancel()
        self.router.end(opened.call.tag)

    def _lose(self, tags: Collection[str], reason: str, failed: bool) -> None:
        """Let the requests of lost calls go on elsewhere."""
        ids = {self._request_of[tag] for tag in tags if tag in self._request_of}
        if not ids:
            return

        def forget() -> None:
            # The entries of _open stay: the requests' next calls take their numerics.
            for request_id in ids:
                self._detach(self._open[request_id])

        def forget_ended() -> None:
            for request_id in ids:
                opened = self._open.get(request_id)
                if opened is not None and opened.call.tag not in self._request_of:
                    del self._open[request_id]

        loss = self._receiver.lost(forget, ids, failed)
        self._post(forget_ended)  # runs after the _submit() of those that go on
        if reason != "refused":
            self.moved_total[reason] += loss.num_resumed
        with self._stats_lock:
            self._past_stats.resumed_total += loss.num_resumed
            self._past_stats.requests_success_total["error"] += loss.num_ended

    def _refuse(self, call: Call, present: Collection[str]) -> None:
        """End a request that no replica can take."""
        request_id = self._request_of.get(call.tag)
        if request_id is None:
            return
        opened = self._open[request_id]
        other = " and ".join(present)
        begun = (
            f"its first {opened.message.num_resumed} tokens were computed with the numerics "
            if opened.message.num_resumed
            else "the server answers with the numerics "
        )
        message = (
            f"request {request_id} cannot go on: {begun}{call.numerics}, and all replicas that run "
            f"have {other}. Start replicas of equal numerics, or allow others with "
            "--allow-other-numerics."
        )
        log.error("%s", message)
        self._fail(request_id, NumericsError(message))

    def _reset_prefix_cache(self) -> None:
        self.router.forget_pages()
        queries = [Query(self.client_id, replica_id, self.router) for replica_id in self._members]
        resets = [self._fleet.reset_prefix_cache(query) for query in queries]
        resetting = asyncio.gather(*resets, return_exceptions=True)
        self._resetting = resetting

        def end(_: object) -> None:
            if self._resetting is resetting:
                self._resetting = None

        resetting.add_done_callback(end)

    # Replicas, in the transport's thread.

    def _change(self, added: Collection[str], removed: Collection[str]) -> None:
        """Listen to new replicas, and move the requests of removed ones."""
        for replica_id in added:
            if replica_id in self._members:
                # It was removed and is not drained yet: its calls and its reports go on.
                hello = self._members[replica_id].hello
                if hello is not None:
                    self.router.introduce(replica_id, hello)
                continue
            reports = self._loop.create_task(self._listen(replica_id))
            with self._stats_lock:
                stats = self._lost_stats.pop(replica_id, Stats())
                self._members[replica_id] = _Member(reports, self._free_publisher(), stats=stats)
            log.info("replica %s is present", replica_id)
        for replica_id in removed:
            if replica_id in self._members:
                self._loop.call_later(DRAIN_SECONDS, self._drain, replica_id)

    def _free_publisher(self) -> KVEventPublisher | None:
        """Return the first publisher that no replica has."""
        used = [member.publisher for member in self._members.values()]
        return next((publisher for publisher in self._publishers if publisher not in used), None)

    def _publish(self, member: _Member, events: Sequence[BlockEvent]) -> None:
        """Publish events of a replica's blocks.

        A replica that came before its predecessor left gets a publisher with its next events.
        Subscribers then know too few of its blocks, but none that is gone.
        """
        if member.publisher is None:
            member.publisher = self._free_publisher()
        if member.publisher is not None:
            member.publisher.publish(events)

    async def _listen(self, replica_id: str) -> None:
        """Take the reports of a replica until it ends."""
        try:
            query = Query(self.client_id, replica_id, self.router)
            async for reports in self._fleet.reports(query):
                for report in reports:
                    self._handle(replica_id, report)
            why = "it ended"
        except ReplicaLostError as error:
            why = str(error)
        except Exception as error:
            # Without its reports, no request of the replica would ever end.
            log.exception("the reports of replica %s failed", replica_id)
            why = f"its reports failed: {error}"
        if replica_id in self._members:
            log.error("replica %s is lost: %s", replica_id, why)
            self._remove(replica_id, "lost", failed=True)
            self._loop.call_later(RECONNECT_SECONDS, self._reconnect, replica_id)

    def _reconnect(self, replica_id: str) -> None:
        """Try a lost replica again: it may be back, if only the connection broke."""
        self.router.restore(replica_id)
        with self._stats_lock:
            if replica_id in self._lost_stats and replica_id not in self.router.replica_ids:
                self._past_stats = total_of([self._past_stats, self._lost_stats.pop(replica_id)])

    def _drain(self, replica_id: str) -> None:
        """Move the requests of a replica that takes no new ones."""
        if replica_id in self._members and replica_id not in self.router.replica_ids:
            log.info("replica %s is drained", replica_id)
            self._members[replica_id].reports.cancel()
            self._remove(replica_id, "drained", failed=False)

    def _remove(self, replica_id: str, reason: str, failed: bool) -> None:
        self.router.remove(replica_id)
        with self._stats_lock:
            member = self._members.pop(replica_id)
            stats = member.stats.ended()
            if failed:
                self._lost_stats[replica_id] = stats
            else:
                self._past_stats = total_of([self._past_stats, stats])
        self._publish(member, [BlocksCleared()])
        self._lose(self._tags_on(replica_id), reason, failed)

    def _tags_on(self, replica_id: str) -> list[str]:
        """Return the calls that the router sent to a replica."""
        calls = [opened.call for opened in self._open.values()]
        return [call.tag for call in calls if call.replica_id == replica_id]

    def _requests_of(self, tags: Sequence[str]) -> list[str]:
        """Return the requests of calls that have not been lost meanwhile."""
        return [self._request_of[tag] for tag in tags if tag in self._request_of]

    def _handle(self, replica_id: str, report: ReplicaReport) -> None:
        """Handle a report."""
        member = self._members.get(replica_id)
        if member is None:
            return
        member.last_report = time.monotonic()
        if isinstance(report, Updates):
            member.stalled_for = 0.0
            self._deliver(member, report.updates)
        elif isinstance(report, Began):
            self._receiver.begun(self._requests_of(report.ids))
        elif isinstance(report, Compiled):
            self._receiver.compiled(self._requests_of(report.ids))
        elif isinstance(report, ChangedBlocks):
            self._publish(member, report.events)
        elif isinstance(report, Heartbeat):
            member.stalled_for = report.stalled_for
            self.router.set_ready(replica_id, True)
            with self._stats_lock:
                member.stats = report.stats.after(member.stats.only_histograms())
        elif isinstance(report, Restarting):
            log.error("replica %s: %s", replica_id, report.why)
            self.router.set_ready(replica_id, False)
            self._publish(member, [BlocksCleared()])
            self._lose(self._tags_on(replica_id), "lost", failed=True)
        else:
            member.hello = report
            self.router.introduce(replica_id, report)
            if self._numerics not in ("", report.numerics):
                log.error(
                    "replica %s has the numerics %s and gets no requests; the server answers with "
                    "%s. Give it equal hardware, versions and settings, or use "
                    "--allow-other-numerics.",
                    replica_id,
                    report.numerics,
                    self._numerics,
                )

    def _deliver(self, member: _Member, updates: Sequence[Delivery]) -> None:
        """Deliver the updates of calls that have not been lost meanwhile."""
        delivered: list[Delivery] = []
        for tag, item in updates:
            request_id = self._request_of.get(tag)
            if request_id is None:
                continue
            delivered.append((request_id, item))
            if isinstance(item, Exception) or item.finish_reason is not None:
                del self._request_of[tag]
                del self._open[request_id]
                self.router.end(tag)
            else:
                self._open[request_id].numerics = member.numerics
        self._receiver.deliver(delivered)


def total_of(parts: Sequence[Stats]) -> Stats:
    """Return the sum of the counters and gauges of several engines."""
    total = Stats()
    for part in parts:
        gauges = {name: getattr(total, name) + getattr(part, name) for name in GAUGES}
        total = replace(part, **gauges).after(total)
    return total
