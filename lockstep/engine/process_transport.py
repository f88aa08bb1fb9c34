"""Transport to an engine in a separate process, which is watched and restarted when lost."""

import logging
import os
import queue
import signal
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection

from lockstep.child_processes import blocked_signals
from lockstep.engine.async_engine import SHUT_DOWN, Loss, Receiver
from lockstep.engine.engine_process import (
    HEARTBEAT_SECONDS,
    MakeEngine,
    run_engine,
)
from lockstep.engine.messages import (
    Abort,
    Began,
    ChangedBlocks,
    Command,
    Compiled,
    Ended,
    Failed,
    Heartbeat,
    Idle,
    Progress,
    Ready,
    Report,
    ResetPrefixCache,
    Stop,
    StopAudits,
    Submit,
    Updates,
)
from lockstep.engine.stats import Stats
from lockstep.engine.token_update import TokenUpdate
from lockstep.errors import EngineDeadError, RequestError
from lockstep.scheduling.request import MAX_FAILED_REQUESTS, Request

log = logging.getLogger("lockstep.engine")

MAX_RESTARTS = 3
RESTART_WINDOW = 600.0
"""Seconds in which MAX_RESTARTS restarts may happen of engines that were lost before any update,
or while they had nothing to do. A restart does not cure a fault that repeats sooner. After so many
engines that were lost in audits, requests are not audited any more.
"""
STOP_SECONDS = 30.0
"""Seconds that stop() waits for the current step before it kills the process."""
REAP_SECONDS = 10.0
"""Seconds that a killed process may take to end."""

ShowProgress = Callable[[str, int, int], None]


def limit_receiving(connection: Connection, seconds: float) -> None:
    """Make recv() raise OSError where a message that has begun does not go on for `seconds`.

    A process that is stopped while it writes a message would block the reader for ever.
    """
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        # The option belongs to the socket, not to the descriptor. It is a struct timeval.
        timeval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)


class _Child:
    """Process of one engine.

    message_seconds: a message that begins and does not go on for that long ends the reports.
    """

    def __init__(self, make: MakeEngine, message_seconds: float) -> None:
        context = get_context("spawn")
        self.connection, child_end = context.Pipe()
        limit_receiving(self.connection, message_seconds)
        self.process = context.Process(
            target=run_engine, args=(child_end, make), name="lockstep-engine"
        )
        try:
            with blocked_signals():
                self.process.start()
        except BaseException:  # an interrupt, which blocked_signals() delayed until after start()
            if self.process.pid is not None:
                self.reap()
            raise
        child_end.close()

    def reports(self, interval: float | None) -> Iterator[Report | None]:
        """Yield reports until the process ends, and None after `interval` seconds without one."""
        while True:
            try:
                yield self.connection.recv() if self.connection.poll(interval) else None
            except (EOFError, OSError):
                return

    def kill(self) -> None:
        """Kill the process."""
        self.process.kill()

    def reap(self) -> str:
        """Kill and reap the process, and return how it ended."""
        self.process.join(HEARTBEAT_SECONDS)
        self.kill()
        self.process.join(REAP_SECONDS)
        code = self.process.exitcode
        if code is None:
            return "its process does not end"
        if code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process ended with status {code}"


class _Outbox:
    """Thread that sends commands in order, and drops them once the engine has ended.

    refuse: called in this thread with the id of a request that cannot be sent, and the error.
    """

    def __init__(
        self,
        connection: Connection,
        messages: "queue.SimpleQueue[Command | None]",
        refuse: Callable[[str, Exception], None],
    ) -> None:
        self._connection = connection
        self._messages = messages
        self._refuse = refuse
        self._thread = threading.Thread(target=self._run, name="lockstep-outbox", daemon=True)
        self._thread.start()

    def put(self, message: Command) -> None:
        """Queue a command."""
        self._messages.put(message)

    def close(self, seconds: float | None = None) -> None:
        """Wait until all commands are sent, at most `seconds`."""
        self._messages.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        is_open = True
        while (message := self._messages.get()) is not None:
            try:
                if is_open:
                    self._send(message)
            except OSError:  # the engine has ended: drop what follows, so that close() returns
                is_open = False

    def _send(self, message: Command) -> None:
        """Send a command. Refuse the requests of it that cannot be pickled."""
        try:
            self._connection.send(message)
        except OSError:
            raise
        except Exception as error:
            # Only a request has data of users. Without this thread, all requests would wait.
            assert isinstance(message, Submit)
            if len(message.requests) == 1:
                self._refuse(message.requests[0].id, error)
                return
            for request in message.requests:
                self._send(Submit((request,)))


