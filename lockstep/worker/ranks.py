"""Ranks 1 and up of a model: the process of rank 0 starts, watches and ends them."""

import contextlib
import logging
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from lockstep.child_processes import on_end
from lockstep.config import EngineConfig, Plan
from lockstep.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    LockstepError,
    RankError,
)
from lockstep.kernels.exchange import ALONE, RankGroup
from lockstep.progress import Progress
from lockstep.worker.agreement import check_identity, identity_of
from lockstep.worker.hooks import CheckHooks
from lockstep.worker.local_ranks import LocalRanks
from lockstep.worker.node_link import LOCALHOST, NodeListener, RemoteNode
from lockstep.worker.plain_data import decode_plain
from lockstep.worker.rank_process import (
    Beat,
    Call,
    Failed,
    Idle,
    Joined,
    Loaded,
    Message,
    RankSettings,
    Ready,
    Report,
    Stop,
    choose_device,
    connect_store,
    make_group,
)
from lockstep.worker.startup import MemoryFit

log = logging.getLogger("lockstep.engine")

SILENT_SECONDS = 10.0
"""Seconds without a heartbeat after which a rank or a node counts as hung."""
STARTING_SILENT_SECONDS = 60.0
"""Seconds without a heartbeat after which a node counts as hung before all ranks are ready: loading
may keep a process busy."""
WATCH_SECONDS = 0.5
"""Interval at which heartbeats are checked, and sent to other nodes."""
STARTING_WATCH_SECONDS = 0.02
"""Interval at which joined ranks and nodes are looked for before the first has joined. A start
waits for up to one interval."""
IDLE_SECONDS = 10.0
"""Seconds that ranks have to leave an engine and to free its memory."""
CAUSE_SECONDS = 5.0
"""Seconds that a failed exchange waits for the report of the rank that caused it."""

REFUSALS: dict[str, type[LockstepError]] = {
    kind.__name__: kind for kind in (ConfigError, CheckpointError, CapacityError)
}
"""Errors that all ranks raise at their start. The first rank may be the last of them, and its
caller must get the same error in any order."""

OnFailure = Callable[[str], None]


class RankHost(Protocol):
    """Node that runs some of the ranks: this one with its child processes, or another one.

    ranks: their numbers. node_name: for messages, "" on this node. connections: to wait for.
    silent_for: seconds since the node has sent anything.
    """

    ranks: range
    node_name: str

    @property
    def connections(self) -> Sequence[Connection]: ...

    @property
    def silent_for(self) -> float: ...

    def read(self, connection: Connection) -> Sequence[tuple[int, Report]]:
        """Return the reports (rank, report) that a connection has. The end of a rank is Failed."""
        ...

    def send(self, data: bytes, check: Callable[[], None]) -> None:
        """Send a pickled message to the ranks. check: raises where a rank has ended.

        Raises OSError where the host does not read.
        """
        ...

    def beat(self) -> None:
        """Show that the head lives."""
        ...

    def kill(self) -> None:
        """End the ranks at once. May be called from any thread, and more than once."""
        ...

    def close(self) -> None:
        """Wait for the end of the ranks, and free connections and memory."""
        ...


