"""Tensor parallelism by output columns: the columns of a weight that each rank stores.

Every output column keeps its whole K on one rank, so no sum crosses ranks and the answer does not
depend on their number. Norms, routers and the latents of MLA stay whole on every rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from lockstep.errors import ConfigError, choice_error
from lockstep.kernels.formats.weights import QuantizedWeight
from lockstep.kernels.sampling import VOCABULARY_TILE
from lockstep.quantization import CheckpointLinear, Layout, Ranges, WeightSink

MAX_RANKS = 64
"""Largest tensor_parallel_size that error messages suggest."""
GRANULES = (128, 64, 32, 16, 8, 4, 2, 1)
"""Multiples of columns in which a dimension without heads is cut, largest first.

128 is the largest block of columns that a weight format stores together.
"""


@dataclass(frozen=True)
class Rank:
    """Process of a tensor-parallel group: its index and the size of the group."""

    index: int = 0
    size: int = 1

    def heads(self, count: int) -> range:
        """Return this rank's heads out of `count`: an equal share of consecutive ones.

        Raises:
            ConfigError: the heads do not divide evenly among the ranks.
        """
        if count % self.size:
            sizes = [str(n) for n in range(1, min(count, MAX_RANKS) + 1) if count % n == 0]
            remedy = f"A layer has {count} heads to divide; choose one of these sizes."
            allowed = ", ".join(sizes)
            raise choice_error(ConfigError, "tensor_parallel_size", self.size, allowed, remedy)
        share = count // self.size
        return range(self.index * share, (self.index + 1) * share)

    def columns(self, count: int) -> range:
        """Return this rank's columns out of `count`: consecutive granules, in shares that differ
        by one granule at most.

        The granule is the largest of GRANULES that divides `count` and gives each rank one.

        Raises:
            ConfigError: there are fewer columns than ranks.
        """
        sizes = (g for g in GRANULES if count % g == 0 and count // g >= self.size)
        granule = next(sizes, None)
        if granule is None:
            remedy = f"A layer has {count} columns to divide; choose a smaller size."
            allowed = f"1 to {count}"
            raise choice_error(ConfigError, "tensor_parallel_size", self.size, allowed, remedy)
        return self._granules(count, granule)

    def tokens(self, count: int) -> range:
        """Return this rank's tokens out of a vocabulary of `count`: consecutive tiles of
        VOCABULARY_TILE, in shares that differ by one tile at most. The last tile may be shorter.

        A vocabulary of fewer tiles than ranks is whole on every rank.
        """
        if -(-count // VOCABULARY_TILE) < self.size:
            return range(count)
        return self._granules(count, VOCABULARY_TILE)

    def _granules(self, count: int, granule: int) -> range:
        """Return this rank's share of `count` columns in granules, of which each rank has one."""
        share, rest = divmod(-(-count // granule), self.size)
        begin = self.index * share + min(self.index, rest)
        end = begin + share + (self.index < rest)
        return range(begin * granule, min(end * granule, count))


ALL = Rank()
"""The only rank of a group of one."""


@dataclass(frozen=True)
class Part:
    """Consecutive output columns of a weight that are cut in one way.

    Either heads: `heads` heads, of which `sharing` consecutive ones share `width` columns (the
    query heads of a KV head); a rank stores what its heads read, so ranks that outnumber the KV
    heads hold copies. Or, with heads 0, `width` columns that belong to no head; vocabulary: they
    are tokens.
    """

    heads: int
    width: int
    sharing: int = 1
    vocabulary: bool = False

    @property
    def total(self) -> int:
        """Number of columns of the whole part."""
        return self.heads // self.sharing * self.width if self.heads else self.width

    def units(self, rank: Rank) -> list[int]:
        """Return the shared units (KV heads) of a rank's heads, one for `sharing` heads.

        A rank whose heads would cover units in part has one unit per head.
        """
        heads = rank.heads(self.heads)
        if len(heads) % self.sharing == 0:
            return list(range(heads.start // self.sharing, heads.stop // self.sharing))
        if self.sharing % len(heads) == 0:
            return [heads.start // self.sharing]
        return [head // self.sharing for head in heads]

    def ranges(self, rank: Rank) -> Iterator[tuple[int, int]]:
        """Yield (begin, end) of the columns of a rank, within the part."""
        if not self.heads:
            share = rank.tokens(self.width) if self.vocabulary else rank.columns(self.width)
            yield share.start, share.stop
            return
        # Consecutive units are one range; a unit that repeats begins another range.
        numbered = enumerate(self.units(rank))
        for _, run in groupby(numbered, lambda pair: pair[1] - pair[0]):
            units = [unit for _, unit in run]
            yield units[0] * self.width, (units[-1] + 1) * self.width


@dataclass(frozen=True)
class Columns:
    """Output columns of one weight, as consecutive parts that are cut separately.

    A rank has its share of every part, for example its heads of q, then its heads of k and v.
    """

    parts: tuple[Part, ...]

    @classmethod
    def of(cls, width: int) -> "Columns":
        """Return columns that belong to no head."""
        return cls((Part(0, width),))

    @classmethod
    def vocabulary(cls, tokens: int) -> "Columns":
        """Return the columns of a language model head, or the rows of an embedding."""
        return cls((Part(0, tokens, vocabulary=True),))

    @classmethod
    def heads(cls, heads: int, width: int = 1, sharing: int = 1) -> "Columns":
        """Return the columns of heads. sharing: heads that share `width` columns."""
        return cls((Part(heads, width, sharing),))

    @property
    def total(self) -> int:
        """Number of columns of the whole weight."""
        return sum(part.total for part in self.parts)

    def ranges(self, rank: Rank) -> Ranges:
        """Return (begin, end) of the columns of a rank; () for all of them."""
        if rank.size == 1:
            return ()
        ranges = []
        offset = 0
        for part in self.parts:
            ranges += [(offset + begin, offset + end) for begin, end in part.ranges(rank)]
            offset += part.total
        # A vocabulary of few tiles is not cut.
        is_whole = self.parts[0].vocabulary and ranges == [(0, self.total)]
        return () if is_whole else tuple(ranges)


def count_columns(columns: int | Columns, rank: Rank) -> int:
    """Return the number of columns of a rank. A plain number of columns is whole on every rank."""
    if isinstance(columns, int):
        return columns
    ranges = columns.ranges(rank)
    return sum(end - begin for begin, end in ranges) if ranges else columns.total


@dataclass(frozen=True)
class Shard:
    """Slice of a parameter that a rank stores: `ranges` out of `total` entries of `axis`.

    ranges: () for all of them. order: index, within the slice, of each entry that is stored; None
    where they are in the checkpoint's order.
    """

    axis: int
    ranges: Ranges
    total: int
    order: Tensor | None = None

    def shape_of_whole(self, parameter: Tensor) -> tuple[int, ...]:
        """Return the shape of the whole parameter."""
        shape = list(parameter.shape)
        shape[self.axis] = self.total
        return tuple(shape)

    def narrow(self, full: Tensor) -> Tensor:
        """Return the rank's slice of the full parameter, in the order in which it is stored."""
        ranges = self.ranges or ((0, self.total),)
        parts = [full.narrow(self.axis, begin, end - begin) for begin, end in ranges]
        joined = torch.cat(parts, self.axis)
        if self.order is None:
            return joined
        return joined.index_select(self.axis, self.order.to(joined.device))


@dataclass(frozen=True)
class QuantizedShard:
    """Output columns of a quantized weight that a rank stores: `ranges` out of `total`.

    layout: of the whole weight. A rank may store its columns with more scales.
    """

    layout: Layout
    ranges: Ranges
    total: int

    def fill_dummy(self, weight: QuantizedWeight, generator: torch.Generator) -> None:
        """Fill the rank's weight with its columns of a whole random weight."""
        full_weight = self.layout.empty(self.total, weight.k, weight.device)
        full_weight.fill_dummy(generator)
        ids = [torch.arange(*columns, device=weight.device) for columns in self.ranges]
        weight.copy_rows(full_weight, torch.cat(ids))


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


def column_sink(
    target: Tensor, module: CheckpointLinear, order: Tensor | None = None
) -> Tensor | WeightSink:
    """Return the destination of a plain tensor whose rows are the module's output columns.

    order: for each row of the target, the row of the rank's slice that it takes.
    """
    if order is not None:
        return WeightSink.copy_into(
            target,
            lambda tensor: tensor[order],
            ranges=module.ranges,
            total_rows=module.whole_outputs,
        )
    if not module.ranges:
        return target
    return WeightSink.copy_into(target, ranges=module.ranges, total_rows=module.whole_outputs)
