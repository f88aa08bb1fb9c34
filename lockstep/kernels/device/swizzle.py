# mypy: ignore-errors
"""Order in which the CTAs of a GEMM walk over its output tiles."""

import triton
import triton.language as tl


@triton.jit
def swizzled_tile(
    pid, tokens, N, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return (split-K part, first row, first column) of the output tile of CTA `pid`.

    Successive CTAs take GROUP row tiles of one column tile, so that these share its weights in L2.
    """
    tiles_m = tl.cdiv(tokens, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    part = pid // (tiles_m * tiles_n)
    index = pid % (tiles_m * tiles_n)
    first_m = index // (GROUP * tiles_n) * GROUP
    group_m = tl.minimum(tiles_m - first_m, GROUP)
    index = index % (GROUP * tiles_n)
    return part, (first_m + index % group_m) * BLOCK_M, index // group_m * BLOCK_N
