# mypy: ignore-errors
"""Load a tile of a weight and dequantize it in registers: one device function for all formats.

A tile is dequantized in the order of word_order.py: joins of the values that come out of a word,
then a reshape. Triton (3.6 and later) propagates the layout of a wgmma's left operand back through
all of these operations to the loads of words and scales, so the tile never passes through shared
memory a second time. It does so where the leaves are loads and constants; an index tensor of
`tl.arange` among the values would stop the propagation. With mma.sync a join would widen kWidth to
4, and so change which columns share a k16 group of the product: WeightFormat.opaque stops the
propagation there (tests/kernels/compile_quantized.py checks both).

Shape comments: R rows of the weight, C scales per row, W words per row of the tile.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lockstep.kernels.device.dequantize import (
    CVT_E4M3,
    DENSE,
    E2M1_TO_BF16,
    E2M1_TO_FP16,
    E4M3_TO_FP16_TWICE,
    E4M3_TO_FP32,
    FP4,
    FP16_E2M1,
    GGUF,
    INT4_SPLIT_TO_BF16,
    INT4_TO_BF16,
    INT4_TO_FP16,
    MINUS_136,
    MINUS_1032,
    PAIRED_INT4,
    SPLIT_SCALE_INT4,
    WORD_GGUF,
    dequantize_code,
    dequantize_gguf_code,
    duplicate_16bit,
    e4m3_to_fp32,
    split_16bit,
)
from lockstep.kernels.formats.weights.gguf_ptx import word_constraints, word_ptx

K_BLOCK = tl.constexpr(128)
"""Columns that word_order.py interleaves."""
SUPERBLOCK = tl.constexpr(256)
"""Columns that share a base scale of a GgufWeight."""


class WeightOperand(NamedTuple):
    """Pointers and strides of a weight, as a kernel argument. A dense weight is `words` alone.

    scales, zeros: 32-bit words of two values where WeightFormat.paired_scales. zeros are the
    minima of a GgufWeight. factors: of an Fp4Weight, per row. scale_row_offset: row 0's position in
    its block of scales (Fp8Weight.first). high_words, bases, min_bases: of a GgufWeight alone.
    Strides are between rows, in elements.
    """

    words: Any
    scales: Any = None
    zeros: Any = None
    factors: Any = None
    row_stride: Any = 0
    scale_stride: Any = 0
    scale_row_offset: Any = 0
    high_words: Any = None
    high_stride: Any = None
    bases: Any = None
    min_bases: Any = None
    base_stride: Any = None


class WeightFormat(NamedTuple):
    """Storage layout of a weight, as a constexpr of a kernel.

    kind: DENSE, INT, FP8, FP4 or GGUF. bits: of a code (of its part in `words`). group_size:
    columns per scale, 0: all. scale_rows: rows per scale, 0: all. paired_scales: 16-bit scales are
    read two at a time, since asynchronous copies move 4 bytes or more. scale_dtype: tl dtype.
    decoder: GENERIC, or the inline PTX that dequantizes (kernels/device/dequantize.py). opaque:
    hide the joins, for a target that multiplies by mma.sync.

    GGUF alone: high_bits: bits of a code in the second plane. zero_point: subtracted from a code,
    or from an entry of the lookup table. table_low, table_high: eight one-byte entries each, both
    0: no table. two_level_scales: a scale is a superblock's base times an int8 step.
    """

    kind: int = 0
    bits: int = 16
    group_size: int = 0
    scale_rows: int = 1
    paired_scales: bool = False
    scale_dtype: Any = None
    decoder: int = 0
    opaque: bool = False
    high_bits: int = 0
    zero_point: int = 0
    table_low: int = 0
    table_high: int = 0
    two_level_scales: bool = False


@triton.jit
def _load_scales(base_ptr, rows, stride, first, end, COUNT: tl.constexpr,
                 PAIRED: tl.constexpr, DTYPE: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """Load COUNT values per row from column `first` on: [R, COUNT].

    end: columns of the tensor; not EVEN: columns from there on are 0.
    """
    if PAIRED:
        column = first // 2 + tl.arange(0, (COUNT + 1) // 2)[None, :]
    else:
        column = first + tl.arange(0, COUNT)[None, :]
    ptrs = base_ptr + rows[:, None] * stride + column
    inside = column * (1 + PAIRED) < end
    if PAIRED and COUNT == 1:
        # One of two loads is masked off: a shift by `first` would stop the layout propagation.
        odd = column * 0 + first % 2
        low = tl.load(ptrs, mask=inside & (odd == 0), other=0) & 0xFFFF
        high = (tl.load(ptrs, mask=inside & (odd == 1), other=0) >> 16) & 0xFFFF
        group_values = (low | high).to(tl.int16).to(DTYPE, bitcast=True)
    else:
        if EVEN:
            group_values = tl.load(ptrs)
        else:
            group_values = tl.load(ptrs, mask=inside, other=0)
        if PAIRED:
            low, high = split_16bit(group_values, DTYPE)
            group_values = tl.join(low, high).reshape(rows.shape[0], COUNT)
    return group_values


@triton.jit
def _broadcast_to_words(group_values, SPANS: tl.constexpr, WORDS: tl.constexpr,
                        BLOCK_K: tl.constexpr):  # fmt: skip
    """Broadcast values per group [R, C] to words: (of each word's first columns, of its last).

    SPANS words of a lane cover a block of K_BLOCK columns; groups are at least half a word wide.
    """
    ROWS: tl.constexpr = group_values.shape[0]
    COUNT: tl.constexpr = group_values.shape[1]
    BLOCKS: tl.constexpr = BLOCK_K // K_BLOCK
    if COUNT <= BLOCKS:
        # Groups of whole blocks: neighbouring words share a number.
        wide = tl.broadcast_to(group_values[:, :, None], (ROWS, COUNT, WORDS // COUNT))
        wide = wide.reshape(ROWS, WORDS)
        return wide, wide
    elif COUNT <= BLOCKS * SPANS:
        # Groups of whole words: the four lanes of a block repeat the same sequence.
        per_block: tl.constexpr = COUNT // BLOCKS
        parts = group_values.reshape(ROWS, BLOCKS, 1, per_block, 1)
        wide = tl.broadcast_to(parts, (ROWS, BLOCKS, 4, per_block, SPANS // per_block))
        wide = wide.reshape(ROWS, WORDS)
        return wide, wide
    else:
        # Groups of 16 columns: the halves of a word differ.
        low, high = tl.split(group_values.reshape(ROWS, BLOCKS, 1, SPANS, 2))
        low = tl.broadcast_to(low, (ROWS, BLOCKS, 4, SPANS)).reshape(ROWS, WORDS)
        high = tl.broadcast_to(high, (ROWS, BLOCKS, 4, SPANS)).reshape(ROWS, WORDS)
        return low, high


@triton.jit
def _to_column_order(values, SPANS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Permute values [R, W, ...] from the order of words to that of K: [R, BLOCK_K]."""
    ROWS: tl.constexpr = values.shape[0]
    PAIRS: tl.constexpr = K_BLOCK // (8 * SPANS)
    parts = values.reshape(ROWS, BLOCK_K // K_BLOCK, 4, SPANS, PAIRS, 2)
    return parts.permute(0, 1, 3, 4, 2, 5).reshape(ROWS, BLOCK_K)


@triton.jit
def _join8(l0, l1, l2, l3, h0, h1, h2, h3):
    """Join the lower and upper values of four pairs: [..., two bits of the pair, half]."""
    low = tl.join(tl.join(l0, l2), tl.join(l1, l3))
    high = tl.join(tl.join(h0, h2), tl.join(h1, h3))
    return tl.join(low, high)


@triton.jit
def _join_pairs(p0, p1, p2, p3, DTYPE: tl.constexpr):
    """Join four words of two 16-bit values each: [R, W, 2, 2, 2]."""
    l0, h0 = split_16bit(p0, DTYPE)
    l1, h1 = split_16bit(p1, DTYPE)
    l2, h2 = split_16bit(p2, DTYPE)
    l3, h3 = split_16bit(p3, DTYPE)
    return _join8(l0, l1, l2, l3, h0, h1, h2, h3)


@triton.jit
def _dequantize_int4_ptx(word, scales, zeros, FORMAT: tl.constexpr, BLOCK_K: tl.constexpr,
                         DTYPE: tl.constexpr):  # fmt: skip
    """Dequantize 4-bit integers, two per instruction: [R, W, 2, 2, 2]. zeros: None for 8."""
    WORDS: tl.constexpr = word.shape[1]
    BASE: tl.constexpr = 128.0 if DTYPE == tl.bfloat16 else 1024.0
    if zeros is None:
        MIDDLE: tl.constexpr = MINUS_136 if DTYPE == tl.bfloat16 else MINUS_1032
        o0 = tl.full(word.shape, MIDDLE, tl.int32)
        o1 = o0
    else:
        offset = (-BASE - zeros.to(tl.float32)).to(DTYPE)
        o0, o1 = _broadcast_to_words(duplicate_16bit(offset), 4, WORDS, BLOCK_K)
    if FORMAT.decoder == SPLIT_SCALE_INT4:
        # An fp16 scale as hi + lo in bf16. inf - inf is NaN: lo of an infinite scale is 0.
        wide = scales.to(tl.float32)
        high = wide.to(tl.bfloat16)
        rest = wide - high.to(tl.float32)
        rest = tl.where(rest == rest, rest, 0.0).to(tl.bfloat16)
        s0, s1 = _broadcast_to_words(duplicate_16bit(high), 4, WORDS, BLOCK_K)
        r0, r1 = _broadcast_to_words(duplicate_16bit(rest), 4, WORDS, BLOCK_K)
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            INT4_SPLIT_TO_BF16, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r", [word, s0, s1, r0, r1, o0, o1],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        PTX: tl.constexpr = INT4_TO_BF16 if DTYPE == tl.bfloat16 else INT4_TO_FP16
        s0, s1 = _broadcast_to_words(duplicate_16bit(scales), 4, WORDS, BLOCK_K)
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            PTX, "=&r,=&r,=&r,=&r,r,r,r,r,r", [word, s0, s1, o0, o1],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    return _join_pairs(p0, p1, p2, p3, DTYPE)


@triton.jit
def _dequantize_e2m1_ptx(word, scales, factor, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr):
    """Dequantize e2m1 by exact fp16 products of code and scale, two at once: [R, W, 2, 2, 2]."""
    PTX: tl.constexpr = E2M1_TO_BF16 if DTYPE == tl.bfloat16 else E2M1_TO_FP16
    pairs = tl.inline_asm_elementwise(
        E4M3_TO_FP16_TWICE, "=r,=r,=r,=r,r", [scales], dtype=tl.int32, is_pure=True, pack=4
    )
    s0, s1 = _broadcast_to_words(pairs, 4, word.shape[1], BLOCK_K)
    p0, p1, p2, p3 = tl.inline_asm_elementwise(
        PTX, "=&r,=&r,=&r,=&r,r,r,r,f", [word, s0, s1, factor],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return _join_pairs(p0, p1, p2, p3, DTYPE)


@triton.jit
def _dequantize_4bit(word, s0, s1, z0, z1, factor, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Dequantize the eight codes of each word, one by one: [R, W, 2, 2, 2]."""
    return _join8(
        dequantize_code(word, 0, s0, z0, factor, FORMAT, DTYPE),
        dequantize_code(word, 4, s0, z0, factor, FORMAT, DTYPE),
        dequantize_code(word, 8, s1, z1, factor, FORMAT, DTYPE),
        dequantize_code(word, 12, s1, z1, factor, FORMAT, DTYPE),
        dequantize_code(word, 16, s0, z0, factor, FORMAT, DTYPE),
        dequantize_code(word, 20, s0, z0, factor, FORMAT, DTYPE),
        dequantize_code(word, 24, s1, z1, factor, FORMAT, DTYPE),
        dequantize_code(word, 28, s1, z1, factor, FORMAT, DTYPE),
    )


@triton.jit
def _dequantize_8bit(word, scale, zero, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Dequantize the four codes of each word: [R, W, 2, 2]."""
    if FORMAT.decoder == CVT_E4M3:
        a, b, c, d = tl.inline_asm_elementwise(
            E4M3_TO_FP32, "=f,=f,=f,=f,r", [word],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
        low = tl.join((a * scale).to(DTYPE), (b * scale).to(DTYPE))
        high = tl.join((c * scale).to(DTYPE), (d * scale).to(DTYPE))
    else:
        low = tl.join(
            dequantize_code(word, 0, scale, zero, 1.0, FORMAT, DTYPE),
            dequantize_code(word, 8, scale, zero, 1.0, FORMAT, DTYPE),
        )
        high = tl.join(
            dequantize_code(word, 16, scale, zero, 1.0, FORMAT, DTYPE),
            dequantize_code(word, 24, scale, zero, 1.0, FORMAT, DTYPE),
        )
    return tl.join(low, high)


@triton.jit
def _load_words(words_ptr, stride, rows, k, end, BITS: tl.constexpr, WORDS: tl.constexpr,
                EVEN: tl.constexpr):  # fmt: skip
    """Load the words of a tile that begins at column k: [R, WORDS]."""
    word = k // (32 // BITS) + tl.arange(0, WORDS)[None, :]
    ptrs = words_ptr + rows[:, None] * stride + word
    if EVEN:
        return tl.load(ptrs)
    else:
        # Rows are padded to whole blocks of K_BLOCK columns.
        padded = (end + K_BLOCK - 1) // K_BLOCK * K_BLOCK // (32 // BITS)
        return tl.load(ptrs, mask=word < padded, other=0)


@triton.jit
def _load_group_scales(scales_ptr, weight, rows, k, end, FORMAT: tl.constexpr,
                       BLOCK_K: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """Load the scales (or zero points) of the groups of a tile: [R, C]."""
    COUNT: tl.constexpr = (
        BLOCK_K // FORMAT.group_size if 0 < FORMAT.group_size and FORMAT.group_size < BLOCK_K else 1
    )
    group = 0
    groups = 1
    if FORMAT.group_size > 0:
        # multiple_of lets neighbouring scales be read by one wide load.
        group = tl.multiple_of(k // FORMAT.group_size, COUNT)
        groups = tl.cdiv(end, FORMAT.group_size)
    scale_row = rows
    if FORMAT.scale_rows == 0:
        scale_row = rows * 0
    elif FORMAT.scale_rows > 1:
        scale_row = (rows + weight.scale_row_offset) // FORMAT.scale_rows
    return _load_scales(
        scales_ptr, scale_row, weight.scale_stride, group, groups, COUNT, FORMAT.paired_scales,
        FORMAT.scale_dtype, EVEN,
    )  # fmt: skip


@triton.jit
def _dequantize_fp4(word, scales, factor_ptrs, FORMAT: tl.constexpr, BLOCK_K: tl.constexpr,
                    DTYPE: tl.constexpr):  # fmt: skip
    """Dequantize words of NVFP4: [R, W, 2, 2, 2]. factor_ptrs: per row."""
    if FORMAT.decoder == FP16_E2M1:
        factor = tl.broadcast_to((tl.load(factor_ptrs) * 128.0)[:, None], word.shape)
        return _dequantize_e2m1_ptx(word, scales, factor, BLOCK_K, DTYPE)
    else:
        factor = tl.broadcast_to((tl.load(factor_ptrs) * 256.0)[:, None], word.shape)
        wide = e4m3_to_fp32(scales.to(tl.int32)) * 3.32306998946229e35  # 2^118
        s0, s1 = _broadcast_to_words(wide, 4, word.shape[1], BLOCK_K)
        return _dequantize_4bit(word, s0, s1, 0.0, 0.0, factor, FORMAT, DTYPE)


@triton.jit
def _dequantize_scaled(word, scales, zeros, FORMAT: tl.constexpr, BLOCK_K: tl.constexpr,
                       DTYPE: tl.constexpr):  # fmt: skip
    """Dequantize words of integers or of fp8: [R, W, (2,) 2, 2]."""
    BITS: tl.constexpr = FORMAT.bits
    s0, s1 = _broadcast_to_words(scales.to(tl.float32), BITS, word.shape[1], BLOCK_K)
    z0 = (1 << BITS) / 2.0
    z1 = (1 << BITS) / 2.0
    if zeros is not None:
        z0, z1 = _broadcast_to_words(zeros.to(tl.float32), BITS, word.shape[1], BLOCK_K)
    if BITS == 4:
        return _dequantize_4bit(word, s0, s1, z0, z1, 1.0, FORMAT, DTYPE)
    else:
        return _dequantize_8bit(word, s0, z0, FORMAT, DTYPE)


@triton.jit
def _load_plane(words_ptr, stride, rows, k, end, BITS: tl.constexpr, BLOCK_K: tl.constexpr,
                EVEN: tl.constexpr):  # fmt: skip
    """Load a bit plane of a tile, its words shifted so that eight codes begin at bit 0: [R, W]."""
    BLOCKS: tl.constexpr = BLOCK_K // K_BLOCK
    ROWS: tl.constexpr = rows.shape[0]
    plane = _load_words(words_ptr, stride, rows, k, end, BITS, BLOCK_K * BITS // 32, EVEN)
    if BITS < 4:
        # A word of a plane with fewer bits serves 4 / BITS words of the tile.
        parts = plane.reshape(ROWS, BLOCKS, 4, BITS)
        if BITS == 1:
            split = tl.join(tl.join(parts, parts >> 8), tl.join(parts >> 4, parts >> 12))
        else:
            split = tl.join(parts, parts >> 8)
        plane = split.reshape(ROWS, BLOCKS * 16)
    return plane


@triton.jit
def _scale_by_superblock(steps, bases_ptr, stride, rows, k, end, BLOCK_K: tl.constexpr,
                         EVEN: tl.constexpr):  # fmt: skip
    """Multiply the int8 steps of a tile's groups [R, C] by their superblock's base, in fp32."""
    ROWS: tl.constexpr = steps.shape[0]
    COUNT: tl.constexpr = steps.shape[1]
    BASES: tl.constexpr = BLOCK_K // SUPERBLOCK if BLOCK_K > SUPERBLOCK else 1
    superblocks = tl.cdiv(end, SUPERBLOCK)
    bases = _load_scales(
        bases_ptr, rows, stride, k // SUPERBLOCK, superblocks, BASES, False, tl.float16, EVEN
    ).to(tl.float32)
    wide = tl.broadcast_to(bases[:, :, None], (ROWS, BASES, COUNT // BASES))
    return steps.to(tl.float32) * wide.reshape(ROWS, COUNT)


@triton.jit
def dequantize_gguf_ptx(word, high, s0, s1, m0, m1, FORMAT: tl.constexpr, MINIMA: tl.constexpr,
                        DTYPE: tl.constexpr):  # fmt: skip
    """Dequantize GGUF words by inline PTX: four words of two 16-bit values each.

    s0, s1, m0, m1: scales and minima of the first and the last 16 columns of each word; minima are
    read where MINIMA.
    """
    PTX: tl.constexpr = word_ptx(
        FORMAT.bits, FORMAT.high_bits, FORMAT.zero_point, FORMAT.table_low, FORMAT.table_high,
        MINIMA, DTYPE == tl.bfloat16,
    )  # fmt: skip
    CONSTRAINTS: tl.constexpr = word_constraints(FORMAT.high_bits, MINIMA)
    operands = (word,)
    if FORMAT.high_bits > 0:
        operands = operands + (high,)
    operands = operands + (s0, s1)
    if MINIMA:
        # Negated: the PTX adds them in an fma.
        operands = operands + (-m0, -m1)
    return tl.inline_asm_elementwise(
        PTX, CONSTRAINTS, operands, dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True,
        pack=1,
    )  # fmt: skip


@triton.jit
def _dequantize_gguf(word, scales, minima, weight, rows, k, end, FORMAT: tl.constexpr,
                     BLOCK_K: tl.constexpr, EVEN: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """Dequantize the words of a GgufWeight: [R, W, 2, 2, 2]. minima: None for none."""
    high = word
    if FORMAT.high_bits > 0:
        high = _load_plane(
            weight.high_words, weight.high_stride, rows, k, end, FORMAT.high_bits, BLOCK_K, EVEN
        )
    if FORMAT.two_level_scales:
        scales = _scale_by_superblock(
            scales, weight.bases, weight.base_stride, rows, k, end, BLOCK_K, EVEN
        )
    s0, s1 = _broadcast_to_words(scales.to(tl.float32), 4, word.shape[1], BLOCK_K)
    m0 = 0.0
    m1 = 0.0
    if minima is not None:
        if FORMAT.two_level_scales:
            minima = _scale_by_superblock(
                minima, weight.min_bases, weight.base_stride, rows, k, end, BLOCK_K, EVEN
            )
        m0, m1 = _broadcast_to_words(minima.to(tl.float32), 4, word.shape[1], BLOCK_K)
    if FORMAT.decoder == WORD_GGUF:
        p0, p1, p2, p3 = dequantize_gguf_ptx(
            word, high, s0, s1, m0, m1, FORMAT, minima is not None, DTYPE
        )  # fmt: skip
        return _join_pairs(p0, p1, p2, p3, DTYPE)
    else:
        return _join8(
            dequantize_gguf_code(word, high, 0, s0, m0, FORMAT, DTYPE),
            dequantize_gguf_code(word, high, 4, s0, m0, FORMAT, DTYPE),
            dequantize_gguf_code(word, high, 8, s1, m1, FORMAT, DTYPE),
            dequantize_gguf_code(word, high, 12, s1, m1, FORMAT, DTYPE),
            dequantize_gguf_code(word, high, 16, s0, m0, FORMAT, DTYPE),
            dequantize_gguf_code(word, high, 20, s0, m0, FORMAT, DTYPE),
            dequantize_gguf_code(word, high, 24, s1, m1, FORMAT, DTYPE),
            dequantize_gguf_code(word, high, 28, s1, m1, FORMAT, DTYPE),
        )


@triton.jit
def _dequantize_words(word, scales, zeros, weight, rows, FORMAT: tl.constexpr,
                      BLOCK_K: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """Dequantize words by the fastest decoder of their format: [R, W, (2,) 2, 2]."""
    if FORMAT.decoder == PAIRED_INT4 or FORMAT.decoder == SPLIT_SCALE_INT4:
        return _dequantize_int4_ptx(word, scales, zeros, FORMAT, BLOCK_K, DTYPE)
    elif FORMAT.kind == FP4:
        return _dequantize_fp4(word, scales, weight.factors + rows, FORMAT, BLOCK_K, DTYPE)
    else:
        return _dequantize_scaled(word, scales, zeros, FORMAT, BLOCK_K, DTYPE)


@triton.jit
def _load_quantized_tile(weight, rows, k, end, FORMAT: tl.constexpr, BLOCK_K: tl.constexpr,
                         EVEN: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """Load and dequantize a tile of a quantized weight. See load_tile."""
    BITS: tl.constexpr = FORMAT.bits
    # Words per lane in a block: 4 lanes have BITS each (GGUF planes are expanded to 4).
    SPANS: tl.constexpr = 4 if FORMAT.kind == GGUF else BITS
    if FORMAT.kind == GGUF:
        word = _load_plane(weight.words, weight.row_stride, rows, k, end, BITS, BLOCK_K, EVEN)
    else:
        word = _load_words(
            weight.words, weight.row_stride, rows, k, end, BITS, BLOCK_K * BITS // 32, EVEN
        )
    scales = _load_group_scales(weight.scales, weight, rows, k, end, FORMAT, BLOCK_K, EVEN)
    zeros = None
    if weight.zeros is not None:
        zeros = _load_group_scales(weight.zeros, weight, rows, k, end, FORMAT, BLOCK_K, EVEN)
    if FORMAT.kind == GGUF:
        values = _dequantize_gguf(
            word, scales, zeros, weight, rows, k, end, FORMAT, BLOCK_K, EVEN, DTYPE
        )  # fmt: skip
    else:
        values = _dequantize_words(word, scales, zeros, weight, rows, FORMAT, BLOCK_K, DTYPE)
    tile = _to_column_order(values, SPANS, BLOCK_K)
    if FORMAT.opaque:
        # An impure no-op: the compiler cannot propagate mma.sync's operand layout through it.
        tile = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=False, pack=2
        )
    if not EVEN:
        inside = (k + tl.arange(0, BLOCK_K) < end)[None, :]
        tile = tl.where(inside, tile, 0.0)
    return tile


@triton.jit
def load_tile(weight, rows, k, end, FORMAT: tl.constexpr, BLOCK_K: tl.constexpr,
              EVEN: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """Load a tile of a weight in the model's dtype: [R, BLOCK_K].

    Args:
        weight: a WeightOperand.
        rows: [R] int64, indices of weight rows, all in range.
        k: first column, a multiple of K_BLOCK where the weight is quantized.
        end: columns from there on are 0.
        FORMAT: the weight's WeightFormat.
        BLOCK_K: columns of the tile: of a quantized weight a multiple of K_BLOCK, and a multiple or
            a part of its group size.
        EVEN: the tile ends before `end`.
        DTYPE: of the model.
    """
    if FORMAT.kind == DENSE:
        columns = k + tl.arange(0, BLOCK_K)[None, :]
        ptrs = weight.words + rows[:, None] * weight.row_stride + columns
        if EVEN:
            return tl.load(ptrs)
        else:
            return tl.load(ptrs, mask=columns < end, other=0.0)
    else:
        return _load_quantized_tile(weight, rows, k, end, FORMAT, BLOCK_K, EVEN, DTYPE)


@triton.jit
def _accumulate_tile(
    acc, weight, rows, x_ptrs, row_mask, k, end, FORMAT: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_K: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Add the product of columns k .. k + BLOCK_K, those before `end`, to acc."""
    if EVEN:
        x_tile = tl.load(x_ptrs + k, mask=row_mask, other=0.0)
    else:
        inside = (k + tl.arange(0, BLOCK_K) < end)[None, :]
        x_tile = tl.load(x_ptrs + k, mask=row_mask & inside, other=0.0)
    w_tile = load_tile(weight, rows, k, end, FORMAT, BLOCK_K, EVEN, DTYPE)
    return tl.dot(w_tile, x_tile.T, acc, input_precision="ieee")


@triton.jit
def accumulate_partition(
    weight, rows, x_ptrs, row_mask, begin, end, FORMAT: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr,
    PEEL_TAIL: tl.constexpr = True,
):  # fmt: skip
    """Multiply weight rows by rows of x over columns begin .. end, in one ascending accumulation.

    The weight is the left operand of the product, so that few tokens fill a wgmma.

    Args:
        weight, rows, FORMAT, DTYPE: see load_tile.
        x_ptrs: [BLOCK_M, BLOCK_K], pointers to the first columns of the rows of x.
        row_mask: [BLOCK_M, 1]; masked rows count as zeros.
        EVEN: BLOCK_K divides the number of columns.
        PEEL_TAIL: where it does not, multiply the last columns of a quantized weight after the
            loop, so that no tile in the loop is masked: masking sends a tile through shared memory
            instead of from register to register.

    Returns: acc [BLOCK_N, BLOCK_M] fp32.
    """
    TAIL: tl.constexpr = PEEL_TAIL and not EVEN and FORMAT.kind != DENSE
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    loop_end = end
    if TAIL:
        loop_end = begin + (end - begin) // BLOCK_K * BLOCK_K
    for k in range(begin, loop_end, BLOCK_K):
        acc = _accumulate_tile(
            acc, weight, rows, x_ptrs, row_mask, k, end, FORMAT, EVEN or TAIL, BLOCK_K, DTYPE
        )
    if TAIL:
        acc = _accumulate_tile(
            acc, weight, rows, x_ptrs, row_mask, loop_end, end, FORMAT, False, BLOCK_K, DTYPE
        )
    return acc
