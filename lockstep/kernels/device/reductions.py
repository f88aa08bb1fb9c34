# mypy: ignore-errors
"""Sums of rows in an order that the source fixes, whatever layout the compiler picks."""

import triton
import triton.language as tl

LANES: tl.constexpr = tl.constexpr(2048)
"""Numbers that 8 warps load at once: eight 16-bit ones, a load of 16 bytes, in each thread."""
WARPS: tl.constexpr = tl.constexpr(8)
"""Warps of a wide row. Their sums are read and added by every thread: one barrier in all."""


@triton.jit
def pairwise_sum(x):
    """x [n, m] -> [n], m a power of 2, up to 256: neighbours are added, then those sums, and so on.

    Each step adds two numbers, so neither a layout nor a number of warps can change the order.
    """
    for _ in tl.static_range(8):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), 2)
    return tl.reshape(x, (x.shape[0],))


@triton.jit
def row_sum(x):
    """x [a power of two] fp32 -> its sum: halves are added down to LANES, then neighbours.

    A thread adds its own loads and its own vector, then lanes, then warps exchange.
    """
    SIZE: tl.constexpr = x.shape[0]
    if SIZE > LANES:
        return row_sum(tl.sum(tl.reshape(x, (2, SIZE // 2)), 0))
    elif SIZE > WARPS:
        return row_sum(tl.sum(tl.reshape(x, (SIZE // 2, 2)), 1))
    elif SIZE > 1:
        even, odd = tl.split(tl.reshape(x, (SIZE // 2, 2)))
        return row_sum(even + odd)
    else:
        return tl.sum(x, 0)


@triton.jit
def row_sums(x):
    """x [rows, a power of two] fp32 -> [rows]: row_sum's tree for every row."""
    ROWS: tl.constexpr = x.shape[0]
    SIZE: tl.constexpr = x.shape[1]
    if SIZE > LANES:
        return row_sums(tl.sum(tl.reshape(x, (ROWS, 2, SIZE // 2)), 1))
    elif SIZE > 1:
        return row_sums(tl.sum(tl.reshape(x, (ROWS, SIZE // 2, 2)), 2))
    else:
        return tl.reshape(x, (ROWS,))


@triton.jit
def inverse_rms(squares, eps, D: tl.constexpr):
    """1 / rms of rows of D numbers, from the sums of their squares."""
    return 1.0 / tl.sqrt_rn(squares / D + eps)


@triton.jit
def spread(ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The lanes of every row [ROWS, BLOCK]. What rows share is loaded by each of them so: it comes
    from L1, where a vector [1, BLOCK] would have to change hands in shared memory."""
    return tl.broadcast_to(tl.arange(0, BLOCK)[None], (ROWS, BLOCK))
