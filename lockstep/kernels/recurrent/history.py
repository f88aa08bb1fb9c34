"""Circular history buffers: recent tokens of a row, stored at position modulo buffer length.

A recurrent mixer needs recent tokens twice: raw inputs for its convolution, and (u, k, decay) to
replay tokens into the state. A step overwrites the oldest entries and nothing is ever moved. So
rejected drafts need no rewind: the next window overwrites them.

A row's state in memory includes its first `folded` tokens, an absolute position. A step replays the
tokens from there on. Where a state may be written, and is rounded if it has 16 bits, is absolute
too: at multiples of its grid, and at the ends of prompt chunks. So no bit depends on which step
wrote it.
"""

import torch
from torch import Tensor

ROUNDING_INTERVAL = 16
"""Tokens between two roundings of a 16-bit state. A larger interval needs longer histories and
replays; a smaller one rounds more often."""


def state_grid(dtype: torch.dtype) -> int:
    """Return the interval, in tokens, at which a state may be written: 1 for fp32."""
    return 1 if dtype == torch.float32 else ROUNDING_INTERVAL


def history_length(window: int, before: int) -> int:
    """Return the length of a history in which a window never overwrites what it still reads.

    window: maximum tokens of a step. before: tokens before a window that the step reads, for its
    convolution or to replay them.
    """
    return window + before


def max_replayed(window: int, flush: int = 1, grid: int = 1) -> int:
    """Return the maximum number of tokens that a state may lack. flush, grid: see next_folded."""
    # A state that lacks max(flush, grid) tokens has a grid point among them, so it is written. A
    # step therefore leaves at most one token less, plus its own window.
    return max(flush, grid) - 1 + window


def next_folded(starts: Tensor, folded: Tensor, flush: int, grid: int) -> Tensor:
    """Return `folded` after a generated step.

    starts: position of each window's first token. folded: leading tokens that the stored state
    contains. Both are integers of the same shape. flush: missing tokens from which on a step writes
    the state. grid: state_grid() of the state's dtype.

    If the state lacks `flush` or more of the tokens before starts, the step writes the state as of
    the last multiple of the grid, if that is later than `folded`.
    """
    last = starts // grid * grid
    return torch.where((starts - folded >= flush) & (last > folded), last, folded)


def folded_after(
    starts: Tensor, folded: Tensor, flush: int, grid: int, committed: Tensor | None
) -> Tensor:
    """Return `folded` after a generated step, some of whose tokens may be committed already.

    committed: number of leading tokens of each window that are certain to stay. With it the step
    also writes states inside of its window, and `flush` is not read. The state then lacks only the
    tokens after the last multiple of the grid. None: see next_folded.
    """
    if committed is None:
        return next_folded(starts, folded, flush, grid)
    return next_folded(starts + committed, folded, 1, grid)


def past_indices(position: int, count: int, length: int) -> Tensor:
    """Return the int64 indices of the `count` tokens before `position` in a history of `length`."""
    return torch.arange(position - count, position) % length
