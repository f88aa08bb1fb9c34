"""The other ranks of a model, as the first rank's process sees them: started, watched, ended."""

import contextlib
import signal
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from lockstep.child_processes import blocked_signals
from lockstep.config import EngineConfig, Plan
from lockstep.errors import ConfigError, LockstepError, RankError
from lockstep.kernels.exchange import ALONE, RankGroup
from lockstep.worker.broadcast import Broadcaster
from lockstep.worker.build import pick_device
from lockstep.worker.hooks import CheckHooks
from lockstep.worker.rank_process import (
    Beat,
    Failed,
    Joined,
    Loaded,
    Message,
    RankSettings,
    Ready,
    Report,
    Stop,
    connect_store,
    make_group,
    run_rank,
)
from lockstep.worker.startup import MemoryFit

SILENT_SECONDS = 10.0
"""Seconds without a heartbeat after which a rank counts as hung and is killed."""
WATCH_SECONDS = 0.5
"""Interval at which heartbeats are checked."""
CAUSE_SECONDS = 5.0
"""Seconds that a failed exchange waits for the report of the rank that caused it."""
END_SECONDS = 5.0
"""Seconds that ranks have to end by themselves."""
LOCALHOST = "127.0.0.1"


@dataclass
class _Processes:
    """Processes of the other ranks. connections: their reports, by process.

    pipes: of the broadcast. reports: of each process, heartbeats left out. failure: which rank
    ended and why, once one has. group: of all ranks. serving: heartbeats must arrive; the startup
    has no limit.
    """

    processes: list[BaseProcess]
    connections: list[Connection]
    pipes: list[Connection]
    broadcaster: Broadcaster
    failure: str | None = None
    failed: threading.Event = field(default_factory=threading.Event)
    reports: list[list[Report]] = field(default_factory=list)
    reported: threading.Condition = field(default_factory=threading.Condition)
    serving: bool = False
    closing: bool = False
    group: RankGroup = ALONE

    def fail(self, rank: int, why: str) -> None:
        """Record the first failure and kill every rank: exchanges with them then fail too."""
        if self.closing:
            return
        if self.failure is None:
            count = len(self.processes) + 1
            self.failure = f"rank {rank} of {count} (tensor_parallel_size) failed: {why}"
            self.failed.set()
            with self.reported:
                self.reported.notify_all()
        for process in self.processes:
            process.kill()
        self.group.close()

    def check(self) -> None:
        """Raise RankError if a rank has failed."""
        if self.failure is not None:
            raise RankError(self.failure)

    def how_it_ended(self, index: int) -> str:
        """Return how the process of an ended rank ended."""
        process = self.processes[index]
        process.join(END_SECONDS)
        code = process.exitcode
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            hint = ", as the system does where memory is short" if name == "SIGKILL" else ""
            return f"its process was ended by {name}{hint}"
        return f"its process ended with status {code}"

    def read(self, seconds: float) -> list[tuple[int, Report]]:
        """Wait for reports -> (index of the process, report). Records what ends a rank."""
        reports: list[tuple[int, Report]] = []
        for connection in wait(self.connections, seconds):
            index = self.connections.index(connection)  # type: ignore[arg-type]
            try:
                report = self.connections[index].recv()
            except (EOFError, OSError):
                self.fail(index + 1, self.how_it_ended(index))
                return reports
            if isinstance(report, Failed):
                self.fail(index + 1, f"{report.error}\n{report.details}".strip())
                return reports
            reports.append((index, report))
        return reports

    def watch(self) -> None:
        """Read reports, and watch ended and silent ranks, until one fails or close()."""
        last_report = [time.monotonic()] * len(self.processes)
        while self.failure is None and not self.closing:
            try:
                reports = self.read(WATCH_SECONDS)
            except (OSError, ValueError):  # close() has closed the connections
                return
            now = time.monotonic()
            for index, report in reports:
                last_report[index] = now
                if not isinstance(report, Beat):
                    with self.reported:
                        self.reports[index].append(report)
                        self.reported.notify_all()
            for index, last in enumerate(last_report):
                if self.serving and now - last > SILENT_SECONDS:
                    why = f"it has not answered for {now - last:.0f} s"
                    self.fail(index + 1, why)

    def close(self) -> None:
        """End all processes and free the shared memory."""
        self.closing = True
        with contextlib.suppress(OSError, RankError):
            self.broadcaster.send(Stop(), self.pipes, self.check)
        end = time.monotonic() + END_SECONDS
        self.group.close()
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()
            process.join()
        for connection in (*self.pipes, *self.connections):
            connection.close()
        self.broadcaster.close()


