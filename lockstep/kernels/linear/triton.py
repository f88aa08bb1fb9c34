"""linear in Triton: the reduction tree is the op's, the tile is tuned (linear/tuning.py).

A CTA computes one output tile over all of K, or over a subtree of its split-K partitions. In the
second case it leaves an fp32 partial, and the consumer, or a small pass, adds the partials along
the rest of the tree. On Hopper every tile gives the same bits in bf16 and fp16, mma.sync and wgmma
alike, weights on either side; in fp32 the products run on FMA units. See docs/kernels/linear.md.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lockstep.kernels import architecture
from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.integers import ceil_div
from lockstep.kernels.linear import linear, pad_partitions, partition_length
from lockstep.kernels.linear.dense_gemm import dense_gemm_kernel, reduce_partials_kernel
from lockstep.kernels.linear.tuning import Tile, lookup
from lockstep.kernels.linear.uneven_gemm import uneven_gemm_kernel

GROUP = 8
"""Row tiles that share a column tile's weights in L2."""
MAX_ACCUMULATORS = 128
"""Registers per thread that the accumulators of a tree may take: with 192 ptxas spills 144
bytes."""
MAX_UNEVEN_ACCUMULATORS = 192
"""MAX_ACCUMULATORS of the kernel for uneven widths."""
MIN_WIDTH = 16
"""Columns of the narrowest part of an uneven tile."""
FALLBACK_SIDE = 128
"""Rows and columns of the tile that replaces a larger one whose accumulators do not fit."""
REDUCE_BLOCK = 1024
"""Outputs that a CTA of the reduction pass adds."""


def is_tma_aligned(x: Tensor) -> bool:
    """Return whether TMA can read the rows of x: start and strides are multiples of 16 bytes."""
    return x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0


