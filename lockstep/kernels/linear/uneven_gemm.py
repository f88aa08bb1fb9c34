# mypy: ignore-errors
"""Kernel of linear for tiles whose width is a sum of powers of two: 144 = 128 + 16 columns.

Triton's blocks are powers of two wide. 34816 outputs make 272 tiles of 128 columns while 132
multiprocessors hold 264 CTAs, so eight tiles take a wave of their own; tiles of 144 columns are
242. The parts of a tile share the rows of x and have an accumulator each; every output is the same
sum as in dense_gemm.py.
"""

import triton
import triton.language as tl

from lockstep.kernels.device.dependent_launch import pdl_start
from lockstep.kernels.device.swizzle import swizzled_tile
from lockstep.kernels.device.tree_reduction import reduce_partitions


@triton.jit
def _accumulate(
    begin, end, x_desc, w0_desc, w1_desc, w2_desc, m, n,
    BLOCK_M: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr,
    BLOCK_K: tl.constexpr, MIN_WIDTH: tl.constexpr,
):  # fmt: skip
    """Accumulate a tile's three parts over columns begin .. end, ascending: three accumulators.

    A part of width 0 has an accumulator of MIN_WIDTH columns that nothing reads.
    """
    acc0 = tl.zeros((BLOCK_M, N0), tl.float32)
    acc1 = tl.zeros((BLOCK_M, N1 if N1 else MIN_WIDTH), tl.float32)
    acc2 = tl.zeros((BLOCK_M, N2 if N2 else MIN_WIDTH), tl.float32)
    for k in range(begin, end, BLOCK_K):
        # All loads of a stage before its products: the compiler pipelines them together.
        x_tile = x_desc.load([m, k])
        w0_tile = w0_desc.load([n, k])
        if N1:
            w1_tile = w1_desc.load([n + N0, k])
        if N2:
            w2_tile = w2_desc.load([n + N0 + N1, k])
        acc0 = tl.dot(x_tile, w0_tile.T, acc0)
        if N1:
            acc1 = tl.dot(x_tile, w1_tile.T, acc1)
        if N2:
            acc2 = tl.dot(x_tile, w2_tile.T, acc2)
    return acc0, acc1, acc2


@triton.jit
def _store_part(out_ptr, acc, m, n, tokens, N, stride, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr):
    """Store acc [BLOCK_M, WIDTH] at row m and column n of out [tokens, N], rows stride apart."""
    rows = m + tl.arange(0, BLOCK_M)
    columns = n + tl.arange(0, WIDTH)
    mask = (rows < tokens)[:, None] & (columns < N)[None, :]
    out_ptr += rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(out_ptr, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def uneven_gemm_kernel(
    x_desc, w0_desc, w1_desc, w2_desc, out_ptr, tokens, N, K, length, out_stride,
    COUNT: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr,
    BLOCK_K: tl.constexpr, MIN_WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute one tile of out [parts, tokens, N], N0 + N1 + N2 columns wide.

    COUNT: split-K partitions of `length` columns that this CTA adds up.
    """
    pdl_start()
    pid = tl.program_id(0)
    part, m, n = swizzled_tile(pid, tokens, N, GROUP, BLOCK_M, N0 + N1 + N2)
    acc0, acc1, acc2 = reduce_partitions(
        _accumulate,
        (x_desc, w0_desc, w1_desc, w2_desc, m, n, BLOCK_M, N0, N1, N2, BLOCK_K, MIN_WIDTH),
        part * COUNT * length, length, K, COUNT,
    )  # fmt: skip
    out_ptr += part.to(tl.int64) * tokens * N
    _store_part(out_ptr, acc0, m, n, tokens, N, out_stride, BLOCK_M, N0)
    if N1:
        _store_part(out_ptr, acc1, m, n + N0, tokens, N, out_stride, BLOCK_M, N1)
    if N2:
        _store_part(out_ptr, acc2, m, n + N0 + N1, tokens, N, out_stride, BLOCK_M, N2)
