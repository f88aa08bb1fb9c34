"""Shards of logit rows: the logits of a row that each tensor-parallel rank computes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

VOCABULARY_TILE = 2048
"""Logits whose sums a kernel computes at once. A shard begins at a multiple of it, so that every
tile, and every sum, belongs to one rank."""
GROUP = 32
"""Adjacent tokens that share a peak, their maximum score."""
TILE = 128
"""Groups in the tile of candidates to which filters are applied first."""
HEADER_WORDS = 8
"""32-bit words of a record that every row needs."""
BLOCK_ALIGNMENT = 4
"""Multiple to which a record rounds its number of blocks up, which aligns what follows."""


@dataclass(frozen=True)
class RecordLayout:
    """Layout, in 32-bit words, of what a rank sends of one logit row.

    A record consists of a header, the largest peak of each block, the mass of each block, the
    numbers of the groups, their peaks, and their logits. groups: first word of the groups' numbers.
    logits: first word of the logits. size: words of the record.
    """

    groups: int
    logits: int
    size: int

    @classmethod
    def of(cls, blocks: int, tile: int, group: int, itemsize: int) -> "RecordLayout":
        """Return the layout of a record of `blocks` blocks and `tile` groups of logits.

        itemsize: bytes of a logit.
        """
        padded = -(-blocks // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT
        groups = HEADER_WORDS + 2 * padded
        logits = groups + 2 * tile
        return cls(groups, logits, logits + tile * group * itemsize // 4)


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
        begins = accumulate(self.widths[:-1], initial=0)
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
        """Return every rank's records [T, ranks, W] int32 from this rank's [T, W].

        needed [T] int32: number of leading halves of words that are read.
        """
        # As values of 16 bits, which `push` sends in packets. Nothing computes with them.
        halves = records.view(torch.bfloat16)
        widths = (halves.shape[1],) * self.ranks
        gathered = self.exchange(halves, widths, needed=needed)
        return gathered.view(torch.int32).view(len(records), self.ranks, -1)

    def record_bytes(self, itemsize: int) -> int:
        """Return the bytes that a rank sends of a row that filters, with logits of itemsize."""
        blocks = -(-self.max_width // VOCABULARY_TILE)
        return 4 * RecordLayout.of(blocks, TILE, GROUP, itemsize).size
