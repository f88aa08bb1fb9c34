"""Contract and reference of exchange."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from lockstep.kernels.exchange.group import RankGroup
from lockstep.kernels.registry import op

Gather = Callable[[Tensor], Tensor]
"""Exchange of certain columns: this rank's [T, n] -> all ranks' [T, N]."""


@op
def exchange(
    local: Tensor, widths: Sequence[int], group: RankGroup, needed: Tensor | None = None
) -> Tensor:
    """Return the columns of all ranks [T, N], in the order of the ranks, on every rank.

    Nothing is added or rounded, so every backend returns the same bits. All ranks of a group call
    the op in the same order and with the same T.

    Args:
        local: [T, n], the columns of this rank: n is widths[group.index].
        widths: number of columns of each rank; their sum is N.
        needed: [T] int32, equal on all ranks: how many leading columns of each rank the caller
            reads from a row, 0 for none. Other columns of the result may hold anything, so that a
            backend need not send them. None: all columns.
    """
    return gather_columns(local, widths, group)


def all_columns(local: Tensor) -> Tensor:
    """Return the columns of the only rank."""
    return local


def gather_columns(
    local: Tensor, widths: Sequence[int], group: RankGroup, needed: Tensor | None = None
) -> Tensor:
    """Gather all columns [T, n] of all ranks through tensors of equal shape: see exchange."""
    widest = max(widths)
    gathered = group.all_gather(pad(local, (0, widest - local.shape[1])))
    if min(widths) == widest:
        return gathered.transpose(0, 1).flatten(1)
    parts = zip(gathered.unbind(0), widths, strict=True)
    return torch.cat([part[:, :width] for part, width in parts], dim=1)
