"""The client: many asynchronous callers of one engine, wherever that runs."""

import asyncio
import contextlib
import threading
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

from lockstep.engine.engine_loop import Deliver, Delivery
from lockstep.engine.stats import Stats
from lockstep.engine.token_update import TokenUpdate
from lockstep.errors import EngineDeadError, RequestError
from lockstep.outputs import RequestMetrics
from lockstep.scheduling.request import Request

ENGINE_RESTARTED = (
    "the engine was restarted while it worked on this request. Send the request again; the log "
    "names the cause."
)
NOT_STARTED = "it was never started"
SHUT_DOWN = "it was shut down"


@dataclass(frozen=True)
class Receiver:
    """Whom a transport tells, from a thread of its own.

    deliver: updates of requests. lost(forget): the engine is gone with all that it held, another
    one follows. Once forget() has dropped what the transport was asked for, it is asked again for
    what can be served from the beginning; returns how many requests ended instead. ended: no more
    comes, and why; the flag says whether the engine ended by itself.
    """

    deliver: Deliver
    lost: Callable[[Callable[[], None]], int]
    ended: Callable[[str, bool], None]


class Transport(Protocol):
    """The way to an engine. submit and abort keep their order, and never wait."""

    @property
    def stalled_for(self) -> float:
        """Seconds since the step that runs now began; 0 between steps."""
        ...

    @property
    def restarting(self) -> bool:
        """Whether there is no engine now, and one will be."""
        ...

    def start(self, receiver: Receiver) -> None:
        """Begins to serve."""
        ...

    def stop(self) -> None:
        """Ends after the present step, and returns when the receiver was told."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Those without a grammar are added between the same two steps."""
        ...

    def abort(self, request_id: str) -> None:
        """Ends a request; one that is not known is no matter."""
        ...

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes, after the commands before this one."""
        ...

    def stats(self) -> Stats:
        """A copy of the counters; histogram lists are handed over and start anew."""
        ...


Update = TokenUpdate | Exception
"""What comes of a request: an update, or what the engine raised, which is the last."""
Listener = Callable[[Update], None]
NEWS_OF_A_TURN = 2
"""Updates that listeners hear in one turn of their event loop: what they write for them goes out at
its end, and what others ask, which takes some turns, is heard in between."""


class _Post:
    """Updates that wait for the listeners of one event loop, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._news: deque[tuple[_Open, Update]] = deque()
        self._is_telling = False

    def put(self, news: Iterable[tuple["_Open", Update]]) -> None:
        """Queue updates, from any thread. A closed loop has no listeners any more."""
        self._news.extend(news)
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        # A second chain of calls would let listeners hear twice as many updates in a turn.
        if not self._is_telling:
            self._tell()

    def _tell(self) -> None:
        """Call the listeners of the next NEWS_OF_A_TURN updates, then again in the next turn."""
        batch = [self._news.popleft() for _ in range(min(len(self._news), NEWS_OF_A_TURN))]
        # The chain ends in a turn of its own: a put() of this turn must not tell in it again.
        self._is_telling = bool(batch)
        if batch:
            self.loop.call_soon(self._tell)
        for opened, item in batch:
            opened.context.run(opened.listener, item)


class Inbox:
    """Updates that wait for one thread, in order; that thread calls deliver()."""

    def __init__(self) -> None:
        self._batches: SimpleQueue[list[tuple[_Open, Update]]] = SimpleQueue()

    def put(self, news: Iterable[tuple["_Open", Update]]) -> None:
        """Queue the updates of one step, from any thread."""
        self._batches.put(list(news))

    def deliver(self) -> None:
        """Wait for the updates of one step and call their listeners; a signal ends the wait."""
        for opened, item in self._batches.get():
            opened.listener(item)


@dataclass
class _Open:
    """A request that has not ended, and who hears of it, by which post and in which context.

    is_final: it cannot be asked anew, should the engine be lost.
    """

    request: Request
    listener: Listener
    post: _Post | Inbox
    is_final: bool = False
    metrics: RequestMetrics = field(init=False)
    context: Context = field(default_factory=copy_context)

    def __post_init__(self) -> None:
        self.metrics = RequestMetrics(arrival_time=self.request.metrics.arrival_time)


