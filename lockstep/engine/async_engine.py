"""Client of an engine: many asynchronous callers share one engine over a transport."""

import asyncio
import contextlib
import logging
import threading
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from lockstep.cache.block_log import BlocksCleared
from lockstep.engine.engine_loop import Deliver, DeliverBlocks, Delivery, ignore_blocks
from lockstep.engine.kv_publisher import KVEventPublisher
from lockstep.engine.received_answer import ReceivedAnswer
from lockstep.engine.stats import Stats
from lockstep.engine.token_update import TokenUpdate
from lockstep.errors import ComputeError, EngineDeadError, RequestError
from lockstep.scheduling.request import Request

NOT_STARTED = "it was never started"
SHUT_DOWN = "it was shut down"


log = logging.getLogger("lockstep.engine")


def ignore_ids(request_ids: Sequence[str]) -> None:
    """Ignore the ids of requests."""


class Loss(NamedTuple):
    """Consequences of the loss of an engine.

    num_resumed: requests on which it worked and which go on. num_ended: requests that ended.
    num_open: requests that were submitted again.
    """

    num_resumed: int
    num_ended: int
    num_open: int


@dataclass(frozen=True)
class Receiver:
    """Callbacks of a transport, called in its thread.

    deliver: receives the updates of requests.
    begun: receives the ids of requests before the engine works on them.
    lost: called with forget() when the engine is gone and another one may follow. It calls
    forget(), which drops the transport's queued commands, and submits the open requests again. A
    transport to several engines names the requests of the engine that is gone, and whether that
    engine failed.
    ended: called once with the reason when no more updates follow; the flag is True where the
    engine ended without stop().
    blocks: receives the events of cached blocks.
    compiled: receives the ids of requests that wait for rows after their grammars were compiled.
    """

    deliver: Deliver
    begun: Callable[[Sequence[str]], None]
    lost: "Lost"
    ended: Callable[[str, bool], None]
    blocks: DeliverBlocks = ignore_blocks
    compiled: Callable[[Sequence[str]], None] = ignore_ids


class Lost(Protocol):
    """Callback of a transport whose engine is gone: see Receiver."""

    def __call__(
        self,
        forget: Callable[[], None],
        request_ids: Collection[str] | None = None,
        failed: bool = True,
    ) -> Loss: ...


class Transport(Protocol):
    """Connection to an engine. submit() and abort() keep their order and never block."""

    @property
    def stalled_for(self) -> float:
        """Return the seconds since the current step began; 0 between steps."""
        ...

    @property
    def restarting(self) -> bool:
        """Return whether the engine is being restarted."""
        ...

    def start(self, receiver: Receiver) -> None:
        """Start serving."""
        ...

    def stop(self) -> None:
        """Stop after the current step; return once the receiver has been notified."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Those without a grammar are added between the same two steps."""
        ...

    def abort(self, request_id: str) -> None:
        """Abort a request; an unknown id has no effect."""
        ...

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes, after the commands queued before."""
        ...

    def stats(self) -> Stats:
        """Return a copy of the counters; the histogram lists move into it and start anew."""
        ...


Update = TokenUpdate | Exception
"""Message to a listener: new tokens, or the exception that ended the request."""
Listener = Callable[[Update], None]
UPDATES_PER_ITERATION = 2
"""Updates delivered per iteration of an event loop.

What listeners write goes out at the end of an iteration, and incoming requests are read between two
iterations: small batches keep both latencies low.
"""


class _LoopQueue:
    """Queue of updates for the listeners of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._updates: deque[tuple[_OpenRequest, Update]] = deque()
        self._is_delivering = False

    def put(self, updates: Iterable[tuple["_OpenRequest", Update]]) -> None:
        """Queue updates, from any thread. A closed loop drops them."""
        self._updates.extend(updates)
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        # A second chain of calls would deliver two batches per iteration of the loop.
        if not self._is_delivering:
            self._deliver_batch()

    def _deliver_batch(self) -> None:
        """Call the listeners of the next updates, then schedule the next batch."""
        batch = [
            self._updates.popleft() for _ in range(min(len(self._updates), UPDATES_PER_ITERATION))
        ]
        # The flag is cleared in the next iteration: put() must not deliver twice in this one.
        self._is_delivering = bool(batch)
        if batch:
            self.loop.call_soon(self._deliver_batch)
        for opened, item in batch:
            opened.context.run(opened.listener, item)


