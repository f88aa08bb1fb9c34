"""Tensor parallelism by output columns: the columns of a weight that each rank stores.

Every output column keeps its whole K on one rank, so no sum crosses ranks and the answer does not
depend on their number. Norms, routers and the latents of MLA stay whole on every rank.
"""

from dataclasses import dataclass

from torch import Tensor

from lockstep.errors import ConfigError, choice_error
from lockstep.quantization import Ranges, WeightSink

MAX_RANKS = 64
"""Largest number of ranks that error messages list."""


@dataclass(frozen=True)
class Rank:
    """Process of a tensor-parallel group: its index and the size of the group."""

    index: int = 0
    size: int = 1

    def units(self, count: int, *, replicate: bool = False) -> range:
        """Return the units (heads, columns) out of `count` of this rank.

        Args:
            count: units of the whole model.
            replicate: several ranks may hold the same unit if there are fewer units than ranks.

        Raises:
            ConfigError: the units do not divide among the ranks.
        """
        if not _divides(count, self.size, replicate):
            sizes = [str(n) for n in range(1, MAX_RANKS + 1) if _divides(count, n, replicate)]
            remedy = f"A layer has {count} heads or columns to divide; choose one of these sizes."
            allowed = ", ".join(sizes)
            raise choice_error(ConfigError, "tensor_parallel_size", self.size, allowed, remedy)
        if count < self.size:
            first = self.index // (self.size // count)
            return range(first, first + 1)
        share = count // self.size
        return range(self.index * share, (self.index + 1) * share)


def _divides(count: int, ranks: int, replicate: bool) -> bool:
    """Return whether `count` units divide evenly among this many ranks."""
    return count % ranks == 0 or (replicate and ranks % count == 0)


@dataclass(frozen=True)
class Columns:
    """Output columns of one weight, as consecutive parts that are cut separately.

    parts: (units, columns per unit) of each part. A rank has the same share of the units of every
    part, for example its heads of q, then its heads of k and v. replicate: see Rank.units.
    """

    parts: tuple[tuple[int, int], ...]
    replicate: bool = False

    @classmethod
    def of(cls, units: int, width: int = 1, *, replicate: bool = False) -> "Columns":
        """Return the columns of one part."""
        return cls(((units, width),), replicate)

    @property
    def total(self) -> int:
        """Number of columns of the whole weight."""
        return sum(units * width for units, width in self.parts)

    def ranges(self, rank: Rank) -> Ranges:
        """Return (begin, end) of the columns of a rank; () for all of them."""
        if rank.size == 1:
            return ()
        ranges = []
        offset = 0
        for units, width in self.parts:
            share = rank.units(units, replicate=self.replicate)
            ranges.append((offset + share.start * width, offset + share.stop * width))
            offset += units * width
        return tuple(ranges)


def count_columns(columns: int | Columns, rank: Rank) -> int:
    """Return the number of columns of a rank. A plain number of columns is whole on every rank."""
    if isinstance(columns, int):
        return columns
    ranges = columns.ranges(rank)
    return sum(end - begin for begin, end in ranges) if ranges else columns.total


@dataclass(frozen=True)
class WeightSpec:
    """Specification of one checkpoint tensor and its destination.

    name: of the tensor, less the architecture's prefix. shape: of the whole tensor in the
    checkpoint, None for any. shard_axis: axis of the output columns, along which it is cut across
    ranks; None if every rank takes the whole tensor. sink: writes the rank's slice into the model.
    """

    name: str
    shape: tuple[int, ...] | None
    shard_axis: int | None
    sink: WeightSink

    @classmethod
    def of(cls, name: str, target: Tensor | WeightSink) -> "WeightSpec":
        """Return the spec of a parameter that is filled as it is, or of a sink."""
        sink = WeightSink.of(target)
        return cls(name, sink.shape, sink.shard_axis if sink.ranges else None, sink)

    def narrow(self, tensor: Tensor) -> Tensor:
        """Return this rank's slice of the checkpoint's tensor, before it is copied anywhere."""
        return tensor if self.shard_axis is None else self.sink.narrow(tensor)

    def mismatch(self, tensor: Tensor) -> str | None:
        """Return why the checkpoint's whole tensor does not fit; None if it does."""
        return self.sink.mismatch(tensor)


def row_sink(target: Tensor, columns: Columns, rank: Rank) -> Tensor | WeightSink:
    """Return the destination of a tensor whose first axis is cut like these columns."""
    ranges = columns.ranges(rank)
    if not ranges:
        return target
    return WeightSink.copy_into(target, ranges=ranges, total_rows=columns.total)