class Stream:
    """The updates of one request, in order; raises what the engine raised."""

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
    """Client of one engine, from start() to shutdown(). abort and stats may come from any thread,
    and so may submit with an inbox; without one, submit and stream belong to an event loop.

    A step that raises ends the requests that it worked on, and the engine goes on. Where an engine
    is lost and another follows, requests that had given no token yet are queued again, once, in
    their order; the same seed gives the same answer. Where none follows, all streams end, and then
    `on_end` is called, once, in the transport's thread, with the reason in plain words; not after
    shutdown(). remedy: what the error of an engine that has stopped advises.
    """

    def __init__(
        self,
        transport: Transport,
        on_end: Callable[[str], None] | None = None,
        remedy: str = "Restart the server.",
    ) -> None:
        self.transport = transport
        self.on_end = on_end
        self._remedy = remedy
        self._open: dict[str, _Open] = {}
        self._posts: dict[asyncio.AbstractEventLoop, _Post] = {}
        self._door = threading.Lock()
        self._ended: str | None = NOT_STARTED

    def start(self) -> None:
        """Opens the way to the engine."""
        self._ended = None
        self.transport.start(Receiver(self._deliver, self._lost, self._close))

    def shutdown(self) -> None:
        """Ends the engine after its current step; open requests end with EngineDeadError."""
        self.transport.stop()

    @property
    def is_alive(self) -> bool:
        """Whether requests are taken."""
        return self._ended is None

    @property
    def restarting(self) -> bool:
        """Whether requests wait for an engine that is being started again."""
        return self.is_alive and self.transport.restarting

    @property
    def stalled_for(self) -> float:
        """Seconds since the step that now runs began; 0 between steps. Waits for no lock."""
        return self.transport.stalled_for

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def submit(
        self, requests: Sequence[tuple[Request, Listener]], inbox: Inbox | None = None
    ) -> None:
        """Queue requests, all of them before the next step begins.

        A listener is called with the updates of its request: in the event loop and the context of
        this call, or by the thread that calls deliver() of the inbox.

        Raises EngineDeadError, and RequestError where a request of the same id is open; then none
        is queued.
        """
        with self._door:
            post = inbox or self._post_of(asyncio.get_running_loop())
            if self._ended is not None:
                raise self._dead()
            opened: dict[str, _Open] = {}
            for request, listener in requests:
                if request.id in self._open or request.id in opened:
                    raise RequestError(
                        f"request_id={request.id!r} is not allowed; allowed: ids of no running "
                        "request. Choose another.",
                        "request_id",
                    )
                opened[request.id] = _Open(request, listener, post)
            self._open.update(opened)
            self.transport.submit([request for request, _ in requests])

    def stream(self, request: Request) -> Stream:
        """Queue a request and return the stream of its updates."""
        stream = Stream()
        self.submit([(request, stream.put)])
        return stream

    def abort(self, request_id: str) -> None:
        """Ends a request; the last that is heard of it is an update with finish_reason abort."""
        with self._door:
            ended = self._open.pop(request_id, None)
            if ended is None:
                return
            self.transport.abort(request_id)
        last = TokenUpdate([], None, "abort", None, ended.metrics.copy())
        _hand_out([(ended, last)])

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes, those in host memory too, before requests submitted later.

        Running requests keep their pages.
        """
        self.transport.reset_prefix_cache()

    def stats(self) -> Stats:
        """A copy of the counters; histogram lists are handed over and start anew."""
        return self.transport.stats()

    def _post_of(self, loop: asyncio.AbstractEventLoop) -> _Post:
        """Return the one post of an event loop; the posts of closed loops are dropped."""
        if loop not in self._posts:
            self._posts = {one: post for one, post in self._posts.items() if not one.is_closed()}
            self._posts[loop] = _Post(loop)
        return self._posts[loop]

    def _dead(self) -> EngineDeadError:
        return EngineDeadError(f"the engine has stopped: {self._ended}. {self._remedy}")

    def _deliver(self, news: Sequence[Delivery]) -> None:
        """What came of requests, to those that are still open."""
        heard: list[tuple[_Open, Update]] = []
        with self._door:
            for request_id, item in news:
                opened = self._open.get(request_id)
                if opened is None:
                    continue
                if isinstance(item, Exception) or item.finish_reason is not None:
                    del self._open[request_id]
                else:
                    opened.is_final = True
                    opened.metrics = item.metrics
                heard.append((opened, item))
        _hand_out(heard)

    def _lost(self, forget: Callable[[], None]) -> int:
        """The engine is gone: what had begun to answer ends with an error, all else waits again.

        It does so once: the request that an engine was lost by may be among them.
        """
        with self._door:
            forget()
            ended = [opened for opened in self._open.values() if opened.is_final]
            for opened in ended:
                del self._open[opened.request.id]
            for opened in self._open.values():
                opened.is_final = True
            self.transport.submit([opened.request for opened in self._open.values()])
        _hand_out([(opened, _restarted(opened)) for opened in ended])
        return len(ended)

    def _close(self, why: str, by_itself: bool) -> None:
        """Ends every request, those that were not even taken among them."""
        with self._door:
            self._ended = why
            left = list(self._open.values())
            self._open.clear()
        _hand_out([(opened, self._dead()) for opened in left])
        if by_itself and self.on_end is not None:
            self.on_end(why)


def _restarted(opened: _Open) -> TokenUpdate:
    return TokenUpdate([], None, "error", None, opened.metrics.copy(), error=ENGINE_RESTARTED)


def _hand_out(news: Sequence[tuple[_Open, Update]]) -> None:
    """Wakes each event loop once."""
    by_post: dict[_Post | Inbox, list[tuple[_Open, Update]]] = defaultdict(list)
    for opened, item in news:
        by_post[opened.post].append((opened, item))
    for post, items in by_post.items():
        post.put(items)