def launch(
    x: Tensor,
    weight: Tensor,
    split_k: int,
    tile: Tile,
    allow_partials: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Run linear with a given tile, which decides the speed and nothing else.

    With `out` every CTA covers all of K: out's rows may be strided, those of partials may not.
    """
    tokens = x.shape[0]
    n = weight.shape[0]
    if not tokens:
        return weight.new_empty(0, n) if out is None else out
    length = partition_length(x.shape[1], split_k)
    even = length % tile.k == 0 or split_k == 1
    tma = tile.tma and even and is_tma_aligned(x) and is_tma_aligned(weight)
    if not tma:  # TMA itself fills columns past K with zeros
        x, weight = pad_partitions(x, weight, split_k)
    tile = _fit_accumulators(replace(tile, tma=tma), split_k, out is None)
    ctas_k = tile.ctas_k
    count = split_k // ctas_k
    if ctas_k > 1:
        out = torch.empty(ctas_k, tokens, n, dtype=torch.float32, device=x.device)
    elif out is None:
        out = weight.new_empty(tokens, n)
    if len(power_of_two_widths(tile.n)) > 1:
        _launch_uneven(x, weight, out, count, length, tile)
    else:
        _launch_even(x, weight, out, count, length, tile)
    return out if allow_partials or ctas_k == 1 else reduce_partials(out, weight.dtype)


def power_of_two_widths(n: int) -> list[int]:
    """Return the powers of two that add up to n, largest first: 144 -> [128, 16]."""
    return [1 << bit for bit in reversed(range(n.bit_length())) if n >> bit & 1]


def _accumulators_fit(tile: Tile, count: int) -> bool:
    """Return whether the accumulators of a tree over `count` partitions fit into registers."""
    widths = power_of_two_widths(tile.n)
    threads = architecture.WARP_SIZE * tile.warps
    accumulators = count.bit_length() * tile.m * tile.n
    if len(widths) == 1:
        return accumulators <= MAX_ACCUMULATORS * threads
    supported = tile.tma and not tile.swap and len(widths) <= 3 and widths[-1] >= MIN_WIDTH
    return supported and accumulators <= MAX_UNEVEN_ACCUMULATORS * threads


def _fit_accumulators(tile: Tile, split_k: int, may_split: bool) -> Tile:
    """Return the tile, or one whose accumulators fit: smaller, or with more CTAs along K.

    may_split: several CTAs may share K. 8,192 tokens, TFLOP/s: 5120 x 6144 with two partitions runs
    at 677 with 128 x 128, at 604 with 128 x 256 whose left subtrees are spilled to memory; with
    four partitions at 450 so. Narrow weights of 27B with four run at 404 with 128 x 96.
    """
    min_ctas = min(tile.ctas_k, split_k) if may_split else 1
    doublings = (split_k // min_ctas).bit_length()
    cta_counts = [min_ctas << i for i in range(doublings)] if may_split else [1]
    m = min(tile.m, FALLBACK_SIDE)
    n = min(tile.n, FALLBACK_SIDE)
    for ctas_k in cta_counts:
        for candidate in (tile, replace(tile, m=m, n=n)):
            if _accumulators_fit(candidate, split_k // ctas_k):
                return replace(candidate, ctas_k=ctas_k)
    n = min(power_of_two_widths(tile.n)[0], FALLBACK_SIDE // 2)
    return replace(tile, m=m, n=n, ctas_k=min_ctas)


def _grid(x: Tensor, weight: Tensor, out: Tensor, tile: Tile) -> tuple[int]:
    """Return the launch grid: one CTA per tile of out [T, N] or of partials [P, T, N]."""
    tokens = x.shape[0]
    n = weight.shape[0]
    parts = out.numel() // (tokens * n)
    return (ceil_div(tokens, tile.m) * ceil_div(n, tile.n) * parts,)


def _launch_even(
    x: Tensor, weight: Tensor, out: Tensor, count: int, length: int, tile: Tile
) -> None:
    """Fill out [T, N], or partials [P, T, N] fp32, with a tile whose width is a power of two."""
    tokens, k = x.shape
    descriptors: list[TensorDescriptor | None] = [None, None]
    if tile.tma:
        blocks = ((x, tile.m), (weight, tile.n))
        descriptors = [TensorDescriptor.from_tensor(t, [rows, tile.k]) for t, rows in blocks]
    dense_gemm_kernel[_grid(x, weight, out, tile)](
        x, weight, *descriptors, out, tokens, weight.shape[0], k, length,
        x.stride(0), weight.stride(0), out.stride(-2), count, GROUP,
        tile.swap, tile.tma, length % tile.k == 0, tile.m, tile.n, tile.k,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip


def _launch_uneven(
    x: Tensor, weight: Tensor, out: Tensor, count: int, length: int, tile: Tile
) -> None:
    """Fill out [T, N], or partials [P, T, N] fp32, with a tile of up to three widths."""
    tokens, k = x.shape
    n0, n1, n2 = (*power_of_two_widths(tile.n), 0)[:3]
    blocks = ((x, tile.m), (weight, n0), (weight, n1), (weight, n2 or MIN_WIDTH))
    descriptors = [TensorDescriptor.from_tensor(t, [rows, tile.k]) for t, rows in blocks]
    uneven_gemm_kernel[_grid(x, weight, out, tile)](
        *descriptors, out, tokens, weight.shape[0], k, length, out.stride(-2), count, GROUP,
        tile.m, n0, n1, n2, tile.k, MIN_WIDTH,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip


def reduce_partials(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """Add partials [P, T, N] fp32 along the tree: [T, N] of dtype."""
    out = torch.empty(partials.shape[1:], dtype=dtype, device=partials.device)
    size = out.numel()
    grid = (ceil_div(size, REDUCE_BLOCK),)
    reduce_partials_kernel[grid](
        partials, out, size, partials.shape[0], REDUCE_BLOCK, enable_fp_fusion=False
    )  # fmt: skip
    return out


def _arch_name(device: torch.device) -> str:
    """Return e.g. "sm90", or "cpu" under Triton's interpreter."""
    return f"sm{architecture.sm_number(device)}" if device.type == "cuda" else device.type


def _supports(**traits: Any) -> str | None:
    return "the weight is quantized" if traits.get("quantized") else gpu_trait(**traits)


@linear.backend("triton", supports=_supports)
def linear_triton(
    x: Tensor,
    weight: Tensor,
    split_k: int = 1,
    allow_partials: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """See lockstep.kernels.linear.contract.linear. Last strides must be 1."""
    n, k = weight.shape
    tile = lookup(x.shape[0], n, k, weight.dtype, _arch_name(x.device), split_k)
    return launch(x, weight, split_k, tile, allow_partials, out)
