"""Test cases of exchange: a group that plays back what the other ranks send."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


class RecordedGroup:
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

    def close(self) -> None:
        """See RankGroup."""


def exchange_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield groups of equal and of unequal widths, a single row, no row, poisoned columns, and rows
    of which a part is needed."""
    shapes = {
        "two ranks": (5, (16, 16)),
        "three unequal ranks": (7, (24, 16, 16)),
        "one row": (1, (8, 8, 8, 8)),
        "no row": (0, (8, 8)),
        "one rank": (3, (12,)),
    }
    generator = torch.Generator().manual_seed(0)
    for name, (rows, widths) in shapes.items():
        for index in sorted({0, len(widths) - 1}):
            parts = [torch.randn(rows, w, generator=generator).to(dtype) for w in widths]
            parts[0][:1, :1] = torch.nan
            group = RecordedGroup(index, parts)
            arguments = dict(local=parts[index], widths=widths, group=group)
            yield f"{name}, rank {index}", arguments
            needed = torch.arange(rows, dtype=torch.int32) * 5 % (max(widths) + 1)
            yield f"{name}, rank {index}, a part of each row", arguments | {"needed": needed}


def needed_columns(needed: Tensor | None, widths: Sequence[int], rows: int) -> Tensor:
    """Return which columns of the result are defined: [T, N] bool."""
    index = torch.cat([torch.arange(width) for width in widths])
    return index < (torch.full((rows,), max(widths)) if needed is None else needed)[:, None]
