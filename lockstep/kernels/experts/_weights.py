# mypy: ignore-errors
"""How a kernel reads the experts' weights: the one place that knows how they are stored."""

import triton
import triton.language as tl


@triton.jit
def load_weight_tile(
    weight, rows, live, at, K, EVEN: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Columns at .. at + BLOCK_K of `rows` [R] int64 of a weight [E * N, K] -> [R, BLOCK_K], 0 in
    rows that are not `live` and past K.

    Row n of expert e is e * N + n. EVEN: K is a multiple of BLOCK_K.
    """
    columns = at + tl.arange(0, BLOCK_K)
    mask = live[:, None]
    if not EVEN:
        mask = mask & (columns < K)[None, :]
    return tl.load(weight + rows[:, None] * K + columns[None, :], mask=mask, other=0.0)
