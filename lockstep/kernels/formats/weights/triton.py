# mypy: disable-error-code="no-untyped-def,no-untyped-call,annotation-unchecked"
"""dequantize_weight in Triton: one CTA per tile, elementwise."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.compile_target import CompileTarget
from lockstep.kernels.device.dependent_launch import pdl_start
from lockstep.kernels.device.dequantize import FP8, e4m3_to_fp32
from lockstep.kernels.formats.weights import IntWeight, QuantizedWeight, dequantize_weight
from lockstep.kernels.formats.weights.dequantize_tile import K_BLOCK, load_tile
from lockstep.kernels.formats.weights.operand import (
    TL_DTYPES,
    group_size_of,
    has_irregular_groups,
    quantized_operand,
)
from lockstep.kernels.integers import ceil_div

BLOCK_N = 16
"""Weight rows of a tile."""
ANY_ARCH = 80
"""Generic Triton operations alone, and no tensor core operand: one target serves all GPUs."""


@triton.jit
def _dequantize_kernel(
    weight, out_ptr, N, K, out_stride,
    FORMAT: tl.constexpr, EVEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Write one tile of out [N, K] of a weight with regular groups."""
    pdl_start()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(1) * BLOCK_K
    rows = tl.minimum(n, N - 1).to(tl.int64)  # load_tile masks no rows: repeat the last one
    tile = load_tile(weight, rows, k, K, FORMAT, BLOCK_K, EVEN, DTYPE)
    columns = k + tl.arange(0, BLOCK_K)
    mask = (n < N)[:, None] & (columns < K)[None, :]
    tl.store(out_ptr + rows[:, None] * out_stride + columns[None, :], tile, mask=mask)


@triton.jit
def _gather_kernel(
    weight, g_idx_ptr, out_ptr, N, K, groups, out_stride, GROUP: tl.constexpr, BITS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, K_BLOCK: tl.constexpr, FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Write one tile of out [N, K] of a weight whose columns gather their scales from any group."""
    pdl_start()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (n < N)[:, None] & (k < K)[None, :]
    rows = tl.minimum(n, N - 1).to(tl.int64)[:, None]
    # The inverse of word_order.py: column -> its word and its first bit.
    inside = k % K_BLOCK
    span = inside // (128 // BITS)
    lane = inside // 2 % 4
    pair = inside // 8 % (16 // BITS)
    word_index = k // K_BLOCK * (K_BLOCK * BITS // 32) + BITS * lane + span
    bit = (k % 2 * 16 + pair * BITS)[None, :]
    word_ptrs = weight.words + rows * weight.row_stride + word_index[None, :]
    word = tl.load(word_ptrs, mask=mask, other=0)
    if g_idx_ptr is None:
        group = k // GROUP
    else:
        group = tl.load(g_idx_ptr + k, mask=k < K, other=0)
    if FORMAT.scale_rows == 1:
        scale_row = rows
    else:
        scale_row = (rows + weight.scale_row_offset) // FORMAT.scale_rows
    offsets = scale_row * weight.scale_stride + group[None, :]
    scale = tl.load(weight.scales + offsets, mask=mask, other=0).to(tl.float32)
    if FORMAT.kind == FP8:
        value = (e4m3_to_fp32((word >> bit) & 0xFF) * scale).to(DTYPE)
    else:
        zero = (1 << BITS) / 2.0
        if weight.zeros is not None:
            zero = tl.load(weight.zeros + offsets, mask=mask, other=0).to(tl.float32)
        code = (word >> bit) & ((1 << BITS) - 1)
        number = (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + zero)
        value = (number * scale).to(DTYPE)
    tl.store(out_ptr + rows * out_stride + k[None, :], value, mask=mask)


@dequantize_weight.backend("triton", supports=gpu_trait)
def dequantize_weight_triton(weight: QuantizedWeight, out: Tensor) -> None:
    """See lockstep.kernels.formats.weights.contract.dequantize_weight."""
    n, k = weight.shape
    block_k = int(K_BLOCK)
    target = CompileTarget(ANY_ARCH, inline_ptx=False)
    operand, form = quantized_operand(weight, out.dtype, block_k, target)
    grid = (ceil_div(n, BLOCK_N), ceil_div(k, block_k))
    if has_irregular_groups(weight):
        g_idx = weight.g_idx if isinstance(weight, IntWeight) else None
        _gather_kernel[grid](
            operand, g_idx, out, n, k, operand.scales.shape[1], out.stride(0),
            group_size_of(weight) or k, weight.bits, BLOCK_N, block_k, block_k, form,
            TL_DTYPES[out.dtype], enable_fp_fusion=False,
        )  # fmt: skip
        return
    _dequantize_kernel[grid](
        operand, out, n, k, out.stride(0), form, k % block_k == 0, BLOCK_N, block_k,
        TL_DTYPES[out.dtype], enable_fp_fusion=False,
    )  # fmt: skip


def dequantize_to_memory(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Dequantize a weight into a new tensor [N, K] on its device."""
    dense = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    dequantize_weight_triton(weight, dense)
    return dense