@dataclass
class RankWatch:
    """State of the other ranks, by their reports.

    hosts: of the ranks; more may be added. failure: which rank ended and why, once one has. kind:
    class of the failure's error.
    reports: of each rank, heartbeats left out. serving: heartbeats must arrive; loading has no
    limit. ending: end() was called. closing: reports count no more. thread: runs watch(). group: of
    all ranks. on_failure: called once with the failure, in the thread that sees it.
    """

    size: int
    hosts: list[RankHost]
    failure: str | None = None
    kind: type[LockstepError] = RankError
    failed: threading.Event = field(default_factory=threading.Event)
    reports: dict[int, list[Report]] = field(default_factory=dict)
    reported: threading.Condition = field(default_factory=threading.Condition)
    serving: bool = False
    ending: bool = False
    closing: bool = False
    thread: threading.Thread | None = None
    group: RankGroup = ALONE
    on_failure: OnFailure | None = None

    def fail(self, rank: int, why: str, kind: type[LockstepError] = RankError) -> None:
        """Record the first failure and kill every rank: exchanges with them then fail too."""
        if self.closing:
            return
        with self.reported:  # call_on_failure() looks at both under the same lock
            is_first = self.failure is None
            if is_first:
                self.kind = kind
                self.failure = f"{self.name(rank)} (tensor_parallel_size) failed: {why}"
                self.failed.set()
                self.reported.notify_all()
            on_failure = self.on_failure if is_first else None
        for host in self.hosts:
            host.kill()
        self.group.close()
        if on_failure is not None:
            on_failure(self.failure or "")

    def name(self, rank: int) -> str:
        """Return the name of a rank, with its node's, for messages."""
        nodes = [host.node_name for host in self.hosts if rank in host.ranks]
        return f"rank {rank} of {self.size}{''.join(nodes)}"

    def check(self) -> None:
        """Raise RankError, or one of REFUSALS, if a rank has failed."""
        if self.failure is not None:
            raise self.kind(self.failure)

    def watch(self) -> None:
        """Read reports, and watch ended and silent ranks, until one fails or close()."""
        last_report: dict[int, float] = {}
        while self.failure is None and not self.closing and not self._idle():
            for host in self.hosts:
                host.beat()
            try:
                reports = self._read()
            except (OSError, ValueError):  # close() has closed the connections
                return
            now = time.monotonic()
            for rank, report in reports:
                last_report[rank] = now
                self._take(rank, report)
            # Nodes first: the ranks of a silent node are silent too.
            for host in self.hosts:
                limit = SILENT_SECONDS if self.serving else STARTING_SILENT_SECONDS
                if host.silent_for > limit:
                    why = f"its node has not answered for {host.silent_for:.0f} s"
                    self.fail(host.ranks[0], why)
            for rank, last in last_report.items():
                if self.serving and now - last > SILENT_SECONDS:
                    self.fail(rank, f"it has not answered for {now - last:.0f} s")

    def _read(self) -> list[tuple[int, Report]]:
        """Wait for reports, at most for WATCH_SECONDS."""
        hosts = {connection: host for host in self.hosts for connection in host.connections}
        seconds = WATCH_SECONDS if hosts else STARTING_WATCH_SECONDS
        reports: list[tuple[int, Report]] = []
        for connection in wait(list(hosts), seconds):
            assert isinstance(connection, Connection)
            reports += hosts[connection].read(connection)
        return reports

    def _take(self, rank: int, report: Report) -> None:
        if isinstance(report, Failed):
            kind = RankError if self.serving else REFUSALS.get(report.kind, RankError)
            self.fail(rank, f"{report.error}\n{report.details}".strip(), kind)
        elif not isinstance(report, Beat):
            with self.reported:
                self.reports.setdefault(rank, []).append(report)
                self.reported.notify_all()

    def send(self, data: bytes) -> None:
        """Send a pickled message to all ranks. Raises OSError, and as check() does."""
        for host in self.hosts:
            host.send(data, self.check)

    def _idle(self) -> bool:
        """Return whether all ranks wait for another engine."""
        idle = (any(isinstance(r, Idle) for r in received) for received in self.reports.values())
        return sum(idle) == self.size - 1

    def _release(self) -> bool:
        """Let all ranks leave this engine and wait for another one, if there is an open pool.

        Returns whether the pool has them. end() ends the others.
        """
        host = self.hosts[0]
        if not isinstance(host, LocalRanks) or host.pool is None or not host.pool.is_open:
            return False
        # Garbage collection may end an engine in any thread, this one included.
        if not self.serving or self.thread in (None, threading.current_thread()):
            return False
        try:
            self.check()
            self.send(pickle.dumps(Stop(stays=True)))
        except (OSError, LockstepError):
            return False
        self.group.close()
        with self.reported:
            self.reported.wait_for(lambda: self.failure is not None or self._idle(), IDLE_SECONDS)
        if not self._idle():
            return False
        self.thread.join()  # the next engine's thread reads the same connections
        host.release()
        return True

    def end(self, why: str = "") -> None:
        """End all ranks and free what they take. why: the error for which they end."""
        if self.ending:
            return
        self.ending = True
        if not why and self._release():
            self.closing = True
            self.hosts[0].close()
            return
        self.closing = True
        for host in self.hosts:
            # After a failure the connections are gone, and a node waits for the next engine.
            if isinstance(host, RemoteNode) and self.failure is None:
                host.end(why)
        with contextlib.suppress(OSError, LockstepError):
            self.hosts[0].send(pickle.dumps(Stop()), self.check)
        self.group.close()
        for host in self.hosts:
            host.close()