class ProcessTransport:
    """Transport to an engine's process and its successors. See Transport.

    The constructor starts the process and returns when the engine is ready; it raises what the
    engine raised. make: builds the engine; it is pickled and called in the process. show: called
    with the progress of the startup. step_seconds: a process whose step takes longer, or that sends
    no heartbeat for that long, is killed and restarted; the startup has no limit. `facts` and
    `rates`: data of the engine's executor.
    """

    def __init__(
        self,
        make: MakeEngine,
        step_seconds: float,
        show: ShowProgress = lambda what, done, of: None,
    ) -> None:
        self._make = make
        self._step_seconds = step_seconds
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._counting = threading.Lock()
        self._past_stats = Stats()
        self._stats = Stats()
        self._last_report = time.monotonic()
        self._reported_stall = 0.0
        self._stopping = False
        self._has_served = False
        self._begun_ids: Sequence[str] = ()  # latest requests that the engine began, while it works
        self._restart_times: deque[float] = deque(maxlen=MAX_RESTARTS)
        self._audit_losses: deque[float] = deque(maxlen=MAX_RESTARTS)
        self._are_audits_stopped = False
        self._failed_requests = 0
        self._receiver: Receiver | None = None
        self._thread = threading.Thread(target=self._supervise, name="lockstep-engine", daemon=True)
        self.restarting = False
        self._child = _Child(make, step_seconds)
        try:
            ready = self._until_ready(show)
        except BaseException:
            self._child.kill()
            self._child.reap()
            raise
        self.facts = ready.facts
        self.rates = ready.rates

    @property
    def pid(self) -> int | None:
        """Return the process id; None before the process has one."""
        return self._child.process.pid

    @property
    def stalled_for(self) -> float:
        """See Transport; missing heartbeats count too."""
        if self.restarting:
            return 0.0
        silence = time.monotonic() - self._last_report
        return self._reported_stall + (silence if silence > 2 * HEARTBEAT_SECONDS else 0.0)

    def start(self, receiver: Receiver) -> None:
        """See Transport."""
        self._receiver = receiver
        self._thread.start()

    def stop(self) -> None:
        """See Transport."""
        self._stopping = True
        self._commands.put(Stop())
        if self.restarting or self._receiver is None:
            self._child.kill()
        if self._receiver is None:
            self._child.reap()
            return
        try:
            self._thread.join(STOP_SECONDS)
        finally:  # an interrupt does not wait for the step that runs
            if self._thread.is_alive():
                self._child.kill()
                self._thread.join()

    def submit(self, requests: Sequence[Request]) -> None:
        """See Transport."""
        self._commands.put(Submit.of(requests))

    def abort(self, request_id: str) -> None:
        """See Transport."""
        self._commands.put(Abort(request_id))

    def reset_prefix_cache(self) -> None:
        """See Transport."""
        self._commands.put(ResetPrefixCache())

    def stats(self) -> Stats:
        """See Transport; counters as of the last heartbeat, summed over all engines."""
        with self._counting:
            stats = self._stats.after(self._past_stats)
            self._stats.drain()
            self._past_stats.drain()
            return stats

    def _until_ready(self, show: ShowProgress) -> Ready:
        """Wait for Ready. Raises the startup's error, or EngineDeadError where the process
        ended.
        """
        for report in self._child.reports(None):
            if isinstance(report, Progress):
                show(report.what, report.done, report.total)
            elif isinstance(report, Failed):
                raise report.error
            elif isinstance(report, Ready):
                self._last_report = time.monotonic()
                return report
        raise EngineDeadError(f"the engine did not start: {self._child.reap()}.")

    def _supervise(self) -> None:
        """Serve until no engine follows, and end the requests."""
        assert self._receiver is not None
        try:
            fault = self._serve_with_restarts()
        except BaseException:  # else all requests would wait for ever
            log.exception("the engine's reports cannot be handled")
            fault = "its reports could not be handled"
            self._child.reap()
        self._receiver.ended(SHUT_DOWN if self._stopping else fault, not self._stopping)

    def _serve_with_restarts(self) -> str:
        """Serve with one engine after the other; return how the last one ended."""
        assert self._receiver is not None
        fault = self._serve()
        while not self._stopping:
            self.restarting = True
            loss = self._receiver.lost(self._drop_commands)
            if not self._may_restart(loss):
                break
            log.error("the engine process ended (%s); restarting it", fault)
            fault = self._restart(loss)
        return fault

    def _serve(self) -> str:
        """Deliver an engine's reports until it stops or is lost, and return the reason."""
        child = self._child
        outbox = _Outbox(child.connection, self._commands, self._refuse)
        if self._stopping:  # _drop_commands() may have dropped the queued Stop
            outbox.put(Stop())
        fault = None
        for report in child.reports(HEARTBEAT_SECONDS):
            if report is not None:
                fault = self._take(report) or fault
            if self.stalled_for > self._step_seconds:
                fault = f"a step did not end within {self._step_seconds:g} s"
                child.kill()
                break
        how = child.reap()
        outbox.close(REAP_SECONDS)
        return fault or how

    def _refuse(self, request_id: str, error: Exception) -> None:
        """End a request that cannot be sent to the engine's process."""
        assert self._receiver is not None
        refusal = RequestError(
            f"the request cannot be sent to the engine: {error}. Write its parameters as numbers, "
            "texts, lists and dicts."
        )
        self._receiver.deliver([(request_id, refusal)])

    def _take(self, report: Report) -> str | None:
        """Handle a report; return why the engine cannot go on, if the report says so."""
        assert self._receiver is not None
        self._last_report = time.monotonic()
        if isinstance(report, Updates):
            self._reported_stall = 0.0
            self._has_served = self._has_served or any(
                isinstance(item, TokenUpdate) for _, item in report.updates
            )
            self._receiver.deliver(report.updates)
        elif isinstance(report, ChangedBlocks):
            self._receiver.blocks(report.events)
        elif isinstance(report, Began):
            self._begun_ids = report.ids
            self._receiver.begun(report.ids)
        elif isinstance(report, Idle):
            self._begun_ids = ()
        elif isinstance(report, Compiled):
            self._receiver.compiled(report.ids)
        elif isinstance(report, Heartbeat):
            self._reported_stall = report.stalled_for
            with self._counting:
                self._stats = report.stats.after(self._stats.only_histograms())
        return report.why if isinstance(report, Ended) else None

    def _may_restart(self, loss: Loss) -> bool:
        """Return whether an engine may follow the lost one; count the restart if it must.

        Where the lost engine had updates for requests, and requests go on or an audit ran, its
        successor continues a work that gets done. A loss that ends a request is explained by it,
        with those before it.
        """
        had_requests = loss.num_open + loss.num_ended > 0
        may_be_audit = bool(self._begun_ids) and not self._are_audits_stopped
        if self._has_served and (had_requests or may_be_audit):
            if not had_requests:
                self._count_audit_loss()
            self._restart_times.clear()
            self._failed_requests = 0
            return True
        if loss.num_ended:
            self._failed_requests += loss.num_ended
            if self._failed_requests > MAX_FAILED_REQUESTS:
                log.error("%d requests in a row ended engines: no more", self._failed_requests)
                return False
            self._restart_times.clear()
            return True
        now = time.monotonic()
        if _are_too_many(self._restart_times, now):
            log.error("%d restarts in %g s: no more", MAX_RESTARTS, RESTART_WINDOW)
            return False
        self._restart_times.append(now)
        return True

    def _count_audit_loss(self) -> None:
        """Count an engine that was lost in an audit; stop audits where that repeats."""
        now = time.monotonic()
        self._audit_losses.append(now)
        if _are_too_many(self._audit_losses, now):
            log.error(
                "%d engines in %g s were lost in audits, the last one in %s: no more audits",
                *(MAX_RESTARTS, RESTART_WINDOW, ", ".join(self._begun_ids)),
            )
            self._are_audits_stopped = True
            self._commands.put(StopAudits())

    def _restart(self, loss: Loss) -> str:
        """Start a successor of a lost engine and serve; return how it ended."""
        with self._counting:
            before = self._stats.after(self._past_stats).ended()
            before.requests_success_total["error"] += loss.num_ended
            self._past_stats = replace(
                before,
                restarts_total=before.restarts_total + 1,
                resumed_total=before.resumed_total + loss.num_resumed,
            )
            self._stats = Stats()
        self._has_served = False
        self._begun_ids = ()
        try:
            self._child = _Child(self._make, self._step_seconds)
            self._until_ready(lambda what, done, of: None)
        except Exception as error:  # of a lack of memory or descriptors, too
            self._child.reap()
            return f"it could not be started again: {error}"
        self._reported_stall = 0.0
        self.restarting = False
        return self._serve()

    def _drop_commands(self) -> None:
        """Drop the commands queued for the lost engine."""
        self._commands = queue.SimpleQueue()
        if self._are_audits_stopped:
            self._commands.put(StopAudits())


def _are_too_many(times: deque[float], now: float) -> bool:
    """Return whether the latest MAX_RESTARTS times are all within RESTART_WINDOW."""
    return len(times) == MAX_RESTARTS and now - times[0] < RESTART_WINDOW