class Inbox:
    """Queue of updates for one thread, which calls deliver()."""

    def __init__(self) -> None:
        self._batches: SimpleQueue[list[tuple[_OpenRequest, Update]]] = SimpleQueue()

    def put(self, updates: Iterable[tuple["_OpenRequest", Update]]) -> None:
        """Queue the updates of one step, from any thread."""
        self._batches.put(list(updates))

    def deliver(self) -> None:
        """Wait for the updates of one step and call their listeners; a signal ends the wait."""
        for opened, item in self._batches.get():
            opened.listener(item)


@dataclass
class _OpenRequest:
    """Request that has not ended, with its listener.

    queue: where its updates go. answer: what they had so far. context: context variables of the
    caller, for the listener.
    """

    request: Request
    listener: Listener
    queue: _LoopQueue | Inbox
    answer: ReceivedAnswer = field(init=False)
    context: Context = field(default_factory=copy_context)

    def __post_init__(self) -> None:
        self.answer = ReceivedAnswer(self.request)


class Stream:
    """Updates of one request, in order. Iteration raises what the engine raised."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Update] = asyncio.Queue()
        self.put = self._queue.put_nowait

    async def __aiter__(self) -> AsyncIterator[TokenUpdate]:
        while True:
            item = await self._queue.get()
            if isinstance(item, Exception):
                raise item
            yield item
            if item.finish_reason is not None:
                return


class AsyncEngine:
    """Client of one engine, from start() to shutdown().

    abort() and stats() may be called from any thread, and so may submit() with an inbox. Without
    one, submit() and stream() belong to an event loop.

    Where a step raises, or the engine is lost and restarted, all requests go on from the tokens
    that were delivered, in their order: a listener sees a pause. A request whose runs fail the
    engine again and again ends with ComputeError. Where the engine is not restarted, all requests
    end, and `on_end` is called once, in the transport's thread, with the reason; not after
    shutdown(). remedy: advice in the error of a stopped engine. publisher: publishes the engine's
    events of cached blocks; it has been started, and shutdown() closes it.
    """

    def __init__(
        self,
        transport: Transport,
        on_end: Callable[[str], None] | None = None,
        remedy: str = "Restart the server.",
        publisher: KVEventPublisher | None = None,
    ) -> None:
        self.transport = transport
        self._publisher = publisher
        self.on_end = on_end
        self._remedy = remedy
        self._open: dict[str, _OpenRequest] = {}
        self._queues: dict[asyncio.AbstractEventLoop, _LoopQueue] = {}
        self._lock = threading.Lock()
        self._ended: str | None = NOT_STARTED

    def start(self) -> None:
        """Start the transport."""
        self._ended = None
        blocks = ignore_blocks if self._publisher is None else self._publisher.publish
        self.transport.start(
            Receiver(
                deliver=self._deliver,
                begun=self._begun,
                lost=self._lost,
                ended=self._close,
                blocks=blocks,
                compiled=self._compiled,
            )
        )

    def shutdown(self) -> None:
        """Stop the engine after its current step; open requests end with EngineDeadError."""
        self.transport.stop()
        if self._publisher is not None:
            self._publisher.close()

    @property
    def is_alive(self) -> bool:
        """Return whether the engine accepts requests."""
        return self._ended is None

    @property
    def restarting(self) -> bool:
        """Return whether requests wait for an engine that is being restarted."""
        return self.is_alive and self.transport.restarting

    @property
    def stalled_for(self) -> float:
        """Return the seconds since the current step began; 0 between steps. Takes no lock."""
        return self.transport.stalled_for

    @property
    def num_open(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._open)

    def submit(
        self, requests: Sequence[tuple[Request, Listener]], inbox: Inbox | None = None
    ) -> None:
        """Queue requests, all of them before the next step begins.

        A listener is called with the updates of its request: in the event loop and the context of
        this call, or by the thread that calls deliver() of the inbox. Callers use no id twice:
        updates of an aborted request may arrive later.

        Raises EngineDeadError, and RequestError where a request of the same id is open; then none
        is queued.
        """
        with self._lock:
            queue = inbox or self._queue_of(asyncio.get_running_loop())
            if self._ended is not None:
                raise self._dead()
            opened: dict[str, _OpenRequest] = {}
            for request, listener in requests:
                if request.id in self._open or request.id in opened:
                    raise RequestError(
                        f"request_id={request.id!r} is not allowed; allowed: ids of no running "
                        "request. Choose another.",
                        "request_id",
                    )
                opened[request.id] = _OpenRequest(request, listener, queue)
            self._open.update(opened)
            self.transport.submit([request for request, _ in requests])

    def stream(self, request: Request) -> Stream:
        """Queue a request and return the stream of its updates."""
        stream = Stream()
        self.submit([(request, stream.put)])
        return stream

    def abort(self, request_id: str) -> None:
        """Abort a request. Its listener gets a last update with finish_reason abort."""
        with self._lock:
            ended = self._open.pop(request_id, None)
            if ended is None:
                return
            self.transport.abort(request_id)
        last = TokenUpdate([], None, "abort", None, ended.answer.metrics.copy())
        _put_updates([(ended, last)])

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes, those in host memory too, before requests submitted later.

        Running requests keep their pages.
        """
        self.transport.reset_prefix_cache()

    def stats(self) -> Stats:
        """Return a copy of the counters; the histogram lists move into it and start anew."""
        stats = self.transport.stats()
        if self._publisher is None:
            return stats
        return replace(
            stats,
            kv_event_batches_total=self._publisher.num_batches,
            kv_event_batches_dropped_total=self._publisher.num_dropped,
        )

    def _queue_of(self, loop: asyncio.AbstractEventLoop) -> _LoopQueue:
        """Return the queue of an event loop; the queues of closed loops are dropped."""
        if loop not in self._queues:
            self._queues = {
                event_loop: queue
                for event_loop, queue in self._queues.items()
                if not event_loop.is_closed()
            }
            self._queues[loop] = _LoopQueue(loop)
        return self._queues[loop]

    def _dead(self) -> EngineDeadError:
        return EngineDeadError(f"the engine has stopped: {self._ended}. {self._remedy}")

    def _deliver(self, updates: Sequence[Delivery]) -> None:
        """Deliver updates to requests that are still open."""
        delivered: list[tuple[_OpenRequest, Update]] = []
        with self._lock:
            for request_id, item in updates:
                opened = self._open.get(request_id)
                if opened is None:
                    continue
                if isinstance(item, Exception) or item.finish_reason is not None:
                    del self._open[request_id]
                else:
                    opened.answer.add(item)
                delivered.append((opened, item))
        _put_updates(delivered)

    def _begun(self, request_ids: Sequence[str]) -> None:
        """Note that the engine works on these requests."""
        self._set_begun(request_ids, True)

    def _compiled(self, request_ids: Sequence[str]) -> None:
        """Note that these requests wait: if the engine dies, they are not the cause."""
        self._set_begun(request_ids, False)

    def _set_begun(self, request_ids: Sequence[str], has_begun: bool) -> None:
        with self._lock:
            for request_id in request_ids:
                if request_id in self._open:
                    self._open[request_id].answer.has_begun = has_begun

    def _lost(
        self,
        forget: Callable[[], None],
        request_ids: Collection[str] | None = None,
        failed: bool = True,
    ) -> Loss:
        """Handle the loss of the engine: submit the open requests again, in their order.

        Ends a request that engines have worked on again and again when they failed. request_ids:
        requests of the lost engine; None for all. failed: it ended unexpectedly.
        """
        if self._publisher is not None:
            self._publisher.publish([BlocksCleared()])
        ended: list[tuple[_OpenRequest, Update]] = []
        rest: list[Request] = []
        num_begun = 0
        with self._lock:
            forget()
            for opened in list(self._open.values()):
                if request_ids is not None and opened.request.id not in request_ids:
                    continue
                num_begun += opened.answer.lose_engine(failed)
                request = opened.answer.rest()
                if request.failure is None:
                    rest.append(request)
                else:
                    log.error("request %s ends: %s", request.id, request.failure)
                    ended.append((opened, ComputeError(request.failure)))
                    del self._open[request.id]
            self.transport.submit(rest)
        _put_updates(ended)
        return Loss(num_begun - len(ended), len(ended), len(rest))

    def _close(self, why: str, is_unexpected: bool) -> None:
        """End every request, including those that the engine has not received."""
        with self._lock:
            self._ended = why
            unfinished = list(self._open.values())
            self._open.clear()
        _put_updates([(opened, self._dead()) for opened in unfinished])
        if is_unexpected and self.on_end is not None:
            self.on_end(why)


def _put_updates(updates: Sequence[tuple[_OpenRequest, Update]]) -> None:
    """Put updates into the queues of their requests; each event loop is woken once."""
    by_queue: dict[_LoopQueue | Inbox, list[tuple[_OpenRequest, Update]]] = defaultdict(list)
    for opened, item in updates:
        by_queue[opened.queue].append((opened, item))
    for queue, items in by_queue.items():
        queue.put(items)
