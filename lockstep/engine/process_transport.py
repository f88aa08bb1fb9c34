"""An engine in a process of its own: started, watched, and started again when it is lost."""

import contextlib
import logging
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection

from lockstep.engine.async_engine import SHUT_DOWN, Receiver
from lockstep.engine.engine_process import (
    IGNORED_SIGNALS,
    PULSE_SECONDS,
    MakeEngine,
    run_engine,
)
from lockstep.engine.messages import (
    Abort,
    Command,
    Ended,
    Failed,
    Progress,
    Pulse,
    Ready,
    Report,
    ResetPrefixCache,
    Stop,
    Submit,
    Updates,
)
from lockstep.engine.stats import Stats
from lockstep.errors import EngineDeadError
from lockstep.scheduling.request import Request

log = logging.getLogger("lockstep.engine")

MOST_RESTARTS = 3
RESTART_WINDOW = 600.0
"""Seconds in which that many restarts may be: a fault that comes again soon is not cured by one."""
STOP_SECONDS = 30.0
"""How long stop() waits for the step that runs, before it kills the process."""
REAP_SECONDS = 10.0
"""How long a killed process may take to be gone."""

ShowProgress = Callable[[str, int, int], None]


class _Child:
    """One engine's process, from its start to its end."""

    def __init__(self, make: MakeEngine) -> None:
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=run_engine, args=(theirs, make), name="lockstep-engine"
        )
        try:
            with _blocked_signals():
                self.process.start()
        except BaseException:  # an interrupt that waited for the start to be over
            if self.process.pid is not None:
                self.bury()
            raise
        theirs.close()

    def reports(self, every: float | None) -> Iterator[Report | None]:
        """What it tells, until it is gone; None whenever nothing came for so many seconds."""
        while True:
            try:
                yield self.connection.recv() if self.connection.poll(every) else None
            except (EOFError, OSError):
                return

    def kill(self) -> None:
        """Ends it at once, whatever it is doing."""
        self.process.kill()

    def bury(self) -> str:
        """Ends what is left of it; says how it ended."""
        self.process.join(PULSE_SECONDS)
        self.kill()
        self.process.join(REAP_SECONDS)
        code = self.process.exitcode
        if code is None:
            return "its process does not end"
        if code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process ended with status {code}"


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    """What is started in here does not see them, until it says what to do with them."""
    resource_tracker.ensure_running()  # multiprocessing starts it first, and unblocks them then
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Outbox:
    """Sends messages from a thread of its own, in their order. Where nobody reads any more they are
    dropped."""

    def __init__(
        self, connection: Connection, messages: "queue.SimpleQueue[Command | None]"
    ) -> None:
        self._connection = connection
        self._messages = messages
        self._thread = threading.Thread(target=self._send, name="lockstep-outbox", daemon=True)
        self._thread.start()

    def put(self, message: Command) -> None:
        """Queues a message."""
        self._messages.put(message)

    def close(self, seconds: float | None = None) -> None:
        """Returns when all was sent, or so many seconds have passed."""
        self._messages.put(None)
        self._thread.join(seconds)

    def _send(self) -> None:
        reads = True
        while (message := self._messages.get()) is not None:
            try:
                if reads:
                    self._connection.send(message)
            except OSError:
                reads = False


