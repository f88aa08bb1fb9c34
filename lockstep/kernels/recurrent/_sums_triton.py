# mypy: ignore-errors
"""A sum whose order the source fixes, whatever layout the compiler gives to its numbers."""

import triton
import triton.language as tl


@triton.jit
def pairwise_sum(x):
    """x [n, m] -> [n], m a power of 2, up to 256: neighbours are added, then those sums, and so on.

    Each step adds two numbers, so neither a layout nor a number of warps can change the order.
    """
    for _ in tl.static_range(8):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), 2)
    return tl.reshape(x, (x.shape[0],))
