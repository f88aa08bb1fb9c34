# mypy: ignore-errors
"""linear in Triton: the tree is the op's, the tile is tuned (lockstep.kernels.linear.tuning).

A program makes one tile of the output, over all of K or over a subtree of its split_k; in the
second case it leaves an fp32 partial, and the reader, or a small pass, adds the partials along the
rest of the tree. Tiles whose width is no power of two are made in triton_uneven.py.
On Hopper every tile gives the same bits in bf16 and fp16, mma.sync and wgmma alike, weights on
either side; in fp32 the products run on the FMA units. See docs/kernels/linear.md.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lockstep.kernels import architecture
from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.linear import linear, pad_partitions, partition_length, triton_uneven
from lockstep.kernels.linear.triton_uneven import place, widths
from lockstep.kernels.linear.tuning import Tile, lookup

GROUP = 8
"""Row tiles that share a column tile's weights in L2."""
ACCUMULATORS = 128
"""Registers per thread that the sums of a tree may take: ptxas spills 144 bytes with 192."""
SQUARE = 128
"""Rows and columns of the tile that stands for a larger one whose sums do not fit."""
FOLD = 1024
"""Numbers that a program of the second pass adds."""


@triton.jit
def partition_product(
    x, weight, live, m, n, begin, end,
    SWAP: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One accumulator over columns begin .. end, ascending: [BLOCK_M, BLOCK_N] fp32.

    x and weight are descriptors, or pointers to column 0 of the block's rows; live [BLOCK_M, 1]
    says which rows of x there are.
    """
    total = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    for at in range(begin, end, BLOCK_K):
        if TMA:
            a = x.load([m, at])
            w = weight.load([n, at])
        elif EVEN:
            a = tl.load(x + at, mask=live, other=0.0)
            w = tl.load(weight + at)
        else:
            inside = (at + tl.arange(0, BLOCK_K) < end)[None, :]
            a = tl.load(x + at, mask=live & inside, other=0.0)
            w = tl.load(weight + at, mask=inside, other=0.0)
        a = a.to(w.dtype)
        if SWAP:
            total = tl.dot(w, a.T, total, input_precision="ieee")
        else:
            total = tl.dot(a, w.T, total, input_precision="ieee")
    return total.T if SWAP else total


@triton.jit
def _subtree(
    x, weight, live, m, n, begin, length, K, COUNT: tl.constexpr,
    SWAP: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """COUNT split_k of `length` columns from `begin` on, added pairwise in registers; the last one
    of K may be shorter."""
    if COUNT == 1:
        return partition_product(
            x, weight, live, m, n, begin, tl.minimum(begin + length, K),
            SWAP, TMA, EVEN, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        left = _subtree(
            x, weight, live, m, n, begin, length, K, COUNT // 2,
            SWAP, TMA, EVEN, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        right = _subtree(
            x, weight, live, m, n, begin + COUNT // 2 * length, length, K, COUNT // 2,
            SWAP, TMA, EVEN, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        return left + right


@triton.jit(do_not_specialize=["tokens"])
def _linear_kernel(
    x, weight, x_map, w_map, out, tokens, N, K, length, x_stride, w_stride, out_stride,
    COUNT: tl.constexpr, GROUP: tl.constexpr,
    SWAP: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of out [parts, tokens, N], rows out_stride apart.

    Rows of the weight past its end are copies of the last one: computed and not stored.
    """
    pid = tl.program_id(0)
    part, row_m, row_n = place(pid, tokens, N, GROUP, BLOCK_M, BLOCK_N)
    begin = part * COUNT * length
    m = row_m + tl.arange(0, BLOCK_M)
    n = row_n + tl.arange(0, BLOCK_N)
    live = (m < tokens)[:, None]
    to_n = weight + tl.minimum(n, N - 1).to(tl.int64) * w_stride
    if not TMA:
        k = tl.arange(0, BLOCK_K)[None, :]
        to_m = x + m.to(tl.int64) * x_stride
        x_map = to_m[:, None] + k
        w_map = to_n[:, None] + k
    total = _subtree(
        x_map, w_map, live, row_m, row_n, begin, length, K, COUNT,
        SWAP, TMA, EVEN, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    out += part.to(tl.int64) * tokens * N + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    mask = live & (n < N)[None, :]
    tl.store(out, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def tree_load(parts, at, size, live, COUNT: tl.constexpr):
    """The sum of COUNT partials, `size` numbers apart, pairwise: tree_sum of those at `at`."""
    if COUNT == 1:
        return tl.load(parts + at, mask=live, other=0.0)
    else:
        left = tree_load(parts, at, size, live, COUNT // 2)
        right = tree_load(parts + COUNT // 2 * size, at, size, live, COUNT // 2)
        return left + right


@triton.jit(do_not_specialize=["size"])
def _fold_kernel(parts, out, size, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """out [size] = parts [SPLIT, size] along the tree, rounded once."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tree_load(parts, at, size.to(tl.int64), at < size, SPLIT)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < size)


def aligned(x: Tensor) -> bool:
    """Whether the bulk copy engine can read these rows: 16-byte strides and start."""
    return x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0


def launch(
    x: Tensor,
    weight: Tensor,
    split_k: int,
    tile: Tile,
    allow_partials: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """linear by a given tile. The tile decides the speed and nothing else.

    Programs that fill `out` share no K: its rows may be strided, a second pass's may not.
    """
    tokens = x.shape[0]
    n = weight.shape[0]
    if not tokens:
        return weight.new_empty(0, n) if out is None else out
    length = partition_length(x.shape[1], split_k)
    whole = length % tile.k == 0 or split_k == 1
    tma = tile.tma and whole and aligned(x) and aligned(weight)
    if not tma:  # its copies are zeros behind K
        x, weight = pad_partitions(x, weight, split_k)
    tile = _fitting(replace(tile, tma=tma), split_k, out is None)
    split = tile.split
    count = split_k // split
    if split > 1:
        out = torch.empty(split, tokens, n, dtype=torch.float32, device=x.device)
    elif out is None:
        out = weight.new_empty(tokens, n)
    if len(widths(tile.n)) > 1:
        triton_uneven.launch(x, weight, out, count, length, tile, GROUP)
    else:
        _launch_even(x, weight, out, count, length, tile)
    return out if allow_partials or split == 1 else fold(out, weight.dtype)


def _fits(tile: Tile, count: int) -> bool:
    """Whether the sums of `count` split_k, walked as a tree, stay in registers."""
    if len(widths(tile.n)) > 1:
        return tile.tma and triton_uneven.fits(tile, count)
    return count.bit_length() * tile.m * tile.n <= ACCUMULATORS * 32 * tile.warps


def _fitting(tile: Tile, split_k: int, shared: bool) -> Tile:
    """The tile, or one whose sums fit: smaller, or with more programs along K where they share it.

    8,192 tokens, TFLOP/s: 5120 x 6144 in two split_k runs at 677 with 128 x 128, at 604 with
    128 x 256 whose left halves wait in memory; in four at 450 so. Narrow weights of 27B in four run
    at 404 with 128 x 96.
    """
    least = min(tile.split, split_k) if shared else 1
    splits = [least << i for i in range((split_k // least).bit_length())] if shared else [1]
    high = min(tile.m, SQUARE)
    wide = min(tile.n, SQUARE)
    for split in splits:
        for other in (tile, replace(tile, m=high, n=wide)):
            if _fits(other, split_k // split):
                return replace(other, split=split)
    return replace(tile, m=high, n=min(widths(tile.n)[0], SQUARE // 2), split=least)


def _launch_even(
    x: Tensor, weight: Tensor, out: Tensor, count: int, length: int, tile: Tile
) -> None:
    """Fills out [T, N], or partials [P, T, N] fp32."""
    (tokens, k) = x.shape
    n = weight.shape[0]
    programs = triton.cdiv(tokens, tile.m) * triton.cdiv(n, tile.n) * out.numel() // (tokens * n)
    maps: list[TensorDescriptor | None] = [None, None]
    if tile.tma:
        blocks = ((x, tile.m), (weight, tile.n))
        maps = [TensorDescriptor.from_tensor(t, [rows, tile.k]) for t, rows in blocks]
    _linear_kernel[(programs,)](
        x, weight, *maps, out, tokens, n, k, length, x.stride(0), weight.stride(0),
        out.stride(-2), count, GROUP, tile.swap, tile.tma, length % tile.k == 0,
        tile.m, tile.n, tile.k,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip


def fold(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Partials [P, T, N] fp32 -> [T, N], for a reader that does not add."""
    out = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    size = out.numel()
    grid = (triton.cdiv(size, FOLD),)
    _fold_kernel[grid](parts, out, size, parts.shape[0], FOLD, enable_fp_fusion=False)
    return out


def _arch(device: torch.device) -> str:
    """E.g. "sm90"; "cpu" under the interpreter."""
    return f"sm{architecture.sm_number(device)}" if device.type == "cuda" else device.type


def _supports(**traits: Any) -> str | None:
    return "the weight is packed" if traits.get("quantized") else gpu_trait(**traits)


@linear.backend("triton", supports=_supports)
def linear_triton(
    x: Tensor,
    weight: Tensor,
    split_k: int = 1,
    allow_partials: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """See lockstep.kernels.linear.linear. Last strides must be 1."""
    tile = lookup(x.shape[0], *weight.shape, weight.dtype, _arch(x.device))
    return launch(x, weight, split_k, tile, allow_partials, out)
