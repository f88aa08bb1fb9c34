"""Rings of recent tokens: a token's ring slot is its position modulo the ring's length.

What a recurrent mixer needs of the tokens before a step (raw inputs of its convolution, and what
replays tokens into the state) stays in such rings, one per row. Nothing is moved or cleaned up
after rejected drafts: the next window overwrites them.

A row's state in memory holds its first `folded` tokens, an absolute position; a step replays those
behind it. Where a state may be written, and is rounded if it has 16 bits, is absolute as well: at
multiples of its grid, and at the ends of prompt chunks. So no bit depends on which step wrote it.
"""

import torch
from torch import Tensor

ROUNDING_INTERVAL = 16
"""Tokens from one rounding of a 16-bit state to the next. More tokens would need longer rings and
longer replays; fewer would round more often."""


def state_grid(dtype: torch.dtype) -> int:
    """A state of this dtype is written at multiples of so many tokens. fp32: anywhere."""
    return 1 if dtype == torch.float32 else ROUNDING_INTERVAL


def ring_slots(window: int, before: int) -> int:
    """The length of a ring: a window's tokens never overwrite what is read beside them.

    window: most tokens of a step; before: tokens in front of a window that are read with it: inputs
    of a convolution, or what is replayed.
    """
    return window + before


def max_replayed(window: int, flush: int = 1, grid: int = 1) -> int:
    """The most tokens that a state may lack. flush, grid: as in next_folded.

    Where it lacks as many as the larger of both, one of them ends on the grid, and it is written;
    so a step leaves at most one less of them, and its window.
    """
    return max(flush, grid) - 1 + window


def next_folded(starts: Tensor, folded: Tensor, flush: int, grid: int) -> Tensor:
    """The `folded` that a generated step leaves behind: integers of any shape.

    Where the state lacks at least `flush` of the tokens before starts, the step writes it as it is
    behind the last of them that ends on the grid, if there is one.
    """
    last = starts // grid * grid
    return torch.where((starts - folded >= flush) & (last > folded), last, folded)


def past_slots(position: int, count: int, length: int) -> Tensor:
    """The ring slots of the `count` tokens before `position`, in a ring of `length`: int64."""
    return torch.arange(position - count, position) % length
