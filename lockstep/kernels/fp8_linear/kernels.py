# mypy: ignore-errors
"""Kernels of quantize_rows, its fused forms and fp8_linear, in Triton."""

import triton
import triton.language as tl

from lockstep.kernels.device.activations import silu_product
from lockstep.kernels.device.dependent_launch import pdl_start
from lockstep.kernels.device.dequantize import e4m3_to_fp32
from lockstep.kernels.device.fp8 import MAX_E4M3_BITS, round_to_fp8
from lockstep.kernels.device.swizzle import swizzled_tile
from lockstep.kernels.device.tree_reduction import reduce_partitions
from lockstep.kernels.formats.weights import K_BLOCK as WORD_COLUMNS
from lockstep.kernels.formats.weights import quantize
from lockstep.kernels.fp8_linear import contract
from lockstep.kernels.norm.kernels import add_and_norm

K_BLOCK = tl.constexpr(WORD_COLUMNS)
"""Columns of a block: one chain of FP8 products, and the columns that words interleave."""
WORDS = tl.constexpr(WORD_COLUMNS // 4)
"""Words of a block."""
MAX_E4M3 = tl.constexpr(quantize.MAX_E4M3)
MIN_SCALE = tl.constexpr(contract.MIN_SCALE)
TINY_SCALE = tl.constexpr(2.0**-60)
SCALE_FACTOR = tl.constexpr(2.0**64)


@triton.jit
def pack(codes, BLOCKS: tl.constexpr):
    """Pack codes [BLOCKS, 128] into words [BLOCKS, 32] int32 in the order of word_order.py."""
    # The code of column 16 w' + 8 e + 2 q + j becomes byte 2 j + e of word 8 q + w'.
    column = tl.arange(0, K_BLOCK)
    shifted = codes.to(tl.int32) << (16 * (column % 2) + 8 * (column // 8 % 2))[None, :]
    parts = tl.reshape(shifted, (BLOCKS, 8, 2, 4, 2))
    words = tl.sum(tl.sum(parts, 4), 2)
    return tl.reshape(tl.permute(words, (0, 2, 1)), (BLOCKS, WORDS))


@triton.jit
def magnitude_bits(x):
    """Return the bits of |x|, fp32. As integers they have the order of the magnitudes, NaN last."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(max_bits):
    """Return scales from the bits of the largest magnitudes."""
    amax = max_bits.to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, tl.zeros_like(amax) + MAX_E4M3)
    return tl.maximum(scale, MIN_SCALE, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def divide(x, scale):
    """Return x / scale, correctly rounded where it is 2^-40 or more, in six instructions.

    Each of two Newton steps subtracts the excess q * scale - x times the reciprocal. A correctly
    rounded reciprocal and a quotient that is off by less than two units in the last place give the
    correctly rounded one (Markstein 1990). The excess is exact, since tiny numbers are taken 2^64
    times larger. An excess of +0 keeps the sign of a quotient of 0, which x - q * scale would not.
    Signs change by products with -1, since Triton 3.6 takes -x as 0 - x, which is +0 for x = +0.
    """
    factor = tl.where(scale < TINY_SCALE, SCALE_FACTOR, 1.0)
    # An infinite scale divides finite numbers into 0 and infinite ones into NaN.
    finite = scale < float("inf")
    divisor = tl.where(finite | (scale != scale), scale * factor, 0.0)
    inverse = tl.where(divisor == 0.0, 0.0, tl.div_rn(tl.zeros_like(divisor) + 1.0, divisor))
    x = x * factor
    divisor = tl.zeros_like(x) + divisor
    inverse = tl.zeros_like(x) + inverse
    quotient = x * inverse
    negative_x = x * -1.0
    negative_inverse = inverse * -1.0
    quotient = tl.fma(tl.fma(quotient, divisor, negative_x), negative_inverse, quotient)
    return tl.fma(tl.fma(quotient, divisor, negative_x), negative_inverse, quotient)


@triton.jit
def codes_of(x, scale, in_row, NATIVE: tl.constexpr):
    """Return the codes of x / scale as uint8; 0 past the end of the row.

    NATIVE: the GPU converts to e4m3; numbers above 448 become 448, and each NaN becomes NAN_CODE.
    """
    if NATIVE:
        codes = divide(x, scale).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        scaled = tl.div_rn(x, tl.zeros_like(x) + scale)
        codes = round_to_fp8(scaled, scaled, 3, 7, MAX_E4M3_BITS)
    # 0 / NaN is NaN.
    return tl.where(in_row, codes, 0).to(tl.uint8)


@triton.jit
def block_columns(first, BLOCKS: tl.constexpr):
    """Return the columns [BLOCKS, 128] of BLOCKS blocks from column `first` on."""
    return tl.arange(0, BLOCKS)[:, None] * K_BLOCK + tl.arange(0, K_BLOCK)[None, :] + first


@triton.jit
def store_codes(codes, words_ptr, first, padded_words, BLOCKS: tl.constexpr):
    """Store codes [BLOCKS, 128] of a row from column `first` on as words."""
    words = tl.arange(0, BLOCKS)[:, None] * WORDS + tl.arange(0, WORDS)[None, :] + first // 4
    tl.store(words_ptr + words, pack(codes, BLOCKS), mask=words < padded_words)


@triton.jit
def store_blocks(
    x, words_ptr, scales_ptr, first, K, padded_words, groups, scale_stride,
    BLOCKS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Quantize x [BLOCKS, 128] fp32, a row's columns from `first` on, with a scale per block.

    x is 0 past column K. words_ptr, scales_ptr: of the row; see quantize_rows_kernel.
    """
    scale = scale_of(tl.max(magnitude_bits(x), 1))[:, None]
    codes = codes_of(x, scale, block_columns(first, BLOCKS) < K, NATIVE)
    store_codes(codes, words_ptr, first, padded_words, BLOCKS)
    group = tl.arange(0, BLOCKS)[:, None] + first // K_BLOCK
    tl.store(scales_ptr + group * scale_stride, scale, mask=group < groups)


@triton.jit(do_not_specialize=["scale_stride"])
def quantize_rows_kernel(
    x_ptr, words_ptr, scales_ptr, K, padded_words, x_stride, groups, scale_stride,
    BY_BLOCK: tl.constexpr, BLOCKS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Quantize one row, or BLOCKS blocks of it.

    BY_BLOCK: there is a scale per 128 columns, and CTA (row, part) takes BLOCKS of them. Otherwise
    there is one scale per row, and CTA (row, 0) takes the whole row. A maximum is exact, so neither
    BLOCKS nor the warps change a bit.

    words_ptr: [T, padded_words] int32. scales_ptr: [groups, T], groups scale_stride apart.
    """
    pdl_start()
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    words_ptr += row * padded_words
    scales_ptr += row
    if BY_BLOCK:
        first = tl.program_id(1) * BLOCKS * K_BLOCK
        columns = block_columns(first, BLOCKS)
        x = tl.load(x_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)
        store_blocks(
            x, words_ptr, scales_ptr, first, K, padded_words, groups, scale_stride, BLOCKS, NATIVE
        )
    else:
        max_bits = tl.zeros((BLOCKS, K_BLOCK), tl.int32)
        for first in range(0, K, BLOCKS * K_BLOCK):
            columns = block_columns(first, BLOCKS)
            x = tl.load(x_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)
            max_bits = tl.maximum(max_bits, magnitude_bits(x))
        scale = scale_of(tl.max(tl.max(max_bits, 1), 0))
        tl.store(scales_ptr, scale)
        for first in range(0, K, BLOCKS * K_BLOCK):
            columns = block_columns(first, BLOCKS)
            x = tl.load(x_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)
            codes = codes_of(x, scale, columns < K, NATIVE)
            store_codes(codes, words_ptr, first, padded_words, BLOCKS)


@triton.jit(do_not_specialize=["scale_stride"])
def quantize_silu_mul_kernel(
    gate_up_ptr, words_ptr, scales_ptr, N, padded_words, stride, groups, scale_stride,
    BLOCKS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Compute BLOCKS blocks of one row of silu_mul and quantize them: CTA (row, part).

    gate_up_ptr: [T, 2 N], rows `stride` apart. words_ptr, scales_ptr: see quantize_rows_kernel.
    """
    pdl_start()
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCKS * K_BLOCK
    columns = block_columns(first, BLOCKS)
    gate_up_ptr += row * stride + columns
    gate = tl.load(gate_up_ptr, mask=columns < N, other=0.0)
    up = tl.load(gate_up_ptr + N, mask=columns < N, other=0.0)
    # Rounded to the model's dtype first, as the result of silu_mul in memory would be.
    x = silu_product(gate, up, gate_up_ptr.dtype.element_ty).to(tl.float32)
    store_blocks(
        x, words_ptr + row * padded_words, scales_ptr + row, first, N, padded_words, groups,
        scale_stride, BLOCKS, NATIVE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["scale_stride"])
def quantize_add_rms_norm_kernel(
    x, parts, weight, total, out, words_ptr, scales_ptr, inner, x_outer, x_inner, part, part_outer,
    part_inner, eps, offset, padded_words, groups, scale_stride,
    PARTS: tl.constexpr, KEEPS_NORM: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Add delta to one row of x, norm the sum and quantize the norm.

    The norm is stored with KEEPS_NORM alone; `out` is not read otherwise. BLOCK is a multiple of
    128. words_ptr, scales_ptr: see quantize_rows_kernel. All else: see add_rms_norm_kernel.
    """
    pdl_start()
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    norm = add_and_norm(
        x, parts, weight, total, row, offs, inner, x_outer, x_inner, part, part_outer, part_inner,
        eps, offset, PARTS, D,
    )  # fmt: skip
    if KEEPS_NORM:
        tl.store(out + row * D + offs, norm, mask=offs < D)
    blocks = tl.reshape(norm.to(tl.float32), (BLOCK // K_BLOCK, K_BLOCK))
    store_blocks(
        blocks, words_ptr + row * padded_words, scales_ptr + row, 0, D, padded_words, groups,
        scale_stride, BLOCK // K_BLOCK, NATIVE,
    )  # fmt: skip


@triton.jit
def _to_operand(codes, NATIVE: tl.constexpr):
    """Return codes as an operand of tl.dot: e4m3 as they are, or fp16, which represents each."""
    return codes if NATIVE else e4m3_to_fp32(codes.to(tl.int32)).to(tl.float16)


@triton.jit
def _accumulate(
    begin, end, x_ptrs, w_ptrs, x_scale_ptrs, w_scale_ptrs, x_scale_stride, row_mask,
    BY_BLOCK: tl.constexpr, NATIVE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Accumulate one split-K partition in blocks of 128 columns: ([BLOCK_N, BLOCK_M] fp32,).

    x_ptrs [BLOCK_M, 128] and w_ptrs [BLOCK_N, 128]: codes at column 0. x_scale_ptrs [1, BLOCK_M]
    and w_scale_ptrs [BLOCK_N, 1]: scales of the first block; those of x are x_scale_stride apart.
    row_mask [BLOCK_M]: rows in range.
    """
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(begin, end, K_BLOCK):
        # Both operands end in codes of 0, so no column is masked.
        x_tile = _to_operand(tl.load(x_ptrs + k, mask=row_mask[:, None], other=0.0), NATIVE)
        w_tile = _to_operand(tl.load(w_ptrs + k), NATIVE)
        # The accumulator of an FP8 product has fewer bits than fp32 on Hopper and Ada. So the sum
        # of a block starts at 0 and is added by an fp32 instruction. max_num_imprecise_acc selects
        # wgmma, and keeps the compiler from folding the addition into the product.
        block = tl.dot(w_tile, x_tile.T, max_num_imprecise_acc=K_BLOCK)
        if BY_BLOCK:
            group = k // K_BLOCK
            x_scales = x_scale_ptrs + group * x_scale_stride
            x_scale = tl.load(x_scales, mask=row_mask[None, :], other=0.0)
            acc = tl.fma(block, x_scale * tl.load(w_scale_ptrs + group), acc)
        else:
            acc += block
    if not BY_BLOCK:
        x_scale = tl.load(x_scale_ptrs, mask=row_mask[None, :], other=0.0)
        acc = acc * (x_scale * tl.load(w_scale_ptrs))
    return (acc,)


@triton.jit(do_not_specialize=["tokens", "x_scale_stride"])
def fp8_gemm_kernel(
    x_ptr, w_ptr, x_scales_ptr, w_scales_ptr, out_ptr, tokens, N, K, length, padded_k,
    first_row, x_scale_stride, w_scale_stride, out_stride,
    COUNT: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, BY_BLOCK: tl.constexpr,
    NATIVE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute one tile of out [parts, tokens, N]; rows are out_stride apart.

    The weight is the left operand, so that wgmma serves any number of tokens and one instruction
    gives the bits of all of them.

    Args:
        x_ptr, w_ptr: codes [tokens, padded_k] and [N, padded_k]: e4m3 with NATIVE, else bytes.
        x_scales_ptr: [groups, tokens], groups x_scale_stride apart.
        w_scales_ptr: [R, groups], rows w_scale_stride apart.
        first_row: position of the weight's row 0 in its block of SCALE_ROWS rows.
        COUNT: split-K partitions of `length` columns that this CTA adds up.
    """
    pdl_start()
    pid = tl.program_id(0)
    part, first_m, first_n = swizzled_tile(pid, tokens, N, GROUP, BLOCK_M, BLOCK_N)
    m = first_m + tl.arange(0, BLOCK_M)
    n = first_n + tl.arange(0, BLOCK_N)
    row_mask = m < tokens
    # Rows past the end repeat the last one: computed, never stored.
    rows = tl.minimum(n, N - 1).to(tl.int64)
    byte = tl.arange(0, K_BLOCK)[None, :]
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * padded_k + byte
    w_ptrs = w_ptr + rows[:, None] * padded_k + byte
    x_scale_ptrs = x_scales_ptr + m[None, :]
    w_scale_ptrs = w_scales_ptr + ((rows + first_row) // SCALE_ROWS)[:, None] * w_scale_stride
    (acc,) = reduce_partitions(
        _accumulate,
        (x_ptrs, w_ptrs, x_scale_ptrs, w_scale_ptrs, x_scale_stride, row_mask, BY_BLOCK, NATIVE,
         BLOCK_M, BLOCK_N),
        part * COUNT * length, length, K, COUNT,
    )  # fmt: skip
    out_ptr += part.to(tl.int64) * tokens * N + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    mask = row_mask[:, None] & (n < N)[None, :]
    tl.store(out_ptr, acc.T.to(out_ptr.dtype.element_ty), mask=mask)
