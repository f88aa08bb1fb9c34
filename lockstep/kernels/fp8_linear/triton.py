"""quantize_rows, its fused forms and fp8_linear in Triton.

Rows are quantized by a separate launch: with one scale per row, a prologue of the product would
read the whole row in every CTA before its first product. See docs/kernels/fp8_linear.md.

hopper.py has the product on Hopper, and triton.py that of weights which it does not fit.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lockstep.kernels.architecture import fit_stages
from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.compile_target import NATIVE_FP8, CompileTarget, compile_target
from lockstep.kernels.formats.weights import K_BLOCK, Fp8Weight, words_per_row
from lockstep.kernels.fp8_linear import (
    QuantizedRows,
    fp8_linear,
    quantize_add_rms_norm,
    quantize_rows,
    quantize_silu_mul,
)
from lockstep.kernels.fp8_linear.kernels import (
    fp8_gemm_kernel,
    quantize_add_rms_norm_kernel,
    quantize_rows_kernel,
    quantize_silu_mul_kernel,
)
from lockstep.kernels.integers import ceil_div, next_power_of_2
from lockstep.kernels.linear import partition_length
from lockstep.kernels.linear.triton import reduce_partials
from lockstep.kernels.norm.triton import norm_trait, row_layout, row_view

GROUP = 8
"""Row tiles that share a column tile's weights in L2."""
ROW_BLOCKS = 32
"""Blocks of 128 columns of a row that a CTA loads at once, with one scale per row."""
ROW_WARPS = 8
SCALED_BLOCKS = 8
"""Blocks of 128 columns per CTA, with a scale per block: 32 take 1.5 times as long on an H200."""
SCALE_ALIGNMENT = 32
"""Tokens between whose multiples the scales of a block begin: 128 bytes, for TMA."""
BLOCKS_PER_WARP = 2
"""SCALED_BLOCKS per warp of a CTA: 8 values per thread, one load of 16 bytes."""


@dataclass(frozen=True)
class Fp8Tile:
    """Tile of m tokens and n outputs. By the op's definition its size changes no bit.

    splits: a CTA computes one split-K partition, and a second pass adds the partitions. Otherwise
    it computes all of them.
    """

    m: int
    n: int
    warps: int
    stages: int
    splits: bool = True


SMALL = (Fp8Tile(16, 64, 4, 8), Fp8Tile(32, 64, 4, 7), Fp8Tile(64, 64, 4, 6))
"""Tiles of up to 64 tokens, by ascending m."""
LARGE = Fp8Tile(64, 256, 8, 4, splits=False)
"""4.5 to 5.3 ms of gate_up at 8,192 tokens on an H200, where 128 x 128 takes 7.3."""
LARGE_TREE = Fp8Tile(64, 128, 8, 5, splits=False)
"""Tile of more registers per output: a tree over 4 partitions keeps three accumulators and a
block's sum, and operands in fp16 pass through registers."""


def is_native(target: CompileTarget) -> bool:
    """Return whether the product of e4m3 operands is compiled; otherwise it runs in fp16."""
    return target.inline_ptx and target.arch >= NATIVE_FP8


def choose_tile(tokens: int, split_k: int, may_split: bool, target: CompileTarget) -> Fp8Tile:
    """Return the tile. may_split: the partials may be written to memory."""
    tile = LARGE if split_k == 1 and is_native(target) else LARGE_TREE
    if may_split or split_k == 1:
        tile = next((small for small in SMALL if tokens <= small.m), tile)
    stage_bytes = (tile.m + tile.n) * K_BLOCK
    return replace(tile, stages=fit_stages(tile.stages, stage_bytes, 0, target.arch))


