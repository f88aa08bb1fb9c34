# mypy: ignore-errors
"""The kernel of linear with a packed weight: weights are the left operand. See packed.py."""

import triton
import triton.language as tl

from lockstep.kernels.formats.weights.dequantize_tile import chain
from lockstep.kernels.linear.triton_uneven import place


@triton.jit
def _subtree(
    x, weight, live, rows, begin, length, K, COUNT: tl.constexpr, FORM: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """COUNT split_k of `length` columns from `begin` on, added pairwise in registers; the last one
    of K may be shorter."""
    if COUNT == 1:
        return chain(
            weight, rows, x, live, begin, tl.minimum(begin + length, K), FORM, EVEN,
            BLOCK_N, BLOCK_M, BLOCK_K, DTYPE, APART=False,
        )  # fmt: skip
    else:
        left = _subtree(
            x, weight, live, rows, begin, length, K, COUNT // 2, FORM, EVEN,
            BLOCK_M, BLOCK_N, BLOCK_K, DTYPE,
        )  # fmt: skip
        right = _subtree(
            x, weight, live, rows, begin + COUNT // 2 * length, length, K, COUNT // 2, FORM,
            EVEN, BLOCK_M, BLOCK_N, BLOCK_K, DTYPE,
        )  # fmt: skip
        return left + right


@triton.jit(do_not_specialize=["tokens"])
def packed_kernel(
    x, weight, out, tokens, N, K, length, x_stride, out_stride,
    COUNT: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One tile of out [parts, tokens, N], rows out_stride apart.

    Rows of the weight past its end are copies of the last one: computed and not stored.
    """
    part, row_m, row_n = place(tl.program_id(0), tokens, N, GROUP, BLOCK_M, BLOCK_N)
    m = row_m + tl.arange(0, BLOCK_M)
    n = row_n + tl.arange(0, BLOCK_N)
    live = (m < tokens)[:, None]
    rows = tl.minimum(n, N - 1).to(tl.int64)
    x += m.to(tl.int64)[:, None] * x_stride + tl.arange(0, BLOCK_K)[None, :]
    total = _subtree(
        x, weight, live, rows, part * COUNT * length, length, K, COUNT, FORM, EVEN,
        BLOCK_M, BLOCK_N, BLOCK_K, DTYPE,
    )  # fmt: skip
    out += part.to(tl.int64) * tokens * N + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(out, total.T.to(out.dtype.element_ty), mask=live & (n < N)[None, :])
