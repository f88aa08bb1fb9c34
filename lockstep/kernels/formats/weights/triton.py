# mypy: ignore-errors
"""dequantize_weight in Triton: a program per tile, elementwise."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.device.dequantize import FP8, decode_e4m3
from lockstep.kernels.formats.weights import QuantizedWeight, dequantize_weight
from lockstep.kernels.formats.weights.dequantize_tile import BLOCK, load_tile
from lockstep.kernels.formats.weights.operand import TYPES, Target, group_of, irregular, operand_of
from lockstep.kernels.formats.weights.weights import IntWeight

ROWS = 16
"""Outputs of a tile."""
ANY_ARCH = 80
"""Elementwise code by ordinary operations, and no matrix unit's operand."""


@triton.jit
def _unpack_kernel(
    weight, out, N, K, out_stride,
    FORM: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """A tile of out [N, K]; scales lie in regular groups."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.program_id(1) * COLUMNS
    rows = tl.minimum(n, N - 1).to(tl.int64)
    tile = load_tile(weight, rows, at, K, FORM, COLUMNS, EVEN, DTYPE)
    columns = at + tl.arange(0, COLUMNS)
    mask = (n < N)[:, None] & (columns < K)[None, :]
    tl.store(out + rows[:, None] * out_stride + columns[None, :], tile, mask=mask)


@triton.jit
def _gather_kernel(
    weight, g_idx, out, N, K, groups, out_stride, GROUP: tl.constexpr, BITS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, FORM: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """A tile of out [N, K] whose columns take their scales from anywhere."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (n < N)[:, None] & (k < K)[None, :]
    rows = tl.minimum(n, N - 1).to(tl.int64)[:, None]
    inside = k % BLOCK
    span = inside // (128 // BITS)
    lane = inside // 2 % 4
    pair = inside // 8 % (16 // BITS)
    at = k // BLOCK * (BLOCK * BITS // 32) + BITS * lane + span
    bit = (k % 2 * 16 + pair * BITS)[None, :]
    word = tl.load(weight[0] + rows * weight[4] + at[None, :], mask=mask, other=0)
    if g_idx is None:
        group = k // GROUP
    else:
        group = tl.load(g_idx + k, mask=k < K, other=0)
    if FORM[3] == 1:
        lines = rows
    else:
        lines = (rows + weight[6]) // FORM[3]
    place = lines * weight[5] + group[None, :]
    scale = tl.load(weight[1] + place, mask=mask, other=0).to(tl.float32)
    if FORM[0] == FP8:
        value = (decode_e4m3((word >> bit) & 0xFF) * scale).to(DTYPE)
    else:
        zero = (1 << BITS) / 2.0
        if weight[2] is not None:
            zero = tl.load(weight[2] + place, mask=mask, other=0).to(tl.float32)
        code = (word >> bit) & ((1 << BITS) - 1)
        number = (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + zero)
        value = (number * scale).to(DTYPE)
    tl.store(out + rows * out_stride + k[None, :], value, mask=mask)


@dequantize_weight.backend("triton", supports=gpu_trait)
def dequantize_weight_triton(weight: QuantizedWeight, out: Tensor) -> None:
    """See lockstep.kernels.formats.weights.dequantize_weight."""
    n, k = weight.shape
    columns = int(BLOCK)
    target = Target(ANY_ARCH, assembly=False)
    operand, form = operand_of(weight, out.dtype, columns, target)
    grid = (triton.cdiv(n, ROWS), triton.cdiv(k, columns))
    if irregular(weight):
        g_idx = weight.g_idx if isinstance(weight, IntWeight) else None
        _gather_kernel[grid](
            operand, g_idx, out, n, k, operand.scales.shape[1], out.stride(0),
            group_of(weight) or k, weight.bits, ROWS, columns, columns, tuple(form),
            TYPES[out.dtype], enable_fp_fusion=False,
        )  # fmt: skip
        return
    _unpack_kernel[grid](
        operand, out, n, k, out.stride(0), tuple(form), k % columns == 0, ROWS, columns,
        TYPES[out.dtype], enable_fp_fusion=False,
    )  # fmt: skip


def in_memory(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """The weight unpacked, on its device: [N, K]."""
    dense = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    dequantize_weight_triton(weight, dense)
    return dense