def divide_row(k: int) -> tuple[int, int, int]:
    """Return (blocks of a CTA, its warps, CTAs of a row of k columns) with a scale per block."""
    row_blocks = ceil_div(k, K_BLOCK)
    blocks = min(SCALED_BLOCKS, next_power_of_2(row_blocks))
    return blocks, max(blocks // BLOCKS_PER_WARP, 1), ceil_div(row_blocks, blocks)


@quantize_rows.backend("triton", supports=gpu_trait)
def quantize_rows_triton(x: Tensor, block_k: int) -> tuple[Tensor, Tensor]:
    """See lockstep.kernels.fp8_linear.contract.quantize_rows. block_k is K_BLOCK, or K or more."""
    tokens, k = x.shape
    by_block = block_k < k
    assert not by_block or block_k == K_BLOCK, "checkpoints have blocks of 128 columns"
    rows = _Rows(tokens, k, block_k, x.device)
    if by_block:
        blocks, warps, ctas = divide_row(k)
    else:
        blocks = min(ROW_BLOCKS, next_power_of_2(ceil_div(k, K_BLOCK)))
        warps = ROW_WARPS
        ctas = 1
    if tokens:
        quantize_rows_kernel[(tokens, ctas)](
            x, rows.words, rows.scales, k, rows.words.shape[1], x.stride(0), *rows.scales.shape,
            by_block, blocks, rows.native, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return rows.result()


class _Rows:
    """Memory of the codes and scales of rows [tokens, k]; see quantize_rows.

    The scales of a block are next to each other: a product reads those of its tokens.
    """

    def __init__(self, tokens: int, k: int, block_k: int, device: torch.device) -> None:
        padded = ceil_div(tokens, SCALE_ALIGNMENT) * SCALE_ALIGNMENT
        self.tokens = tokens
        self.words = torch.empty(tokens, words_per_row(k, 8), dtype=torch.int32, device=device)
        self.scales = torch.empty(ceil_div(k, block_k), padded, device=device)
        self.native = is_native(compile_target(device))

    def result(self) -> tuple[Tensor, Tensor]:
        """Return words and scales as quantize_rows does."""
        return self.words, self.scales[:, : self.tokens].t()


@quantize_silu_mul.backend("triton", supports=gpu_trait)
def quantize_silu_mul_triton(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """See lockstep.kernels.fp8_linear.contract.quantize_silu_mul."""
    tokens, width = gate_up.shape
    inner = width // 2
    rows = _Rows(tokens, inner, K_BLOCK, gate_up.device)
    blocks, warps, ctas = divide_row(inner)
    if tokens:
        quantize_silu_mul_kernel[(tokens, ctas)](
            gate_up, rows.words, rows.scales, inner, rows.words.shape[1], gate_up.stride(0),
            *rows.scales.shape, blocks, rows.native, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return rows.result()


@quantize_add_rms_norm.backend("triton", supports=norm_trait)
def quantize_add_rms_norm_triton(
    x: Tensor,
    delta: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
    keeps_norm: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """See lockstep.kernels.fp8_linear.contract.quantize_add_rms_norm. Partials are contiguous."""
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    norm = torch.empty_like(total) if keeps_norm else None
    tokens, width = x.shape
    rows = _Rows(tokens, width, K_BLOCK, x.device)
    strided, inner, *strides = row_view(x)
    parts = delta if delta.dim() > x.dim() else delta[None]
    first, _, *part_strides = row_view(parts[0])
    layout = row_layout(width)
    layout["BLOCK"] = max(layout["BLOCK"], K_BLOCK)
    if tokens:
        quantize_add_rms_norm_kernel[(tokens,)](
            strided, first, weight, total, norm, rows.words, rows.scales, inner, *strides,
            parts.stride(0), *part_strides, eps, offset, rows.words.shape[1], *rows.scales.shape,
            PARTS=parts.shape[0], KEEPS_NORM=keeps_norm, NATIVE=rows.native, **layout,
        )  # fmt: skip
    return total, norm, *rows.result()


def rows_of(x: Tensor | QuantizedRows, block_k: int) -> tuple[Tensor, Tensor]:
    """Return words and scales of rows: those of their producer, or of a launch."""
    if isinstance(x, QuantizedRows):
        assert block_k == K_BLOCK, "producers have a scale per block"
        return x.words, x.scales
    return quantize_rows_triton(x, block_k)


def launch(
    x: Tensor | QuantizedRows,
    weight: Fp8Weight,
    split_k: int,
    tile: Fp8Tile,
    target: CompileTarget,
    out: Tensor,
) -> None:
    """Fill out [T, N], or partials [split_k, T, N] fp32 where the tile splits."""
    tokens, k = x.shape
    n = weight.shape[0]
    words, scales = rows_of(x, weight.block_k)
    native = is_native(target)
    dtype = torch.float8_e4m3fn if native else torch.uint8
    parts = out.numel() // (tokens * n)
    grid = (ceil_div(tokens, tile.m) * ceil_div(n, tile.n) * parts,)
    fp8_gemm_kernel[grid](
        words.view(dtype), weight.words.view(dtype), scales, weight.scales, out, tokens, n, k,
        partition_length(k, split_k), 4 * words.shape[1], weight.first, scales.stride(1),
        weight.scales.stride(0), out.stride(-2), split_k // parts, GROUP, weight.block_n,
        weight.block_k < k, native, tile.m, tile.n,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip


def run_kernel(
    fill: Callable[[Tensor], None],
    x: Tensor | QuantizedRows,
    n: int,
    num_partials: int,
    allow_partials: bool,
    out: Tensor | None,
) -> Tensor:
    """Return what fp8_linear returns, from a launch of a kernel.

    fill: launches it into the result [T, n], or with num_partials > 1 into partials
    [num_partials, T, n] fp32.
    """
    tokens = len(x)
    if tokens and num_partials > 1:
        partials = torch.empty(num_partials, tokens, n, dtype=torch.float32, device=x.device)
        fill(partials)
        return partials if allow_partials else reduce_partials(partials, x.dtype)
    y = torch.empty(tokens, n, dtype=x.dtype, device=x.device) if out is None else out
    if tokens:
        fill(y)
    return y


@fp8_linear.backend("triton", supports=gpu_trait)
def fp8_linear_triton(
    x: Tensor | QuantizedRows,
    weight: Fp8Weight,
    split_k: int = 1,
    allow_partials: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """See lockstep.kernels.fp8_linear.contract.fp8_linear. Last strides must be 1."""
    target = compile_target(x.device)
    tile = choose_tile(len(x), split_k, out is None, target)
    fill = partial(launch, x, weight, split_k, tile, target)
    num_partials = split_k if tile.splits else 1
    return run_kernel(fill, x, weight.shape[0], num_partials, allow_partials, out)
