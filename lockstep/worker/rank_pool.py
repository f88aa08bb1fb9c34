"""Processes of ranks that have left one engine and wait for the next one."""

from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from lockstep.child_processes import on_end


@dataclass(frozen=True)
class RankProcess:
    """Process of rank `index`. reports: from it. pipe: to it, see Broadcaster."""

    index: int
    process: BaseProcess
    reports: Connection
    pipe: Connection

    def end(self) -> None:
        """End the process and free what it takes here."""
        self.process.kill()
        self.process.join()
        self.pipe.close()
        self.reports.close()


class RankPool:
    """Idle processes of ranks on this host, for owners that build many engines.

    A process that has imported its modules, loaded its kernels and initialized its GPU joins the
    next engine in a fraction of a new process's time.
    """

    def __init__(self) -> None:
        self._idle: list[RankProcess] = []
        self._finalizer = on_end(self, partial(end_all, self._idle))

    @property
    def is_open(self) -> bool:
        """Return whether the pool keeps processes: until close()."""
        return self._finalizer.still_active()

    def take(self, index: int) -> RankProcess | None:
        """Return an idle process of this rank that lives, or None."""
        for rank in [rank for rank in self._idle if rank.index == index]:
            self._idle.remove(rank)
            if rank.process.is_alive():
                return rank
            rank.end()
        return None

    def put(self, rank: RankProcess) -> None:
        """Keep an idle process, or end it after close()."""
        if self.is_open:
            self._idle.append(rank)
        else:
            rank.end()

    def close(self) -> None:
        """End all idle processes."""
        self._finalizer()


def end_all(idle: list[RankProcess]) -> None:
    """End the processes of a pool."""
    while idle:
        idle.pop().end()