class PeerRanks:
    """Ranks 1 to size - 1 of a model, one process each. `group` joins this process to them.

    Call order: the constructor starts them, fits() waits until they are loaded, start() until they
    are ready; then send(). A rank that ends, raises or hangs is a RankError in all of these.
    """

    def __init__(self, config: EngineConfig, hooks: CheckHooks) -> None:
        size = config.tensor_parallel_size
        device = pick_device(config)
        _check_devices(device, size)
        store = connect_store(LOCALHOST, 0, size, first=True)
        context = get_context("spawn")
        broadcaster = Broadcaster(size - 1)
        self._running = _Processes([], [], [], broadcaster)
        self._finalizer = weakref.finalize(self, self._running.close)
        try:
            with blocked_signals():
                for index in range(1, size):
                    settings = RankSettings(index, size, LOCALHOST, store.port, broadcaster.name)
                    self._start_process(context, settings, config, hooks)
            watch = self._running.watch
            threading.Thread(target=watch, name="lockstep-ranks", daemon=True).start()
            self._expect(Joined)
            broadcaster.unname()
            self.group = self._running.group = make_group(config, store, 0, size)
        except BaseException:
            self._finalizer()
            raise

    def _start_process(
        self, context: Any, settings: RankSettings, config: EngineConfig, hooks: CheckHooks
    ) -> None:
        reports, theirs = context.Pipe(duplex=False)
        reads, writes = context.Pipe(duplex=False)
        process = context.Process(
            target=run_rank,
            args=(theirs, reads, settings, config, hooks),
            name=f"lockstep-rank-{settings.index}",
            daemon=True,
        )
        process.start()
        theirs.close()
        reads.close()
        self._running.processes.append(process)
        self._running.connections.append(reports)
        self._running.reports.append([])
        self._running.pipes.append(writes)

    def _expect(self, kind: type[Report]) -> list[Any]:
        """Wait for a report of this kind from every rank. Raises RankError."""
        running = self._running

        def reports() -> list[Report]:
            return [r for one in running.reports for r in one if isinstance(r, kind)]

        with running.reported:
            running.reported.wait_for(
                lambda: running.failure is not None or len(reports()) == len(running.processes)
            )
        running.check()
        return reports()

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
        """Broadcast a message."""
        self._running.check()
        try:
            self._running.broadcaster.send(message, self._running.pipes, self._running.check)
        except OSError as error:
            raise self.cause(error) from error

    def cause(self, error: Exception) -> Exception:
        """Return the RankError that caused an error of an exchange, else the error itself.

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
        return RankError(failure)

    def abandon(self, why: str) -> None:
        """Give the ranks up: this rank left a step before its end."""
        self._running.fail(0, why)

    def close(self) -> None:
        """End the processes."""
        self._finalizer()


class NoPeerRanks:
    """The other ranks of a model on one rank: none. See PeerRanks."""

    group: RankGroup = ALONE

    def fits(self) -> Sequence[MemoryFit]:
        return ()

    def start(self, plan: Plan) -> None: ...

    def wait_ready(self) -> None: ...

    def send(self, message: Message) -> None: ...

    def cause(self, error: Exception) -> Exception:
        return error

    def abandon(self, why: str) -> None: ...

    def close(self) -> None: ...


def start_ranks(config: EngineConfig, hooks: CheckHooks) -> PeerRanks | NoPeerRanks:
    """Start the other ranks of a model."""
    return NoPeerRanks() if config.tensor_parallel_size == 1 else PeerRanks(config, hooks)


def _check_devices(device: str, size: int) -> None:
    """Raise ConfigError where there are fewer GPUs than ranks."""
    # Imported here: only GPUs are counted.
    import torch

    if device != "cpu" and torch.cuda.device_count() < size:
        raise ConfigError(
            f"tensor_parallel_size={size} is not allowed; allowed: 1 to "
            f"{torch.cuda.device_count()}, the number of visible GPUs. Lower it, or make more GPUs "
            "visible (CUDA_VISIBLE_DEVICES)."
        )