class PeerRanks:
    """Ranks 1 to size - 1 of a model, one process each. `group` joins this process to them.

    Call order: the constructor waits for the other nodes and starts the ranks of this one, fits()
    waits until they are loaded, start() until they are ready; then send(). A rank that ends, raises
    or hangs is a RankError in all of these; one that refuses its settings raises one of REFUSALS.
    """

    def __init__(self, config: EngineConfig, hooks: CheckHooks, progress: Progress) -> None:
        self.config = config
        self._has_nodes = config.nnodes > 1
        seconds = config.distributed_timeout_seconds
        pool = None if self._has_nodes else hooks.rank_pool
        local = LocalRanks(range(1, len(config.node_ranks)), pool)
        self._running = RankWatch(config.tensor_parallel_size, [local])
        self._finalizer = on_end(self, self._running.end)
        try:
            choose_device(config, 0)
            store = connect_store(LOCALHOST, 0, config.tensor_parallel_size, seconds, first=True)
            watch = self._running.watch
            thread = threading.Thread(target=watch, name="lockstep-ranks", daemon=True)
            self._running.thread = thread
            thread.start()
            address = self._join_nodes(store.port, progress) if self._has_nodes else None
            local.start(RankSettings(LOCALHOST, store.port, address), config, hooks)
            self._check_identities()
            local.unname()
            self.group = self._running.group = self._join_group(address, store)
        except BaseException as error:
            self._running.end(str(error))
            raise

    def _join_nodes(self, port: int, progress: Progress) -> str:
        """Wait for the other nodes -> the address by which they reach this one.

        port: of the ranks' store. Raises ConfigError or RankError.
        """
        config = self.config
        end = time.monotonic() + config.distributed_timeout_seconds
        with contextlib.closing(NodeListener(config, port)) as listener:
            log.warning("waiting for %d node(s) at port %d", config.nnodes - 1, config.master_port)
            while listener.missing:
                progress("waiting for nodes", config.nnodes - len(listener.missing), config.nnodes)
                node = listener.accept(WATCH_SECONDS)
                self._running.check()
                if node is not None:
                    self._running.hosts.append(node)
                    address = node.link.address
                elif time.monotonic() > end:
                    raise listener.timeout_error()
        return address

    def _check_identities(self) -> None:
        """Wait for all ranks, and raise ConfigError where one differs from this one."""
        identity = identity_of(self.config)
        for rank, joined in enumerate(self._expect(Joined), 1):
            check_identity(identity, joined.identity, self._running.name(rank))

    def _join_group(self, address: str | None, store: Any) -> RankGroup:
        """Join the group of all ranks. Raises RankError if one ends meanwhile.

        The thread that joins goes on then: torch has no way to end it.
        """
        joined: list[RankGroup | BaseException] = []

        def join() -> None:
            try:
                joined.append(make_group(self.config, store, 0, address))
            except BaseException as error:
                joined.append(error)

        thread = threading.Thread(target=join, name="lockstep-join", daemon=True)
        thread.start()
        while thread.is_alive() and self._running.failure is None:
            thread.join(WATCH_SECONDS)
        self._running.check()
        (group,) = joined
        if isinstance(group, BaseException):
            raise group
        return group

    def _expect(self, kind: type[Report]) -> list[Any]:
        """Wait for a report of this kind from every rank. Raises RankError."""
        running = self._running

        def reports() -> dict[int, Report]:
            items = list(running.reports.items())
            return {rank: r for rank, received in items for r in received if isinstance(r, kind)}

        with running.reported:
            running.reported.wait_for(
                lambda: running.failure is not None or len(reports()) == running.size - 1
            )
        running.check()
        return [report for _, report in sorted(reports().items())]

    def call_on_failure(self, function: OnFailure | None) -> None:
        """Call a function once with the failure of a rank, at once or later, in any thread."""
        with self._running.reported:
            self._running.on_failure = function
            failure = self._running.failure
        if failure is not None and function is not None:
            function(failure)

    def fits(self) -> list[MemoryFit]:
        """Return the sizes that fit into each rank's memory."""
        return [loaded.fit for loaded in self._expect(Loaded)]

    def start(self, plan: Plan) -> None:
        """Send the plan: the ranks allocate and warm up, in exchange with this one."""
        self.send(plan)

    def wait_ready(self) -> None:
        """Wait until all ranks serve. From then on a silent rank counts as hung."""
        self._expect(Ready)
        self._running.serving = True

    def send(self, message: Message | Plan) -> None:
        """Broadcast a message. Raises RankError, or ConfigError for a function of the caller's own
        where there are other nodes."""
        self._running.check()
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        if self._has_nodes and isinstance(message, Call):
            decode_plain(data)  # as the ranks of other nodes will: they would end by its error
        try:
            self._running.send(data)
        except OSError as error:
            raise self.cause(error) from error

    def cause(self, error: Exception) -> Exception:
        """Return the error of a rank that caused that of an exchange, else the error itself.

        From then on the ranks count as failed: they are not in the same state any more.
        """
        if isinstance(error, LockstepError):  # not of an exchange
            self._running.fail(0, str(error))
            return error
        self._running.failed.wait(CAUSE_SECONDS)
        failure = self._running.failure
        if failure is None:
            self._running.fail(0, str(error))
            return error
        return self._running.kind(failure)

    def abandon(self, why: str) -> None:
        """Give the ranks up: this rank left a step before its end."""
        self._running.fail(0, why)

    def close(self, why: str = "") -> None:
        """End the processes. why: the error for which they end; "" without one."""
        self._running.end(why)
        self._finalizer.cancel()


class NoPeerRanks:
    """The other ranks of a model on one rank: none. See PeerRanks."""

    group: RankGroup = ALONE

    def call_on_failure(self, function: OnFailure | None) -> None: ...

    def fits(self) -> Sequence[MemoryFit]:
        return ()

    def start(self, plan: Plan) -> None: ...

    def wait_ready(self) -> None: ...

    def send(self, message: Message) -> None: ...

    def cause(self, error: Exception) -> Exception:
        return error

    def abandon(self, why: str) -> None: ...

    def close(self, why: str = "") -> None: ...


def start_ranks(
    config: EngineConfig, hooks: CheckHooks, progress: Progress
) -> PeerRanks | NoPeerRanks:
    """Start the other ranks of a model. Raises ConfigError on a node that is not the head."""
    if config.node_rank:
        raise ConfigError(
            f"node_rank={config.node_rank} is not allowed here; allowed: 0, the head. Start this "
            "node by `lockstep serve` with the same options."
        )
    if config.tensor_parallel_size == 1:
        return NoPeerRanks()
    return PeerRanks(config, hooks, progress)
