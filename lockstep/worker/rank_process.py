"""Process of a rank after the first: it executes what the first rank's process broadcasts."""

import gc
import multiprocessing
import os
import pickle
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from lockstep.child_processes import ignore_signals
from lockstep.config import EngineConfig, Plan
from lockstep.errors import LockstepError
from lockstep.kernels.compiler_signals import reclaim_signal_handlers
from lockstep.kernels.exchange import RankGroup
from lockstep.kernels.exchange.group import GlooGroup, NcclGroup
from lockstep.progress import ignore_progress
from lockstep.scheduling.grammar import MaskQuery
from lockstep.scheduling.schedule import Schedule
from lockstep.worker.agreement import identity_of
from lockstep.worker.broadcast import Receiver
from lockstep.worker.build import pick_device
from lockstep.worker.hooks import CheckHooks
from lockstep.worker.startup import MemoryFit, WorkerStartup
from lockstep.worker.worker import LaunchedStep, Worker

HEARTBEAT_SECONDS = 0.5
"""Interval between two heartbeats of a rank."""


@dataclass(frozen=True)
class Execute:
    """Message: launch a schedule. number: counts the schedules."""

    number: int
    schedule: Schedule


@dataclass(frozen=True)
class Masks:
    """Message: answer to the mask queries of a step, bitmasks in the order of the queries.

    free: see lockstep.scheduling.grammar.FillMasks.
    """

    bitmasks: bytes
    free: frozenset[str]


@dataclass(frozen=True)
class Collect:
    """Message: collect a schedule's results, which takes exchanges for prompt log-probabilities."""

    number: int


@dataclass(frozen=True)
class Call:
    """Message: call a function with the worker."""

    function: Callable[[Worker], object]


@dataclass(frozen=True)
class Stop:
    """Message: leave the engine. stays: wait for another engine instead of ending the process."""

    stays: bool = False


@dataclass(frozen=True)
class Joined:
    """Report: the process runs and knows the others' addresses.

    identity: what must be equal on all ranks, see lockstep.worker.agreement.
    """

    identity: dict[str, str]


@dataclass(frozen=True)
class Loaded:
    """Report: the model is loaded. fit: sizes that fit into this rank's memory."""

    fit: MemoryFit


@dataclass(frozen=True)
class Ready:
    """Report: the rank has allocated its cache and warmed up."""


@dataclass(frozen=True)
class Idle:
    """Report: the rank has left its engine, has freed its memory and waits for another one."""


@dataclass(frozen=True)
class Beat:
    """Report: the process lives."""


@dataclass(frozen=True)
class Failed:
    """Report: the rank raised an error and ends.

    details: text with the traceback, if it helps. kind: name of the error's class, "" if it is
    none of Lockstep's.
    """

    error: str
    details: str
    kind: str = ""


Message = Execute | Masks | Collect | Call | Stop
Report = Joined | Loaded | Ready | Idle | Beat | Failed


@dataclass(frozen=True)
class RankSettings:
    """Settings with which a rank joins its group.

    host, port: of the first rank's store. address: of this node, by which the other nodes reach
    it; None where there is one node. decode: unpickles a message. index: of the rank, 1 or more.
    memory: name of the broadcast's shared memory, which the rank reads as `reader` of
    `num_readers`.
    """

    host: str
    port: int
    address: str | None = None
    decode: Callable[[bytes | memoryview], Any] = pickle.loads
    index: int = 0
    memory: str = ""
    reader: int = 0
    num_readers: int = 0


@dataclass(frozen=True)
class NextEngine:
    """Engine that a rank joins."""

    settings: RankSettings
    config: EngineConfig
    hooks: CheckHooks


def connect_store(
    host: str, port: int, size: int, seconds: float, *, first: bool = False
) -> dist.TCPStore:
    """Return the store through which ranks find each other. first: the caller provides it."""
    timeout = timedelta(seconds=seconds)
    return dist.TCPStore(host, port, size, first, timeout, wait_for_workers=False)


def make_group(
    config: EngineConfig, store: dist.Store, index: int, address: str | None = None
) -> RankGroup:
    """Join the group: all ranks call it at about the same time. address: see RankSettings."""
    size = config.tensor_parallel_size
    seconds = config.distributed_timeout_seconds
    if pick_device(config) == "cpu":
        return GlooGroup(store, index, size, seconds, address)
    # Imported here: Triton is for GPUs.
    from lockstep.kernels.exchange.peer_memory import PeerGroup, reaches_peers

    by_nccl = config.disable_custom_all_reduce or config.nnodes > 1
    if not by_nccl and reaches_peers(store, index, size):
        return PeerGroup(store, index, size, seconds)
    return NcclGroup(store, index, size, seconds)


def choose_device(config: EngineConfig, index: int) -> None:
    """Make the GPU of a rank the process's current one."""
    if pick_device(config) != "cpu":
        torch.cuda.set_device(index - config.node_ranks.start)


