"""fp8_linear: x W^T with an e4m3 weight and activations that are quantized to e4m3 per token.

This is W8A8. Its numerics differ from those of linear(x, w), which rounds no activation. A token's
scales come from its own columns alone, so its bits depend neither on the number of rows nor on its
neighbours. On several ranks x is gathered in the model's dtype before it is quantized, so every
rank computes the same codes.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.activations import silu_mul
from lockstep.kernels.formats.weights import K_BLOCK, Fp8Weight, pack_codes, unpack_codes
from lockstep.kernels.formats.weights.fp8 import e4m3_values
from lockstep.kernels.formats.weights.quantize import MAX_E4M3
from lockstep.kernels.linear import choose_plain_split_k, partition_length, tree_sum, write_out
from lockstep.kernels.linear.prepacked import PrepackedWeight
from lockstep.kernels.norm import add_rms_norm
from lockstep.kernels.registry import op

MIN_SCALE = 2.0**-126
"""Smallest scale: the smallest normal number of fp32. A group of zeros has it."""
NAN_CODE = 0x7F
"""Code of every NaN, whatever its sign and payload were."""


@op(needed_for="FP8 activations", callers=("fp8_linear",))
def quantize_rows(x: Tensor, block_k: int) -> tuple[Tensor, Tensor]:
    """Quantize x [T, K] to e4m3fn, with a scale per row and per block_k columns.

        scale = max(amax / 448, MIN_SCALE)    amax: largest magnitude of these columns
        code  = e4m3(x / scale)               to nearest, ties to even

    Both divisions are those of fp32. amax / scale exceeds 448 by at most one unit in the last place
    of fp32, which rounds to 448. A NaN makes all columns of its scale NaN. An infinity becomes NaN
    and makes the other columns of its scale zero. So the products of such a row are NaN.

    Args:
        x: [T, K], its last stride 1.
        block_k: columns that share a scale: K_BLOCK, or K or more for one scale per row.

    Returns: (words [T, words_per_row(K, 8)] int32, scales [T, ceil(K / block_k)] fp32). Codes are
        in the order of pack_codes, as those of an Fp8Weight, and are 0 past column K.
    """
    codes, scales = row_codes(x, block_k)
    return pack_codes(codes, 8), scales


@dataclass(frozen=True)
class QuantizedRows:
    """Rows x [T, K] that their producer has quantized, with a scale per K_BLOCK columns.

    words, scales: results of quantize_rows(x, K_BLOCK); on a GPU the scales of a block are next to
    each other. k: K. dtype: of x. plain: x itself, for products with plain weights; None if there
    are none.
    """

    words: Tensor
    scales: Tensor
    k: int
    dtype: torch.dtype
    plain: Tensor | None = None

    def __len__(self) -> int:
        return len(self.words)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.words), self.k

    @property
    def device(self) -> torch.device:
        return self.words.device

    def codes(self) -> tuple[Tensor, Tensor]:
        """Return the codes [T, K] uint8 and the scales, as row_codes does."""
        return unpack_codes(self.words, 8, 4 * self.words.shape[1])[:, : self.k], self.scales


@op(needed_for="FP8 activations with a scale per block")
def quantize_silu_mul(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Compute quantize_rows(silu_mul(gate_up), K_BLOCK), without silu_mul's result in memory.

    gate_up: [T, 2I], its last stride 1. Returns: see quantize_rows.
    """
    words, scales = quantize_rows(silu_mul(gate_up), K_BLOCK)
    return words, scales


