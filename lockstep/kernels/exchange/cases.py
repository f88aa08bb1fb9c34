"""Test cases of exchange: a group that plays back what the other ranks send."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lockstep.kernels.activations import relu2, silu_mul
from lockstep.kernels.exchange.contract import Activation
from lockstep.kernels.exchange.group import RankGroup
from lockstep.kernels.norm import add_rms_norm

SHAPES = {
    "two ranks": (5, (16, 16)),
    "three unequal ranks": (7, (24, 16, 16)),
    "one row": (1, (8, 8, 8, 8)),
    "no row": (0, (8, 8)),
    "one rank": (3, (12,)),
    "odd widths": (2, (3, 5)),
}
"""Rows, and the number of columns of each rank."""


class RecordedGroup(RankGroup):
    """Rank of a group whose other ranks' columns are known: parts [T, n] by rank."""

    def __init__(self, index: int, parts: list[Tensor]) -> None:
        self.index = index
        self.size = len(parts)
        self.parts = parts

    def all_gather(self, local: Tensor) -> Tensor:
        """Return every rank's columns, those of this rank from `local`."""
        width = local.shape[-1]
        padded = [pad(part, (0, width - part.shape[-1])).to(local.device) for part in self.parts]
        padded[self.index] = local
        return torch.stack(padded)


def _groups(dtype: torch.dtype) -> Iterator[tuple[str, list[Tensor], tuple[int, ...], int]]:
    """Yield name, columns by rank, widths, and the first and the last rank."""
    generator = torch.Generator().manual_seed(0)
    for name, (rows, widths) in SHAPES.items():
        for index in sorted({0, len(widths) - 1}):
            parts = [torch.randn(rows, w, generator=generator).to(dtype) for w in widths]
            parts[0][:1, :1] = torch.inf
            yield f"{name}, rank {index}", parts, widths, index


def exchange_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield groups of equal and of unequal widths, a single row, no row, rows of which a part is
    needed, activations and partials."""
    for name, parts, widths, index in _groups(dtype):
        group = RecordedGroup(index, parts)
        arguments = dict(local=parts[index], widths=widths, group=group)
        yield name, arguments
        needed = torch.arange(len(parts[0]), dtype=torch.int32) * 5 % (max(widths) + 1)
        yield f"{name}, a part of each row", arguments | {"needed": needed}
        # The second partial is 0, so that the sum is known.
        partials = torch.stack([parts[index].float(), torch.zeros_like(parts[index]).float()])
        group = RecordedGroup(index, parts)
        yield f"{name}, partials", dict(local=partials, widths=widths, group=group, dtype=dtype)
        for act, inputs in ((silu_mul, [torch.cat([p, p], 1) for p in parts]), (relu2, parts)):
            group = RecordedGroup(index, [act(x) for x in inputs])
            activation = Activation(act.name, act)  # type: ignore[arg-type]  # one of Act
            arguments = dict(local=inputs[index], widths=widths, group=group, dtype=dtype)
            yield f"{name}, {act.name}", arguments | dict(act=activation)


def exchange_traits(**arguments: Any) -> dict[str, Any]:
    """Return the traits of a group: whether GPUs write each other's memory."""
    return dict(peer_access=arguments["group"].peers is not None)


def exchange_add_rms_norm_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the groups of exchange_cases with deltas that are columns or partials."""
    generator = torch.Generator().manual_seed(1)
    for name, parts, widths, index in _groups(dtype):
        x = torch.randn(len(parts[0]), sum(widths), generator=generator).to(dtype)
        weight = torch.randn(sum(widths), generator=generator).to(dtype)
        common = dict(
            x=x, weight=weight, eps=1e-6, offset=1.0, widths=widths, add_norm=add_rms_norm
        )
        group = RecordedGroup(index, parts)
        yield name, dict(delta=parts[index], group=group, **common)
        partials = torch.stack([parts[index].float(), torch.zeros_like(parts[index]).float()])
        yield f"{name}, partials", dict(delta=partials, group=group, **common)


exchange_add_rms_norm_traits = exchange_traits


def needed_columns(needed: Tensor | None, widths: Sequence[int], rows: int) -> Tensor:
    """Return which columns of the result are defined: [T, N] bool."""
    index = torch.cat([torch.arange(width) for width in widths])
    return index < (torch.full((rows,), max(widths)) if needed is None else needed)[:, None]
