# mypy: ignore-errors
"""GEMM with a quantized weight whose tiles the Triton compiler lays out, for any GPU since Ampere.

The weight is the left operand. See quantized.py.
"""

import triton
import triton.language as tl

from lockstep.kernels.device.dependent_launch import pdl_start
from lockstep.kernels.device.swizzle import swizzled_tile
from lockstep.kernels.device.tree_reduction import reduce_partitions
from lockstep.kernels.formats.weights.dequantize_tile import accumulate_partition


@triton.jit
def _accumulate(
    begin, end, weight, rows, x_ptrs, row_mask, FORMAT: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Accumulate one split-K partition. Its last columns are masked inside the loop."""
    acc = accumulate_partition(
        weight, rows, x_ptrs, row_mask, begin, end, FORMAT, EVEN, BLOCK_N, BLOCK_M, BLOCK_K,
        x_ptrs.dtype.element_ty, PEEL_TAIL=False,
    )  # fmt: skip
    return (acc,)


@triton.jit(do_not_specialize=["tokens"])
def quantized_gemm_kernel(
    x_ptr, weight, out_ptr, tokens, N, K, length, x_stride, out_stride,
    COUNT: tl.constexpr, GROUP: tl.constexpr, FORMAT: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one tile of out [parts, tokens, N]; rows are out_stride apart.

    COUNT: split-K partitions of `length` columns that this CTA adds up.
    """
    pdl_start()
    pid = tl.program_id(0)
    part, first_m, first_n = swizzled_tile(pid, tokens, N, GROUP, BLOCK_M, BLOCK_N)
    m = first_m + tl.arange(0, BLOCK_M)
    n = first_n + tl.arange(0, BLOCK_N)
    row_mask = (m < tokens)[:, None]
    # Rows past the end repeat the last one: computed, never stored. That is cheaper than masking.
    rows = tl.minimum(n, N - 1).to(tl.int64)
    x_ptr += m.to(tl.int64)[:, None] * x_stride + tl.arange(0, BLOCK_K)[None, :]
    (acc,) = reduce_partitions(
        _accumulate,
        (weight, rows, x_ptr, row_mask, FORMAT, EVEN, BLOCK_N, BLOCK_M, BLOCK_K),
        part * COUNT * length, length, K, COUNT,
    )  # fmt: skip
    out_ptr += part.to(tl.int64) * tokens * N + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(out_ptr, acc.T.to(out_ptr.dtype.element_ty), mask=row_mask & (n < N)[None, :])
