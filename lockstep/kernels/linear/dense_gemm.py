# mypy: ignore-errors
"""Kernels of linear with a dense weight: one CTA per output tile, and the pass that adds partials.

A CTA covers all of K, or a subtree of its split-K partitions; then it leaves an fp32 partial.
"""

import triton
import triton.language as tl

from lockstep.kernels.device.dependent_launch import pdl_start, prefetch_line
from lockstep.kernels.device.swizzle import swizzled_tile
from lockstep.kernels.device.tree_reduction import load_tree_sum, reduce_partitions

PREFETCHED_LINES = tl.constexpr(4)
"""Lines of 128 bytes of each weight row that a CTA prefetches while the previous kernel ends.

Whole steps of one row without prefetches, with 4 and with 8 lines: Qwen3.6-35B-A3B 2.620, 2.573 and
2.601 ms, 27B 13.309, 13.244 and 13.377 (H200, bf16, 2026-11-30).
"""
MAX_PREFETCHING_TOKENS = tl.constexpr(64)
"""Maximum tokens of a tile whose CTA prefetches.

At 64 rows steps of Qwen3.6-27B took 20.70 ms instead of 20.84 (H200, bf16, 2026-11-30). With more
tokens, products take longer than loads; that was not measured.
"""


@triton.jit
def prefetch_rows(row_ptrs, begin, K):
    """Prefetch the first lines of weight rows from column begin on. row_ptrs: [rows], column 0."""
    line = 128 // (row_ptrs.dtype.element_ty.primitive_bitwidth // 8)
    columns = tl.minimum(begin + tl.arange(0, PREFETCHED_LINES) * line, K - 1)
    prefetch_line((row_ptrs[:, None] + columns[None, :]).to(tl.int64))


@triton.jit
def accumulate_dense(
    begin, end, x, weight, row_mask, m, n,
    SWAP: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Accumulate columns begin .. end in ascending order: ([BLOCK_M, BLOCK_N] fp32,).

    Args:
        x, weight: TMA descriptors, read at rows m and n; or, not TMA, pointers to column 0 of the
            tile's rows [BLOCK, BLOCK_K].
        row_mask: [BLOCK_M, 1], rows of x in range (pointers only: TMA fills with zeros).
        SWAP: the weight is the left operand, so that few tokens fill the N side of a wgmma.
        EVEN: BLOCK_K divides the number of columns.
    """
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    for k in range(begin, end, BLOCK_K):
        if TMA:
            x_tile = x.load([m, k])
            w_tile = weight.load([n, k])
        elif EVEN:
            x_tile = tl.load(x + k, mask=row_mask, other=0.0)
            w_tile = tl.load(weight + k)
        else:
            inside = (k + tl.arange(0, BLOCK_K) < end)[None, :]
            x_tile = tl.load(x + k, mask=row_mask & inside, other=0.0)
            w_tile = tl.load(weight + k, mask=inside, other=0.0)
        x_tile = x_tile.to(w_tile.dtype)
        # "ieee": fp32 runs on FMA units; tf32 would round the operands.
        if SWAP:
            acc = tl.dot(w_tile, x_tile.T, acc, input_precision="ieee")
        else:
            acc = tl.dot(x_tile, w_tile.T, acc, input_precision="ieee")
    return (acc.T if SWAP else acc,)


@triton.jit(do_not_specialize=["tokens"])
def dense_gemm_kernel(
    x_ptr, weight_ptr, x_desc, w_desc, out_ptr, tokens, N, K, length,
    x_stride, w_stride, out_stride,
    COUNT: tl.constexpr, GROUP: tl.constexpr,
    SWAP: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one tile of out [parts, tokens, N]; rows are out_stride apart.

    COUNT: split-K partitions of `length` columns that this CTA adds up. x_desc, w_desc: TMA
    descriptors, None without TMA.
    """
    pid = tl.program_id(0)
    part, first_m, first_n = swizzled_tile(pid, tokens, N, GROUP, BLOCK_M, BLOCK_N)
    begin = part * COUNT * length
    m = first_m + tl.arange(0, BLOCK_M)
    n = first_n + tl.arange(0, BLOCK_N)
    row_mask = (m < tokens)[:, None]
    # Weight rows past the end repeat the last one: computed, never stored.
    w_row_ptr = weight_ptr + tl.minimum(n, N - 1).to(tl.int64) * w_stride
    if BLOCK_M <= MAX_PREFETCHING_TOKENS:
        prefetch_rows(w_row_ptr, begin, K)
    pdl_start()
    if not TMA:
        k = tl.arange(0, BLOCK_K)[None, :]
        x_row_ptr = x_ptr + m.to(tl.int64) * x_stride
        x_desc = x_row_ptr[:, None] + k
        w_desc = w_row_ptr[:, None] + k
    (acc,) = reduce_partitions(
        accumulate_dense,
        (x_desc, w_desc, row_mask, first_m, first_n, SWAP, TMA, EVEN, BLOCK_M, BLOCK_N, BLOCK_K),
        begin, length, K, COUNT,
    )  # fmt: skip
    out_ptr += part.to(tl.int64) * tokens * N + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    mask = row_mask & (n < N)[None, :]
    tl.store(out_ptr, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["size"])
def reduce_partials_kernel(
    partials_ptr, out_ptr, size, PARTIALS: tl.constexpr, BLOCK: tl.constexpr
):
    """Add partials [PARTIALS, size] along the tree and round once: out [size]."""
    pdl_start()
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    total = load_tree_sum(partials_ptr, offsets, size.to(tl.int64), mask, PARTIALS)
    tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=mask)
