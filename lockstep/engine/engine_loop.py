"""Loop that runs an engine: it takes commands and delivers the updates of every step."""

import gc
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from lockstep.cache.block_log import BlockEvent
from lockstep.engine.engine import Engine
from lockstep.engine.token_update import TokenUpdate, token_update
from lockstep.errors import ComputeError, EngineDeadError, LockstepError, RankError
from lockstep.scheduling.request import Request

log = logging.getLogger("lockstep.engine")


def keep_from_collection() -> None:
    """Exclude all existing objects from garbage collection.

    For a process that serves from now on: one collection of the 220,000 objects of a server stops
    it for 0.14 s (2 cores of an EPYC).
    """
    gc.collect()
    gc.freeze()


Delivery = tuple[str, TokenUpdate | Exception]
"""Id of a request, and its update or the error with which the engine refused or ended it."""
Deliver = Callable[[Sequence[Delivery]], None]
DeliverBlocks = Callable[[Sequence[BlockEvent]], None]


def ignore_blocks(events: Sequence[BlockEvent]) -> None:
    """Ignore events of cached blocks."""


class EngineLoop:
    """Loop around an engine. It owns the engine while run() runs.

    `deliver` is called in the thread of run(), with data that the engine does not share, and so is
    `deliver_blocks`, before a step's updates. `on_idle` is called there before the loop waits for
    commands. submit(), abort() and stop() may be called from any thread; they take effect between
    two steps.

    The engine's audits run while there is no other work. A request that arrives stops the audit
    that runs, which begins again later.
    """

    def __init__(
        self,
        engine: Engine,
        deliver: Deliver,
        deliver_blocks: DeliverBlocks = ignore_blocks,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine = engine
        self._auditor = engine.auditor
        self._auditor.count_records()
        self._deliver = deliver
        self._deliver_blocks = deliver_blocks
        self._on_idle = on_idle
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._sent: dict[str, int] = {}
        self._idle_events: list[threading.Event] = []
        self._began: float | None = None

    @property
    def stalled_for(self) -> float:
        """Return the seconds since the current step began; 0 between steps. Takes no lock."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, which are added between the same two steps.

        The error of a request that the engine refuses is delivered.
        """
        if requests:  # none would stop an audit too
            self._commands.put(lambda: self._add(requests))

    def abort(self, request_id: str) -> None:
        """Abort a request. Nothing is delivered for it afterwards."""
        self._commands.put(lambda: self._abort(request_id))

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes before the next step. Requests submitted later find none."""
        self._commands.put(self.engine.reset_prefix_cache)

    def drop_audits(self) -> None:
        """Drop all audits before the next step."""
        self._commands.put(lambda: self._end_audit(self._auditor.drop_all()))

    def stop_audits(self) -> None:
        """Drop all audits from now on."""
        self._commands.put(lambda: self._end_audit(self._auditor.stop()))

    def notify_when_idle(self) -> threading.Event:
        """Return an event that is set once all commands before this call took effect, no audit is
        left and no step is in flight, or another request keeps the engine busy."""
        idle = threading.Event()
        self._commands.put(lambda: self._idle_events.append(idle))
        return idle

    def stop(self) -> None:
        """Make run() return after the current step."""
        self._commands.put(None)

    def run(self) -> str | None:
        """Serve until stop(), or until the engine cannot go on; then return the reason.

        After a step that raises, its requests go on from their tokens.
        """
        executor = self.engine.executor
        try:
            executor.call_on_failure(self._end_by_failure)
            self._serve()
        except EngineDeadError as error:
            # The message names a lost rank. Only an error of another kind needs its traceback.
            is_named = error.__cause__ is None or isinstance(error.__cause__, LockstepError)
            log.error("the engine cannot go on: %s", error, exc_info=not is_named)
            return str(error)
        except BaseException:
            log.exception("the engine cannot go on")
            return "it failed outside of a step"
        finally:
            executor.call_on_failure(None)  # the executor must not keep the engine alive
            self._notify_idle()
        return None

    def _end_by_failure(self, why: str) -> None:
        """Make run() return the failure of a worker, which an idle engine would not notice."""

        def fail() -> None:
            raise EngineDeadError(why)

        self._commands.put(fail)

    def _serve(self) -> None:
        while self._take_commands():
            requests = self._auditor.take(self._step())
            updated = [request for request in requests if self._has_update(request)]
            self._emit_blocks()  # whoever reads an answer may rely on its blocks being published
            # Clients of finished requests wait for nothing else, so they are served first.
            self._emit([request for request in updated if request.finish_reason is not None])
            self._emit([request for request in updated if request.finish_reason is None])

    def _emit_blocks(self) -> None:
        """Deliver the events of cached blocks, if there are any."""
        events = self.engine.drain_blocks()
        if events:
            self._deliver_blocks(events)

    def _emit(self, requests: Sequence[Request]) -> None:
        """Deliver the updates of some requests of a step."""
        if requests:
            self._deliver([self._update_of(request) for request in requests])

    def _take_commands(self) -> bool:
        """Run queued commands; block while there is no work. Returns False once stopped.

        Delivers the events of blocks that a command or a failed step caused.
        """
        while True:
            self._emit_blocks()
            is_idle = not (self.engine.has_work() or self._begin_audit())
            if is_idle or self._sent:
                self._notify_idle()
            if is_idle:
                self._on_idle()
            try:
                command = self._commands.get(block=is_idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _notify_idle(self) -> None:
        while self._idle_events:
            self._idle_events.pop().set()

    def _begin_audit(self) -> bool:
        """Add the next audit to the idle engine; return whether one runs.

        An audit that the engine refuses is dropped.
        """
        while (request := self._auditor.begin()) is not None:
            try:
                self.engine.add(request)
            except Exception:  # an audit never ends the engine
                log.exception("the engine refused %s", request.id)
                self._auditor.drop()
            else:
                return True
        return False

    def _end_audit(self, request: Request | None) -> None:
        """Abort the request of an audit, if one ran."""
        if request is not None:
            self.engine.abort(request.id)

    def _add(self, requests: Sequence[Request]) -> None:
        """Add requests to the engine, which run before the audits."""
        self._end_audit(self._auditor.pause())
        for request in requests:
            try:
                self.engine.add(request)
            except Exception as error:  # a request that add() refuses has changed nothing
                self._deliver([(request.id, error)])
            else:
                self._sent[request.id] = request.num_resumed

    def _abort(self, request_id: str) -> None:
        self.engine.abort(request_id)
        self._sent.pop(request_id, None)

    def _step(self) -> list[Request]:
        """Run one iteration and return the requests that it updated. Recover where it fails."""
        self._began = time.monotonic()
        try:
            return self.engine.step()
        except Exception as error:
            self._recover(error)
            return []
        finally:
            self._began = None

    def _recover(self, error: Exception) -> None:
        """Recover from the exception of a step, which is being handled."""
        # An audit does not go on, and runs alone.
        begun = [] if self.engine.scheduler.is_auditing else self.engine.scheduler.begun()
        names = ", ".join(begun) or "none"
        text = "a step failed; its requests go on from their tokens: %s"
        if isinstance(error, RankError):
            # The traceback of this rank ends at the exchange in which it waited for the other one.
            log.error(f"{text}; %s", names, error)
        else:
            log.exception(text, names)
        ended = self.engine.recover()
        for request in ended:
            log.error("request %s ends: %s", request.id, request.error)
            del self._sent[request.id]
        if ended:
            self._deliver([(request.id, ComputeError(request.error)) for request in ended])

    def _has_update(self, request: Request) -> bool:
        """Return whether a request has tokens that were not sent, or has ended."""
        is_new = len(request.output_token_ids) > self._sent[request.id]
        return is_new or request.finish_reason is not None

    def _update_of(self, request: Request) -> Delivery:
        """Return the new tokens of a request since its last update."""
        num_sent = self._sent[request.id]
        update = token_update(request, num_sent)
        if request.finish_reason is None:
            self._sent[request.id] = num_sent + len(update.token_ids)
        else:
            del self._sent[request.id]
        return request.id, update
