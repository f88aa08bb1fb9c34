"""Groups of ranks: what they are and how tensors of equal shape travel between them."""

import threading
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from lockstep.kernels.exchange.device_push import Peers

POLL_SECONDS = 0.5
"""Interval at which an exchange over gloo looks whether its group was closed."""
ABORT_SECONDS = 5.0
"""Seconds that NCCL has to abort."""


class RankGroup(ABC):
    """Ranks that compute one model together.

    index: of this rank, 0 to size - 1. peers: memory of all ranks' GPUs, where each GPU writes that
    of all others, else None.
    """

    index: int
    size: int
    peers: "Peers | None" = None

    @abstractmethod
    def all_gather(self, local: Tensor) -> Tensor:
        """Return every rank's tensor [size, ...]; `local` has the same shape on all ranks.

        Raises RuntimeError where a rank has ended or does not answer in time.
        """

    def check(self) -> None:  # noqa: B027
        """Raise ComputeError if an exchange ended without a rank."""

    def close(self) -> None:  # noqa: B027
        """Leave the group: exchanges that still wait for another rank end by an error."""


class Alone(RankGroup):
    """Group of a single rank."""

    index = 0
    size = 1

    def all_gather(self, local: Tensor) -> Tensor:
        """Return the tensor as [1, ...]."""
        return local[None]


ALONE = Alone()
"""The group of a rank without peers."""


class DryGroup(RankGroup):
    """Group whose tensors have shapes and no values: for dry runs of a step."""

    def __init__(self, index: int, size: int) -> None:
        self.index = index
        self.size = size

    def all_gather(self, local: Tensor) -> Tensor:
        """Return an unfilled tensor [size, ...]."""
        return local.new_empty(self.size, *local.shape)


class GlooGroup(RankGroup):
    """Group of processes that exchange tensors of CPUs by gloo.

    seconds: time after which a rank that does not answer is an error. address: of this host,
    by which the other ranks reach it; None for gloo's own choice. Connections end with the
    processes of the ranks.
    """

    def __init__(
        self, store: dist.Store, index: int, size: int, seconds: float, address: str | None = None
    ) -> None:
        self.index = index
        self.size = size
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=seconds)
        create = dist.ProcessGroupGloo
        options._devices = [
            create.create_device(hostname=address) if address else create.create_default_device()
        ]
        self._closed = threading.Event()
        # A separate process group, so that several engines can live in one process.
        self._group = dist.ProcessGroupGloo(store, index, size, options)

    def all_gather(self, local: Tensor) -> Tensor:
        """See RankGroup."""
        gathered = local.new_empty(self.size, *local.shape)
        # As bytes: gloo does not know every dtype.
        parts = list(gathered.view(self.size, -1).view(torch.uint8).unbind(0))
        work = self._group.allgather([parts], [local.contiguous().view(-1).view(torch.uint8)])
        while not work.is_completed():
            try:
                work.wait(timedelta(seconds=POLL_SECONDS))
            except RuntimeError:
                # Else only the interval has passed.
                if work.is_completed() or self._closed.is_set():
                    raise
        work.wait()
        return gathered

    def close(self) -> None:
        """See RankGroup."""
        self._closed.set()


class NcclGroup(RankGroup):
    """Group of processes that exchange tensors of GPUs by NCCL, also inside CUDA graphs."""

    def __init__(self, store: dist.Store, index: int, size: int, seconds: float) -> None:
        self.index = index
        self.size = size
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=seconds)
        self._group = dist.ProcessGroupNCCL(store, index, size, options)

    def all_gather(self, local: Tensor) -> Tensor:
        """See RankGroup."""
        gathered = local.new_empty(self.size, *local.shape)
        self._group._allgather_base(gathered, local.contiguous()).wait()
        return gathered

    def close(self) -> None:
        """See RankGroup. Without an abort, NCCL waits for graphs that hold its kernels."""
        aborting = threading.Thread(target=self._group.abort, daemon=True)
        try:
            aborting.start()
        except RuntimeError:  # at the interpreter's end no thread can be started
            self._group.abort()
        else:
            aborting.join(ABORT_SECONDS)
