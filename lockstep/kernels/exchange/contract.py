"""Contract and reference of exchange."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from lockstep.kernels.activations import Act
from lockstep.kernels.exchange.group import RankGroup
from lockstep.kernels.linear import tree_sum
from lockstep.kernels.registry import op

Gather = Callable[[Tensor], Tensor]
"""Exchange of certain columns: this rank's [T, n] -> all ranks' [T, N]."""

AddNorm = Callable[[Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor]]
"""Backend of lockstep.kernels.norm.add_rms_norm."""


@dataclass(frozen=True)
class Activation:
    """Activation that makes a rank's columns: name of its op, and the backend that runs it."""

    name: Act
    run: Callable[[Tensor], Tensor]


@op(needed_for="several ranks")
def exchange(
    local: Tensor,
    widths: Sequence[int],
    group: RankGroup,
    dtype: torch.dtype | None = None,
    act: Activation | None = None,
    needed: Tensor | None = None,
) -> Tensor:
    """Return the columns of all ranks [T, N], in the order of the ranks, on every rank.

    Nothing is added across ranks or rounded again, so every backend returns the same bits. All
    ranks of a group call the op in the same order and with the same T.

    Args:
        local: [T, n], the columns of this rank: n is widths[group.index]. Or split-K partials
            [P, T, n] fp32, whose tree_sum is rounded to dtype. Or the input of `act`.
        widths: number of columns of each rank; their sum is N.
        dtype: of the columns; None for that of `local`.
        needed: [T] int32, equal on all ranks: how many leading columns of each rank the caller
            reads from a row, 0 for none. Other columns of the result may hold anything, so that a
            backend need not send them. None: all columns.
    """
    if local.dim() == 3:
        local = tree_sum(local).to(dtype)
    return gather_columns(local if act is None else act.run(local), widths, group)


@op(needed_for="several ranks")
def exchange_add_rms_norm(
    x: Tensor,
    delta: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    widths: Sequence[int],
    group: RankGroup,
    add_norm: AddNorm,
) -> tuple[Tensor, Tensor]:
    """Add delta to x and norm the sum: add_rms_norm(x, exchange(delta), ...), sum and norm [T, D].

    Args:
        delta: [T, n], the columns of this rank, or their split-K partials [P, T, n] fp32.
        widths: number of columns of each rank.
        add_norm: backend of add_rms_norm that serves the layer.
    """
    return add_norm(x, exchange(delta, widths, group, x.dtype), weight, eps, offset)


def all_columns(local: Tensor) -> Tensor:
    """Return the columns of the only rank."""
    return local


def gather_columns(local: Tensor, widths: Sequence[int], group: RankGroup) -> Tensor:
    """Gather all columns [T, n] of all ranks through tensors of equal shape."""
    widest = max(widths)
    gathered = group.all_gather(pad(local, (0, widest - local.shape[1])))
    if min(widths) == widest:
        return gathered.transpose(0, 1).flatten(1)
    parts = zip(gathered.unbind(0), widths, strict=True)
    return torch.cat([part[:, :width] for part, width in parts], dim=1)
