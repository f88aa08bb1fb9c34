"""Ranks as threads of the test's process, which takes no start of processes: see PeerRanks."""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from lockstep.config import EngineConfig, Plan
from lockstep.kernels.exchange import RankGroup
from lockstep.worker.hooks import CheckHooks
from lockstep.worker.rank_process import Loaded, RankLoop, Ready, Stop
from lockstep.worker.startup import MemoryFit

SECONDS = 60.0
"""Seconds that a rank waits for another one."""


class ThreadGroup(RankGroup):
    """Rank of a group of threads. parts: each rank's tensor of the present exchange."""

    def __init__(self, index: int, parts: list[Any], barrier: threading.Barrier) -> None:
        self.index = index
        self.size = len(parts)
        self.parts = parts
        self.barrier = barrier

    def all_gather(self, local: Tensor) -> Tensor:
        """Return every rank's tensor [size, ...]."""
        self.parts[self.index] = local
        self.barrier.wait(SECONDS)
        assert len({part.shape for part in self.parts}) == 1, "ranks exchange equal shapes"
        stacked = torch.stack(list(self.parts))
        self.barrier.wait(SECONDS)
        return stacked

    def close(self) -> None:
        """End exchanges that wait."""
        self.barrier.abort()


class ThreadRanks:
    """The other ranks of a model, as threads."""

    def __init__(self, config: EngineConfig, hooks: CheckHooks, progress: Any) -> None:
        size = config.tensor_parallel_size
        self.barrier = threading.Barrier(size)
        parts: list[Any] = [None] * size
        self.group, *rest = (ThreadGroup(i, parts, self.barrier) for i in range(size))
        self.inboxes: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in rest]
        self.reports: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in rest]
        self.errors: list[BaseException] = []
        for group, inbox, reports in zip(rest, self.inboxes, self.reports, strict=True):
            loop = RankLoop(inbox.get, reports.put)
            arguments = (loop, config, hooks, group)
            threading.Thread(target=self._run, args=arguments, daemon=True).start()

    def _run(
        self, loop: RankLoop, config: EngineConfig, hooks: CheckHooks, group: ThreadGroup
    ) -> None:
        try:
            loop.run(config, hooks, group)
        except BaseException as error:
            self.errors.append(error)
            self.barrier.abort()
            loop.report(error)  # type: ignore[arg-type]

    def _expect(self, kind: type) -> list[Any]:
        reports = [inbox.get(timeout=SECONDS) for inbox in self.reports]
        for report in reports:
            if isinstance(report, BaseException):
                raise report
            assert isinstance(report, kind)
        return reports

    def fits(self) -> Sequence[MemoryFit]:
        return [loaded.fit for loaded in self._expect(Loaded)]

    def start(self, plan: Plan) -> None:
        self.send(plan)

    def wait_ready(self) -> None:
        self._expect(Ready)

    def send(self, message: Any) -> None:
        for inbox in self.inboxes:
            inbox.put(message)

    def cause(self, error: Exception) -> Exception:
        return self.errors[0] if self.errors else error  # type: ignore[return-value]

    def abandon(self, why: str) -> None:
        self.barrier.abort()

    def call_on_failure(self, function: Any) -> None: ...

    def close(self, why: str = "") -> None:
        self.barrier.abort()
        self.send(Stop())


def run_ranks(size: int, run: Callable[[ThreadGroup], Any]) -> list[Any]:
    """Call a function on every rank of a group, each in its thread; return what it returns."""
    barrier = threading.Barrier(size)
    parts: list[Any] = [None] * size
    groups = [ThreadGroup(index, parts, barrier) for index in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, groups))