@op(needed_for="FP8 activations with a scale per block")
def quantize_add_rms_norm(
    x: Tensor,
    delta: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
    keeps_norm: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Compute add_rms_norm and quantize_rows(norm, K_BLOCK) in one op.

    x: [T, D]. delta, weight, eps, offset: see add_rms_norm. keeps_norm: whether a plain weight
    reads the norm too.

    Returns: (sum, norm or None, words, scales).
    """
    total, norm = add_rms_norm(x, delta, weight, eps, offset)
    return total, norm if keeps_norm else None, *quantize_rows(norm, K_BLOCK)


def row_codes(x: Tensor, block_k: int) -> tuple[Tensor, Tensor]:
    """Return the codes [T, K] uint8 and the scales of quantize_rows."""
    rows, k = x.shape
    blocks = -(-k // block_k)
    padded = F.pad(x.float(), (0, blocks * block_k - k)).reshape(rows, blocks, block_k)
    scales = (padded.abs().amax(2) / MAX_E4M3).clamp(min=MIN_SCALE)
    scaled = (padded / scales[..., None]).reshape(rows, blocks * block_k)[:, :k]
    codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.where(~scaled.isnan(), NAN_CODE), scales


def fused_sum(d: Tensor, scale: Tensor, total: Tensor) -> Tensor:
    """Return d * scale + total, all fp32. The product is exact; the sum is rounded to fp64 and then
    to fp32.

    FMA of a GPU rounds once. The two differ where fp64 rounds the sum to the middle between two
    numbers of fp32.
    """
    return torch.addcmul(total.double(), d.double(), scale.double()).float()


def codes_of(x: Tensor | QuantizedRows, block_k: int) -> tuple[Tensor, Tensor]:
    """Return the codes [T, K] uint8 and the scales of rows that may be quantized already."""
    if isinstance(x, QuantizedRows):
        assert block_k == K_BLOCK, "producers have a scale per block"
        return x.codes()
    return row_codes(x, block_k)


def choose_fp8_split_k(n: int, k: int, device: str) -> int:
    """Return the split-K count of fp8_linear, which a plain 16-bit weight of this shape has too.

    Partitions must be whole blocks of K_BLOCK columns, and the kernels add up two at most in
    registers. Plain weights in fp32 or of few outputs have other partitions, and quantized weights
    have four.
    """
    return choose_plain_split_k(n, k, device)


@op(needed_for="FP8 activations")
def fp8_linear(
    x: Tensor | QuantizedRows,
    weight: Fp8Weight | PrepackedWeight,
    split_k: int = 1,
    allow_partials: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Compute x W^T [T, N] of x's dtype, where x is quantized by quantize_rows.

    Activations have one scale per row or per block of 128 columns, like the weight.

        block of 128 columns: d = sum of code * code, on a CPU exact and rounded once to fp32
        a scale per row:      partition = ((d0 + d1) + d2 ...) * (x_scale * w_scale)
        a scale per block:    partition = fma(d, x_scale * w_scale, partition), from 0 on
        y:                    partitions added pairwise, as a binary tree; rounded once

    All of it is fp32, from left to right, and blocks are in ascending order. On a GPU the sum of a
    block is one chain of its FP8 matrix instruction, whose accumulator has fewer bits than fp32 on
    Hopper; sums of blocks are fp32 additions. A GPU without FP8 matrix instructions multiplies in
    fp16, which represents every code. See fused_sum for fma on a CPU.

    Args:
        x: [T, K], its last stride 1; or such rows quantized, for a weight with blocks of K_BLOCK
            columns.
        weight: [N, K] with block_k of K_BLOCK, or of K or more; or prepacked for a CPU.
        split_k: number of split-K partitions; above 1, partition_length is a multiple of K_BLOCK.
            See choose_fp8_split_k.
        allow_partials, out: see lockstep.kernels.linear.linear.
    """
    if isinstance(weight, PrepackedWeight):
        prepacked: Any = weight  # its class is the CPU backend's
        return write_out(prepacked.define(x), out)
    k = weight.k
    codes, x_scales = codes_of(x, weight.block_k)
    w_scales = weight.with_row_scales().scales
    x_values = e4m3_values(codes).double()
    w_values = e4m3_values(weight.codes()).double()
    length = partition_length(k, split_k)
    partials = []
    for first in range(0, k, length):
        partition = torch.zeros(len(x), len(w_values))
        for begin in range(first, min(first + length, k), K_BLOCK):
            columns = slice(begin, begin + K_BLOCK)
            # Products are multiples of 2^-18 below 2^18, so sums of 128 of them are exact in fp64.
            d = (x_values[:, columns] @ w_values[:, columns].t()).float()
            if weight.block_k < k:
                index = begin // K_BLOCK
                scale = x_scales[:, index, None] * w_scales[:, index]
                partition = fused_sum(d, scale, partition)
            else:
                partition = partition + d
        if weight.block_k >= k:
            partition = partition * (x_scales * w_scales[:, 0])
        partials.append(partition)
    return write_out(tree_sum(partials).to(x.dtype), out)
