"""Ranks that are child processes of this process: on the head all but rank 0, on other nodes all
of the node's."""

import pickle
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from lockstep.child_processes import blocked_signals
from lockstep.config import EngineConfig
from lockstep.errors import ConfigError
from lockstep.worker.broadcast import Broadcaster
from lockstep.worker.build import pick_device
from lockstep.worker.hooks import CheckHooks
from lockstep.worker.rank_pool import RankPool, RankProcess
from lockstep.worker.rank_process import Failed, NextEngine, RankSettings, Report, run_rank

END_SECONDS = 5.0
"""Seconds that ranks have to end by themselves."""
PRELOADED = "lockstep.worker.rank_imports"
"""Module that imports what ranks need. The fork server of this process imports it once for all: a
later engine on two CPU ranks then starts in 3.0 s instead of 7.2 (benchmarks/log/2026-11.md)."""


class LocalRanks:
    """Child processes of some ranks, all of one node. See RankHost.

    processes: of the ranks, in their order, once they have started. pool: provides processes and
    gets those that are idle at the end.
    """

    node_name = ""
    silent_for = 0.0

    def __init__(self, ranks: range, pool: RankPool | None = None) -> None:
        self.ranks = ranks
        self.pool = pool
        self.processes: list[RankProcess] = []
        self._broadcaster = Broadcaster(len(ranks))
        # Where two threads wait for a process, multiprocessing gives its exit code to one only.
        # Reentrant, since garbage collection may end an engine in any thread.
        self._joining = threading.RLock()

    @property
    def connections(self) -> Sequence[Connection]:
        """See RankHost: the reports of the ranks."""
        return [rank.reports for rank in self.processes]

    def start(self, settings: RankSettings, config: EngineConfig, hooks: CheckHooks) -> None:
        """Start the processes. settings: of each rank, but for its index and reader."""
        check_devices(config)
        context = get_context("forkserver")
        context.set_forkserver_preload([PRELOADED])
        hooks = replace(hooks, rank_pool=None)
        with blocked_signals():  # the fork server inherits them too, with the first rank
            for reader, index in enumerate(self.ranks):
                settings = replace(
                    settings,
                    index=index,
                    memory=self._broadcaster.name,
                    reader=reader,
                    num_readers=len(self.ranks),
                )
                engine = NextEngine(settings, config, hooks)
                idle = None if self.pool is None else self.pool.take(index)
                rank = idle or self._start_process(context, engine)
                self.processes.append(rank)
                if idle is not None:
                    idle.pipe.send_bytes(pickle.dumps(engine))

    def _start_process(self, context: Any, engine: NextEngine) -> RankProcess:
        index = engine.settings.index
        reports, theirs = context.Pipe(duplex=False)
        reads, writes = context.Pipe(duplex=False)
        process = context.Process(
            target=run_rank,
            args=(theirs, reads, engine),
            name=f"lockstep-rank-{index}",
            daemon=True,
        )
        process.start()
        theirs.close()
        reads.close()
        return RankProcess(index, process, reports, writes)

    def unname(self) -> None:
        """Remove the name of the shared memory, once every rank has joined."""
        self._broadcaster.unname()

    def read(self, connection: Connection) -> Sequence[tuple[int, Report]]:
        """See RankHost."""
        (rank,) = (rank for rank in self.processes if rank.reports is connection)
        try:
            report = connection.recv()
        except (EOFError, OSError):
            report = Failed(self._how_it_ended(rank.process), "")
        return [(rank.index, report)]

    def _how_it_ended(self, process: BaseProcess) -> str:
        """Return how the process of an ended rank ended."""
        with self._joining:
            process.join(END_SECONDS)
        code = process.exitcode
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            hint = ", as the system does where memory is short" if name == "SIGKILL" else ""
            return f"its process was ended by {name}{hint}"
        return f"its process ended with status {code}"

    def send(self, data: bytes, check: Callable[[], None]) -> None:
        """See RankHost."""
        self._broadcaster.send(data, [rank.pipe for rank in self.processes], check)

    def beat(self) -> None:
        """See RankHost: the pipes of the ranks end with this process."""

    def kill(self) -> None:
        """See RankHost."""
        for rank in self.processes:
            rank.process.kill()

    def wait(self) -> None:
        """Wait until the ranks have ended by themselves, at most END_SECONDS."""
        end = time.monotonic() + END_SECONDS
        for rank in self.processes:
            with self._joining:
                rank.process.join(max(0.0, end - time.monotonic()))

    def release(self) -> None:
        """Return idle processes to the pool; close() frees the rest."""
        assert self.pool is not None, "its owner asked the ranks to stay"
        for rank in self.processes:
            self.pool.put(rank)
        self.processes = []

    def close(self) -> None:
        """See RankHost."""
        self.wait()
        for rank in self.processes:
            rank.end()
        self._broadcaster.close()


def check_devices(config: EngineConfig) -> None:
    """Raise ConfigError where this node has fewer GPUs than ranks."""
    # Imported here: only GPUs are counted.
    import torch

    size = len(config.node_ranks)
    if pick_device(config) == "cpu" or torch.cuda.device_count() >= size:
        return
    raise ConfigError(
        f"tensor_parallel_size={config.tensor_parallel_size} is not allowed; allowed: 1 to "
        f"{torch.cuda.device_count() * config.nnodes}, the number of visible GPUs"
        f"{' per node, times nnodes' if config.nnodes > 1 else ''}. Lower it, or make more GPUs "
        "visible (CUDA_VISIBLE_DEVICES)."
    )
