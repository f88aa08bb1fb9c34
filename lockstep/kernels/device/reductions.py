# mypy: ignore-errors
"""Sums of rows in an order that the source fixes, whatever layout the compiler picks."""

import triton
import triton.language as tl

LANES: tl.constexpr = tl.constexpr(2048)
"""Elements that 8 warps load at once: a load of 16 bytes (8 elements of 16 bits) per thread."""
WARPS: tl.constexpr = tl.constexpr(8)
"""Warps of a CTA with a wide row. Every thread reads and adds all of their sums: one barrier."""


@triton.jit
def pairwise_sum(x):
    """Sum rows of x [n, m] -> [n] as a binary tree of neighbours; m is a power of 2 up to 256."""
    # Each tl.sum adds two numbers only. So neither the layout nor the number of warps, both chosen
    # by the compiler, can change the order.
    for _ in tl.static_range(8):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), 2)
    return tl.reshape(x, (x.shape[0],))


@triton.jit
def row_sum(x):
    """Sum x [m] fp32, m a power of 2: add halves down to LANES, then neighbours.

    This is a fixed lane layout: a thread adds its own loads first, then the elements of its
    vector, then come exchanges between lanes and last those between warps.
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
    """Sum the rows of x [n, m] fp32 -> [n], each with row_sum's tree; m is a power of 2."""
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
    """Return 1 / rms of rows of D elements from their sums of squares."""
    return 1.0 / tl.sqrt_rn(squares / D + eps)


@triton.jit
def spread(ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return column offsets [ROWS, BLOCK], equal in every row."""
    # Loads through these offsets hit L1. Offsets [1, BLOCK] would be loaded once and then be
    # broadcast through shared memory.
    return tl.broadcast_to(tl.arange(0, BLOCK)[None], (ROWS, BLOCK))
