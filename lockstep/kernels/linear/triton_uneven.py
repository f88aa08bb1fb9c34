# mypy: ignore-errors
"""linear in tiles whose width is no power of two: 144 = 128 + 16 columns, each part summed apart.

Blocks of Triton have powers of two of columns. 34816 outputs make 272 tiles of 128 columns, where
132 multiprocessors hold 264: eight take a turn of their own. Tiles of 144 columns are 242. The
parts of a tile share the rows of x; every output is the same sum as in triton.py.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lockstep.kernels.linear.tuning import Tile

ACCUMULATORS = 192
"""Registers per thread that the sums of a tile's split_k may take."""
LEAST = 16
"""Columns of the narrowest part, and of a part that is not there."""


@triton.jit
def place(pid, tokens, N, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """-> which part of K, first row and first column of program pid's tile.

    Programs walk GROUP row tiles per column tile.
    """
    tiles_m = tl.cdiv(tokens, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    part = pid // (tiles_m * tiles_n)
    inside = pid % (tiles_m * tiles_n)
    first = inside // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    inside = inside % (GROUP * tiles_n)
    return part, (first + inside % height) * BLOCK_M, inside // height * BLOCK_N


@triton.jit
def _segment(
    x, w0, w1, w2, m, n, begin, end,
    BLOCK_M: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr,
    BLOCK_K: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """The accumulators of a tile's three parts over columns begin .. end of K, ascending."""
    a = tl.zeros((BLOCK_M, N0), tl.float32)
    b = tl.zeros((BLOCK_M, N1 if N1 else LEAST), tl.float32)
    c = tl.zeros((BLOCK_M, N2 if N2 else LEAST), tl.float32)
    for at in range(begin, end, BLOCK_K):
        rows = x.load([m, at])
        first = w0.load([n, at])
        if N1:
            second = w1.load([n + N0, at])
        if N2:
            third = w2.load([n + N0 + N1, at])
        a = tl.dot(rows, first.T, a)
        if N1:
            b = tl.dot(rows, second.T, b)
        if N2:
            c = tl.dot(rows, third.T, c)
    return a, b, c


@triton.jit
def _subtree(
    x, w0, w1, w2, m, n, begin, length, K, COUNT: tl.constexpr,
    BLOCK_M: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr,
    BLOCK_K: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """COUNT split_k of `length` columns from `begin` on, added pairwise in registers; the last one
    of K may be shorter."""
    if COUNT == 1:
        end = tl.minimum(begin + length, K)
        return _segment(x, w0, w1, w2, m, n, begin, end, BLOCK_M, N0, N1, N2, BLOCK_K, LEAST)
    else:
        a, b, c = _subtree(
            x, w0, w1, w2, m, n, begin, length, K, COUNT // 2,
            BLOCK_M, N0, N1, N2, BLOCK_K, LEAST,
        )  # fmt: skip
        d, e, f = _subtree(
            x, w0, w1, w2, m, n, begin + COUNT // 2 * length, length, K, COUNT // 2,
            BLOCK_M, N0, N1, N2, BLOCK_K, LEAST,
        )  # fmt: skip
        return a + d, b + e, c + f


@triton.jit
def _store(out, total, m, n, tokens, N, stride, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr):
    """Stores total [BLOCK_M, WIDTH] at row m and column n of out [tokens, N]; stride: of rows."""
    rows = m + tl.arange(0, BLOCK_M)
    columns = n + tl.arange(0, WIDTH)
    live = (rows < tokens)[:, None] & (columns < N)[None, :]
    out += rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(out, total.to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["tokens"])
def _uneven_kernel(
    x, w0, w1, w2, out, tokens, N, K, length, out_stride, COUNT: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr,
    BLOCK_K: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """One tile of out [parts, tokens, N], N0 + N1 + N2 columns wide."""
    part, m, n = place(tl.program_id(0), tokens, N, GROUP, BLOCK_M, N0 + N1 + N2)
    a, b, c = _subtree(
        x, w0, w1, w2, m, n, part * COUNT * length, length, K, COUNT,
        BLOCK_M, N0, N1, N2, BLOCK_K, LEAST,
    )  # fmt: skip
    out += part.to(tl.int64) * tokens * N
    _store(out, a, m, n, tokens, N, out_stride, BLOCK_M, N0)
    if N1:
        _store(out, b, m, n + N0, tokens, N, out_stride, BLOCK_M, N1)
    if N2:
        _store(out, c, m, n + N0 + N1, tokens, N, out_stride, BLOCK_M, N2)


def widths(n: int) -> list[int]:
    """The powers of two that add up to n, largest first: 144 -> [128, 16]."""
    return [1 << bit for bit in reversed(range(n.bit_length())) if n >> bit & 1]


def fits(tile: Tile, count: int) -> bool:
    """Whether this file serves the tile where a program owns `count` split_k."""
    found = widths(tile.n)
    level = count.bit_length()
    return (
        1 < len(found) <= 3
        and found[-1] >= LEAST
        and not tile.swap
        and level * tile.m * tile.n <= ACCUMULATORS * 32 * tile.warps
    )


def launch(
    x: Tensor, weight: Tensor, out: Tensor, count: int, length: int, tile: Tile, group: int
) -> None:
    """Fills out [T, N], or partials [P, T, N] fp32, by a tile that fits."""
    (tokens, k) = x.shape
    n = weight.shape[0]
    n0, n1, n2 = (*widths(tile.n), 0)[:3]
    blocks = ((x, tile.m), (weight, n0), (weight, n1), (weight, n2 or LEAST))
    maps = [TensorDescriptor.from_tensor(t, [rows, tile.k]) for t, rows in blocks]
    programs = triton.cdiv(tokens, tile.m) * triton.cdiv(n, tile.n) * out.numel() // (tokens * n)
    _uneven_kernel[(programs,)](
        *maps, out, tokens, n, k, length, out.stride(-2), count, group,
        tile.m, n0, n1, n2, tile.k, LEAST,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip
