# mypy: ignore-errors
"""Indices into circular history buffers in Triton: see lockstep.kernels.recurrent.history."""

import triton
import triton.language as tl


@triton.jit
def wrap_index(index, history_len):
    """Wrap an index from -history_len to 2 * history_len - 1 into the buffer."""
    # Two selects: an integer remainder takes some 30 instructions on a GPU.
    index = tl.where(index < 0, index + history_len, index)
    return tl.where(index >= history_len, index - history_len, index)


@triton.jit
def window_index(first, t, history_len, LONG: tl.constexpr):
    """Return the buffer index of token t of a window that begins at index `first`.

    LONG: the window may be longer than the buffer.
    """
    if LONG:
        return (first + t) % history_len
    return wrap_index(first + t, history_len)


@triton.jit
def next_folded(start, folded, flush, state_grid):
    """Return `folded` after a generated step: see lockstep.kernels.recurrent.history."""
    last = start // state_grid * state_grid
    return tl.where((start - folded >= flush) & (last > folded), last, folded)


@triton.jit
def next_index(index, history_len):
    """Return the buffer index of the next token."""
    return tl.where(index + 1 == history_len, 0, index + 1)