class RankLoop:
    """Life of a rank after it has joined its group: startup, then message after message.

    receive: waits for the next message; the first one is the plan. report: sends a report.
    """

    def __init__(self, receive: Callable[[], Any], report: Callable[[Report], None]) -> None:
        self.receive = receive
        self.report = report
        self._launched: deque[tuple[int, list[LaunchedStep]]] = deque()

    def run(self, config: EngineConfig, hooks: CheckHooks, group: RankGroup) -> Stop:
        """Load the rank's part of the model and execute messages until Stop -> that message."""
        # The first rank shows its progress, which is that of all ranks.
        startup = WorkerStartup(config, ignore_progress, hooks, group)
        self.report(Loaded(startup.fit_memory()))
        plan = self.receive()
        if isinstance(plan, Stop):  # the first rank did not start
            return plan
        assert isinstance(plan, Plan)
        worker, _ = startup.start(plan, ignore_progress)
        self.report(Ready())
        while not isinstance(message := self.receive(), Stop):
            self._execute(worker, message)
        return message

    def _execute(self, worker: Worker, message: Message) -> None:
        if isinstance(message, Execute):
            launched = worker.launch(message.schedule, self._receive_masks)
            self._launched.append((message.number, launched))
            # The first rank asks for the results of a step in flight, or never asks.
            while len(self._launched) > worker.plan.steps_in_flight + 1:
                self._launched.popleft()
        elif isinstance(message, Collect):
            for number, launched in self._launched:
                if number == message.number:
                    worker.collect(launched)
        else:
            assert isinstance(message, Call)
            message.function(worker)

    def _receive_masks(self, queries: Sequence[MaskQuery], memory: memoryview) -> frozenset[str]:
        """Copy the first rank's bitmasks: see lockstep.scheduling.grammar.FillMasks."""
        masks = self.receive()
        assert isinstance(masks, Masks)
        write_masks(queries, memory, masks.bitmasks)
        return masks.free


def read_masks(queries: Sequence[MaskQuery], memory: memoryview) -> bytes:
    """Return the bitmasks that answer the queries, from memory [masks of a pass, words]."""
    return b"".join(
        bytes(memory[query.first : query.first + len(query.drafts) + 1]) for query in queries
    )


def write_masks(queries: Sequence[MaskQuery], memory: memoryview, bitmasks: bytes) -> None:
    """Write what read_masks() returned to memory of the same shape."""
    row = memory.nbytes // memory.shape[0] if memory.shape else 0
    flat = memory.cast("B")
    begin = 0
    for query in queries:
        size = row * (len(query.drafts) + 1)
        flat[query.first * row : query.first * row + size] = bitmasks[begin : begin + size]
        begin += size


class _Reporter:
    """Sender of reports and regular heartbeats. Ends this process once the first rank's is gone."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        threading.Thread(target=self._beat, name="lockstep-heartbeat", daemon=True).start()

    def report(self, report: Report) -> None:
        """Send a report."""
        try:
            with self._sending:
                self._connection.send(report)
        except OSError:
            os._exit(0)

    def _beat(self) -> None:
        pause = threading.Event()
        while not pause.wait(HEARTBEAT_SECONDS):
            self.report(Beat())


def run_rank(connection: Connection, pipe: Connection, engine: NextEngine) -> None:
    """Run the process of a rank. It ends with the first rank's process.

    connection: for reports. pipe: of the broadcast, and for the next engine while the rank is idle.
    """
    reclaim_signal_handlers()
    ignore_signals()
    # The first rank of a node starts processes that compile kernels; they end with it.
    multiprocessing.current_process().daemon = False
    reporter = _Reporter(connection)
    torch.set_num_threads(max(1, torch.get_num_threads() // len(engine.config.node_ranks)))
    try:
        while _serve(engine, pipe, reporter.report).stays:
            # An engine's objects refer to each other: only a collection frees its memory.
            gc.collect()
            if pick_device(engine.config) != "cpu":
                torch.cuda.synchronize()  # a fault of this engine must not appear in the next one
                torch.cuda.empty_cache()
            reporter.report(Idle())
            engine = pickle.loads(pipe.recv_bytes())
    except EOFError:  # the first rank has ended
        os._exit(0)
    except Exception as error:
        if isinstance(error, LockstepError):
            reporter.report(Failed(str(error), "", type(error).__name__))
        else:
            reporter.report(Failed(repr(error), traceback.format_exc()))
        os._exit(1)
    os._exit(0)  # shutting the interpreter down takes seconds and frees nothing that matters


def _serve(engine: NextEngine, pipe: Connection, report: Callable[[Report], None]) -> Stop:
    """Join an engine and execute its messages until its end."""
    settings = engine.settings
    config = engine.config
    receiver = Receiver(
        settings.memory, settings.reader, settings.num_readers, pipe, settings.decode
    )
    choose_device(config, settings.index)
    seconds = config.distributed_timeout_seconds
    store = connect_store(settings.host, settings.port, config.tensor_parallel_size, seconds)
    report(Joined(identity_of(config)))
    group = make_group(config, store, settings.index, settings.address)
    stop = RankLoop(receiver.receive, report).run(config, engine.hooks, group)
    if stop.stays:
        group.close()
    return stop
