"""Shards of logit rows: the logits of a row that each tensor-parallel rank computes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

VOCABULARY_TILE = 2048
"""Logits whose sums a kernel computes at once. A shard begins at a multiple of it, so that every
tile, and every sum, belongs to one rank."""


def send_nothing(local: Tensor, widths: Sequence[int], needed: Tensor | None = None) -> Tensor:
    """Return the columns of the only rank."""
    return local


@dataclass(frozen=True)
class LogitShard:
    """Consecutive logits of every row that a rank computes, in the order of the ranks.

    A single rank has a shard that is the whole row. widths: number of logits of each rank. index:
    of this rank. exchange: backend of lockstep.kernels.exchange with its group.
    """

    widths: tuple[int, ...]
    index: int = 0
    exchange: Callable[..., Tensor] = send_nothing

    @property
    def begin(self) -> int:
        """Index of the rank's first logit in the whole row."""
        return sum(self.widths[: self.index])

    @property
    def width(self) -> int:
        """Number of the rank's logits."""
        return self.widths[self.index]

    @property
    def total(self) -> int:
        """Number of logits of the whole row."""
        return sum(self.widths)

    @property
    def max_width(self) -> int:
        """Largest number of logits of a rank."""
        return max(self.widths)

    @property
    def ranks(self) -> int:
        """Number of ranks that share a row."""
        return len(self.widths)

    def first(self, count: int) -> "LogitShard":
        """Return the shard of rows that end after their first `count` logits."""
        begins = [sum(self.widths[:index]) for index in range(self.ranks)]
        pairs = zip(begins, self.widths, strict=True)
        widths = tuple(min(max(count - begin, 0), width) for begin, width in pairs)
        return replace(self, widths=widths)

    def gather(self, logits: Tensor, needed: Tensor | None = None) -> Tensor:
        """Return whole rows [T, V] from this rank's logits [T, n].

        needed [T] int32: 0 for rows that may hold anything, `max_width` for the others; None: all
        rows are needed.
        """
        return self.exchange(logits, self.widths, needed=needed)

    def gather_records(self, records: Tensor, needed: Tensor | None = None) -> Tensor:
        """Return every rank's records [T, ranks, W] from this rank's [T, W].

        needed [T] int32: number of leading columns that are read.
        """
        size = records.shape[1]
        whole = self.exchange(records, (size,) * self.ranks, needed=needed)
        return whole.view(len(records), self.ranks, size)