class ProcessTransport:
    """Owns an engine's process, and the one that follows it. See Transport.

    Making it starts the process and returns when the engine stands; it raises what the engine
    raised. `make` is pickled. show: is told how far the start is. step_seconds: a step that runs
    longer, or a process that gives no sign of life for so long, is ended and started again; the
    start itself is not bounded. `facts`: those of the engine; `rates`: of its device, if known.
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
        self._gone = Stats()
        self._stats = Stats()
        self._heard = time.monotonic()
        self._busy_for = 0.0
        self._stopping = False
        self._starts: deque[float] = deque(maxlen=MOST_RESTARTS)
        self._receiver: Receiver | None = None
        self._thread = threading.Thread(target=self._supervise, name="lockstep-engine", daemon=True)
        self.restarting = False
        self._child = _Child(make)
        try:
            ready = self._until_ready(show)
        except BaseException:
            self._child.kill()
            self._child.bury()
            raise
        self.facts = ready.facts
        self.rates = ready.rates

    @property
    def pid(self) -> int | None:
        """The process's number; None before it has one."""
        return self._child.process.pid

    @property
    def stalled_for(self) -> float:
        """See Transport; a silence longer than the pulses' counts too."""
        if self.restarting:
            return 0.0
        silence = time.monotonic() - self._heard
        return self._busy_for + (silence if silence > 2 * PULSE_SECONDS else 0.0)

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
            self._child.bury()
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
        """See Transport; as of the last pulse, all engines together."""
        with self._counting:
            found = self._stats.after(self._gone)
            self._stats.drain()
            self._gone.drain()
            return found

    def _until_ready(self, show: ShowProgress) -> Ready:
        """Raises what the start raised, or EngineDeadError where the process ended by itself."""
        for report in self._child.reports(None):
            if isinstance(report, Progress):
                show(report.what, report.done, report.of)
            elif isinstance(report, Failed):
                raise report.error
            elif isinstance(report, Ready):
                self._heard = time.monotonic()
                return report
        raise EngineDeadError(f"the engine did not start: {self._child.bury()}.")

    def _supervise(self) -> None:
        """Serves by one engine after the other."""
        assert self._receiver is not None
        fault = self._serve()
        while not self._stopping and self._may_restart():
            fault = self._restart(fault)
        self._receiver.ended(SHUT_DOWN if self._stopping else fault, not self._stopping)

    def _serve(self) -> str:
        """Hands on what the engine tells until it is lost, or has stopped; says how that came."""
        child = self._child
        outbox = _Outbox(child.connection, self._commands)
        if self._stopping:  # the queue that held the word may be gone
            outbox.put(Stop())
        fault = None
        for report in child.reports(PULSE_SECONDS):
            if report is not None:
                fault = self._take(report) or fault
            if self.stalled_for > self._step_seconds:
                fault = f"a step did not end within {self._step_seconds:g} s"
                child.kill()
                break
        how = child.bury()
        outbox.close(REAP_SECONDS)
        return fault or how

    def _take(self, report: Report) -> str | None:
        """Hands a report on; why the engine cannot go on, if that is what it says."""
        assert self._receiver is not None
        self._heard = time.monotonic()
        if isinstance(report, Updates):
            self._busy_for = 0.0
            self._receiver.deliver(report.news)
        elif isinstance(report, Pulse):
            self._busy_for = report.busy_for
            with self._counting:
                self._stats = report.stats.after(self._stats.only_histograms())
        return report.why if isinstance(report, Ended) else None

    def _may_restart(self) -> bool:
        """Whether the bound leaves room for another start; counts it."""
        now = time.monotonic()
        if len(self._starts) == MOST_RESTARTS and now - self._starts[0] < RESTART_WINDOW:
            log.error("%d restarts in %g s: no more", MOST_RESTARTS, RESTART_WINDOW)
            return False
        self._starts.append(now)
        return True

    def _restart(self, fault: str) -> str:
        """Starts an engine in the place of one that is lost, and serves; how that one ended."""
        assert self._receiver is not None
        log.error("the engine is lost (%s) and started again", fault)
        self.restarting = True
        ended = self._receiver.lost(self._forget)
        with self._counting:
            before = self._stats.after(self._gone)
            before.requests_success_total["error"] += ended
            self._gone = replace(before, restarts_total=before.restarts_total + 1)
            self._stats = Stats()
        self._child = _Child(self._make)
        try:
            self._until_ready(lambda what, done, of: None)
        except Exception as error:
            self._child.bury()
            return f"it could not be started again: {error}"
        self._busy_for = 0.0
        self.restarting = False
        return self._serve()

    def _forget(self) -> None:
        """Drops what the lost engine was asked for."""
        self._commands = queue.SimpleQueue()
