# mypy: ignore-errors
"""How kernels read a weight's tile, packed or not: one device function for all layouts.

A tile is unpacked in registers, in the order of word_order.py: joins of what comes
out of a word, then a reshape. Triton 3.6 carries the layout of a wgmma's left operand back through
all of it, to the loads of words and scales, so nothing passes through shared memory a second time.
It does so where the leaves are loads and constants: an index made by `tl.arange` among the values
would end it. For mma.sync a join would widen kWidth to 4, and so change which columns share a
group of 16; `OPAQUE` ends that search (tests/kernels/compile_quantized.py looks at both).

What the words mean stands in _codes.py.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lockstep.kernels.device.dequantize import (
    BY_WORD,
    E2M1,
    E2M1_BF16,
    E2M1_FP16,
    E4M3,
    E4M3_PAIRS,
    E4M3_WORD,
    FP4,
    GGUF,
    HIGH,
    MINUS_136,
    MINUS_1032,
    PLAIN,
    SAME,
    SAME_BF16,
    SAME_FP16,
    SPLIT,
    SPLIT_BF16,
    STEPS,
    TABLE_HIGH,
    TABLE_LOW,
    ZERO,
    decode,
    decode_e4m3,
    decode_gguf,
    halves,
    twice,
)
from lockstep.kernels.formats.weights.gguf_ptx import word_operands, word_text

BLOCK = tl.constexpr(128)
"""Columns that _order orders among themselves."""
SUPERBLOCK = tl.constexpr(256)
"""Columns that share a base scale of GgufWeight."""


class Operand(NamedTuple):
    """What a kernel is given of a weight; a plain one is `words` alone. strides: of rows.

    scales and zeros are words of two where Form.paired. factors: Fp4Weight's. first: Fp8Weight's.
    GgufWeight's minima are `zeros`; high, bases and min_bases are its own, and None elsewhere.
    """

    words: Any
    scales: Any = None
    zeros: Any = None
    factors: Any = None
    stride: Any = 0
    scale_stride: Any = 0
    first: Any = 0
    high: Any = None
    high_stride: Any = None
    bases: Any = None
    min_bases: Any = None
    base_stride: Any = None


class Form(NamedTuple):
    """A layout, as constants of a kernel.

    group: columns per scale, 0: all. rows: of outputs per scale, 0: all. paired: scales of 16 bits
    are read two at a time, since copies that run ahead take 4 bytes or more. scale: tl dtype of the
    scales. fast: SAME, SPLIT, E4M3, E2M1 or BY_WORD by inline assembly, else 0. opaque: for a
    target whose left operands are mma.sync's. Of GgufWeight: high: bits of a code in the second
    plane; zero: subtracted from a code, or from an entry of the table; table_low, table_high: eight
    entries each, a byte each, both 0: no table; steps: scales are a base times a step.
    """

    kind: int = 0
    bits: int = 16
    group: int = 0
    rows: int = 1
    paired: bool = False
    scale: Any = None
    fast: int = 0
    opaque: bool = False
    high: int = 0
    zero: int = 0
    table_low: int = 0
    table_high: int = 0
    steps: bool = False


@triton.jit
def _read(base, rows, stride, first, live, COUNT: tl.constexpr,
          PAIRED: tl.constexpr, SCALE: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """COUNT numbers from column `first` on, per row: [R, COUNT]; 0 where not `live`, of EVEN."""
    if PAIRED:
        at = first // 2 + tl.arange(0, (COUNT + 1) // 2)[None, :]
    else:
        at = first + tl.arange(0, COUNT)[None, :]
    place = base + rows[:, None] * stride + at
    inside = at * (1 + PAIRED) < live
    if PAIRED and COUNT == 1:
        # Of two loads one is masked off: a shift by `first` would end the search for a layout.
        odd = at * 0 + first % 2
        low = tl.load(place, mask=inside & (odd == 0), other=0) & 0xFFFF
        high = (tl.load(place, mask=inside & (odd == 1), other=0) >> 16) & 0xFFFF
        found = (low | high).to(tl.int16).to(SCALE, bitcast=True)
    else:
        if EVEN:
            found = tl.load(place)
        else:
            found = tl.load(place, mask=inside, other=0)
        if PAIRED:
            low, high = halves(found, SCALE)
            found = tl.join(low, high).reshape(rows.shape[0], COUNT)
    return found


@triton.jit
def _spread(found, SPANS: tl.constexpr, WORDS: tl.constexpr, COLUMNS: tl.constexpr):
    """Numbers per group [R, C] -> per word, for the first and the second half of its columns.

    SPANS words of a lane cover a block; a block's groups are at least half a word wide.
    """
    ROWS: tl.constexpr = found.shape[0]
    COUNT: tl.constexpr = found.shape[1]
    BLOCKS: tl.constexpr = COLUMNS // BLOCK
    if COUNT <= BLOCKS:
        wide = tl.broadcast_to(found[:, :, None], (ROWS, COUNT, WORDS // COUNT))
        wide = wide.reshape(ROWS, WORDS)
        return wide, wide
    elif COUNT <= BLOCKS * SPANS:
        each: tl.constexpr = COUNT // BLOCKS
        parts = found.reshape(ROWS, BLOCKS, 1, each, 1)
        wide = tl.broadcast_to(parts, (ROWS, BLOCKS, 4, each, SPANS // each))
        wide = wide.reshape(ROWS, WORDS)
        return wide, wide
    else:
        low, high = tl.split(found.reshape(ROWS, BLOCKS, 1, SPANS, 2))
        low = tl.broadcast_to(low, (ROWS, BLOCKS, 4, SPANS)).reshape(ROWS, WORDS)
        high = tl.broadcast_to(high, (ROWS, BLOCKS, 4, SPANS)).reshape(ROWS, WORDS)
        return low, high


@triton.jit
def _ordered(values, SPANS: tl.constexpr, COLUMNS: tl.constexpr):
    """[R, W, ...] in the order of words -> [R, COLUMNS] in the order of K."""
    ROWS: tl.constexpr = values.shape[0]
    PAIRS: tl.constexpr = BLOCK // (8 * SPANS)
    parts = values.reshape(ROWS, COLUMNS // BLOCK, 4, SPANS, PAIRS, 2)
    return parts.permute(0, 1, 3, 4, 2, 5).reshape(ROWS, COLUMNS)


@triton.jit
def _join8(l0, l1, l2, l3, h0, h1, h2, h3):
    """The lower and upper codes of four pairs -> [..., pair's two bits, half]."""
    low = tl.join(tl.join(l0, l2), tl.join(l1, l3))
    high = tl.join(tl.join(h0, h2), tl.join(h1, h3))
    return tl.join(low, high)


@triton.jit
def _pairs(p0, p1, p2, p3, DTYPE: tl.constexpr):
    """The four pairs of words, numbers of 16 bits -> [R, W, 2, 2, 2]."""
    l0, h0 = halves(p0, DTYPE)
    l1, h1 = halves(p1, DTYPE)
    l2, h2 = halves(p2, DTYPE)
    l3, h3 = halves(p3, DTYPE)
    return _join8(l0, l1, l2, l3, h0, h1, h2, h3)


@triton.jit
def _fast_int4(word, scales, zeros, FORM: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr):
    """Two weights per instruction: [R, W, 2, 2, 2]. zeros: None for 8."""
    WORDS: tl.constexpr = word.shape[1]
    BASE: tl.constexpr = 128.0 if DTYPE == tl.bfloat16 else 1024.0
    if zeros is None:
        MIDDLE: tl.constexpr = MINUS_136 if DTYPE == tl.bfloat16 else MINUS_1032
        o0 = tl.full(word.shape, MIDDLE, tl.int32)
        o1 = o0
    else:
        offset = (-BASE - zeros.to(tl.float32)).to(DTYPE)
        o0, o1 = _spread(twice(offset), 4, WORDS, COLUMNS)
    if FORM[6] == SPLIT:
        wide = scales.to(tl.float32)
        high = wide.to(tl.bfloat16)
        rest = wide - high.to(tl.float32)
        rest = tl.where(rest == rest, rest, 0.0).to(tl.bfloat16)
        s0, s1 = _spread(twice(high), 4, WORDS, COLUMNS)
        r0, r1 = _spread(twice(rest), 4, WORDS, COLUMNS)
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            SPLIT_BF16, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r", [word, s0, s1, r0, r1, o0, o1],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        TEXT: tl.constexpr = SAME_BF16 if DTYPE == tl.bfloat16 else SAME_FP16
        s0, s1 = _spread(twice(scales), 4, WORDS, COLUMNS)
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            TEXT, "=&r,=&r,=&r,=&r,r,r,r,r,r", [word, s0, s1, o0, o1],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    return _pairs(p0, p1, p2, p3, DTYPE)


@triton.jit
def _fast_e2m1(word, scales, factor, COLUMNS: tl.constexpr, DTYPE: tl.constexpr):
    """Two products of code and scale per instruction, exact in fp16: [R, W, 2, 2, 2]."""
    TEXT: tl.constexpr = E2M1_BF16 if DTYPE == tl.bfloat16 else E2M1_FP16
    pairs = tl.inline_asm_elementwise(
        E4M3_PAIRS, "=r,=r,=r,=r,r", [scales], dtype=tl.int32, is_pure=True, pack=4
    )
    s0, s1 = _spread(pairs, 4, word.shape[1], COLUMNS)
    p0, p1, p2, p3 = tl.inline_asm_elementwise(
        TEXT, "=&r,=&r,=&r,=&r,r,r,r,f", [word, s0, s1, factor],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return _pairs(p0, p1, p2, p3, DTYPE)


@triton.jit
def _all_of_4(word, s0, s1, z0, z1, factor, FORM: tl.constexpr, DTYPE: tl.constexpr):
    """The eight codes of words, decoded: [R, W, 2, 2, 2]."""
    return _join8(
        decode(word, 0, s0, z0, factor, FORM, DTYPE),
        decode(word, 4, s0, z0, factor, FORM, DTYPE),
        decode(word, 8, s1, z1, factor, FORM, DTYPE),
        decode(word, 12, s1, z1, factor, FORM, DTYPE),
        decode(word, 16, s0, z0, factor, FORM, DTYPE),
        decode(word, 20, s0, z0, factor, FORM, DTYPE),
        decode(word, 24, s1, z1, factor, FORM, DTYPE),
        decode(word, 28, s1, z1, factor, FORM, DTYPE),
    )


@triton.jit
def _all_of_8(word, scale, zero, FORM: tl.constexpr, DTYPE: tl.constexpr):
    """The four codes of words, decoded: [R, W, 2, 2]."""
    if FORM[6] == E4M3:
        a, b, c, d = tl.inline_asm_elementwise(
            E4M3_WORD, "=f,=f,=f,=f,r", [word],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
        low = tl.join((a * scale).to(DTYPE), (b * scale).to(DTYPE))
        high = tl.join((c * scale).to(DTYPE), (d * scale).to(DTYPE))
    else:
        low = tl.join(
            decode(word, 0, scale, zero, 1.0, FORM, DTYPE),
            decode(word, 8, scale, zero, 1.0, FORM, DTYPE),
        )
        high = tl.join(
            decode(word, 16, scale, zero, 1.0, FORM, DTYPE),
            decode(word, 24, scale, zero, 1.0, FORM, DTYPE),
        )
    return tl.join(low, high)


@triton.jit
def _words(words, stride, rows, at, end, BITS: tl.constexpr, WORDS: tl.constexpr,
           EVEN: tl.constexpr):  # fmt: skip
    """Load the words of a tile: [R, WORDS]."""
    first = at // (32 // BITS) + tl.arange(0, WORDS)[None, :]
    place = words + rows[:, None] * stride + first
    if EVEN:
        return tl.load(place)
    else:
        padded = (end + BLOCK - 1) // BLOCK * BLOCK // (32 // BITS)
        return tl.load(place, mask=first < padded, other=0)


@triton.jit
def _per_group(numbers, weight, rows, at, end, FORM: tl.constexpr, COLUMNS: tl.constexpr,
               EVEN: tl.constexpr):  # fmt: skip
    """The scales or zeros (`numbers` points to them) of a tile's groups: [R, C]."""
    COUNT: tl.constexpr = COLUMNS // FORM[2] if 0 < FORM[2] and FORM[2] < COLUMNS else 1
    column = 0
    last = 1
    if FORM[2] > 0:
        column = tl.multiple_of(at // FORM[2], COUNT)
        last = tl.cdiv(end, FORM[2])
    lines = rows
    if FORM[3] == 0:
        lines = rows * 0
    elif FORM[3] > 1:
        lines = (rows + weight[6]) // FORM[3]
    return _read(numbers, lines, weight[5], column, last, COUNT, FORM[4], FORM[5], EVEN)


@triton.jit
def _decode_fp4(word, scales, factors, FORM: tl.constexpr, COLUMNS: tl.constexpr,
                DTYPE: tl.constexpr):  # fmt: skip
    """NVFP4's words, decoded: [R, W, 2, 2, 2]; factors: pointers, per row."""
    if FORM[6] == E2M1:
        factor = tl.broadcast_to((tl.load(factors) * 128.0)[:, None], word.shape)
        return _fast_e2m1(word, scales, factor, COLUMNS, DTYPE)
    else:
        factor = tl.broadcast_to((tl.load(factors) * 256.0)[:, None], word.shape)
        wide = decode_e4m3(scales.to(tl.int32)) * 3.32306998946229e35
        s0, s1 = _spread(wide, 4, word.shape[1], COLUMNS)
        return _all_of_4(word, s0, s1, 0.0, 0.0, factor, FORM, DTYPE)


@triton.jit
def _decode(word, scales, zeros, FORM: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr):
    """Words of integers or of fp8, decoded: [R, W, (2,) 2, 2]."""
    BITS: tl.constexpr = FORM[1]
    s0, s1 = _spread(scales.to(tl.float32), BITS, word.shape[1], COLUMNS)
    z0 = (1 << BITS) / 2.0
    z1 = (1 << BITS) / 2.0
    if zeros is not None:
        z0, z1 = _spread(zeros.to(tl.float32), BITS, word.shape[1], COLUMNS)
    if BITS == 4:
        return _all_of_4(word, s0, s1, z0, z1, 1.0, FORM, DTYPE)
    else:
        return _all_of_8(word, s0, z0, FORM, DTYPE)


@triton.jit
def _plane(words, stride, rows, at, end, BITS: tl.constexpr, COLUMNS: tl.constexpr,
           EVEN: tl.constexpr):  # fmt: skip
    """Load a plane of a tile, its words shifted so that eight codes begin at bit 0: [R, W]."""
    BLOCKS: tl.constexpr = COLUMNS // BLOCK
    ROWS: tl.constexpr = rows.shape[0]
    found = _words(words, stride, rows, at, end, BITS, COLUMNS * BITS // 32, EVEN)
    if BITS < 4:
        parts = found.reshape(ROWS, BLOCKS, 4, BITS)
        if BITS == 1:
            split = tl.join(tl.join(parts, parts >> 8), tl.join(parts >> 4, parts >> 12))
        else:
            split = tl.join(parts, parts >> 8)
        found = split.reshape(ROWS, BLOCKS * 16)
    return found


@triton.jit
def _times_base(steps, bases, stride, rows, at, end, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """Multiply the steps of a tile's groups [R, C] by the base of their superblock, in fp32."""
    ROWS: tl.constexpr = steps.shape[0]
    COUNT: tl.constexpr = steps.shape[1]
    BASES: tl.constexpr = COLUMNS // SUPERBLOCK if COLUMNS > SUPERBLOCK else 1
    last = tl.cdiv(end, SUPERBLOCK)
    found = _read(bases, rows, stride, at // SUPERBLOCK, last, BASES, False, tl.float16, EVEN).to(
        tl.float32
    )
    wide = tl.broadcast_to(found[:, :, None], (ROWS, BASES, COUNT // BASES))
    return steps.to(tl.float32) * wide.reshape(ROWS, COUNT)


@triton.jit
def gguf_pairs(word, high, s0, s1, m0, m1, FORM: tl.constexpr, MINIMA: tl.constexpr,
               DTYPE: tl.constexpr):  # fmt: skip
    """Dequantize words by assembly: their four pairs. s0, s1, m0, m1: scales and minima of the
    first and the last 16 columns of each word; minima count where MINIMA."""
    TEXT: tl.constexpr = word_text(
        FORM[1], FORM[HIGH], FORM[ZERO], FORM[TABLE_LOW], FORM[TABLE_HIGH], MINIMA,
        DTYPE == tl.bfloat16,
    )  # fmt: skip
    OPERANDS: tl.constexpr = word_operands(FORM[HIGH], MINIMA)
    given = (word,)
    if FORM[HIGH] > 0:
        given = given + (high,)
    given = given + (s0, s1)
    if MINIMA:
        given = given + (-m0, -m1)
    return tl.inline_asm_elementwise(
        TEXT, OPERANDS, given, dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
    )


@triton.jit
def _decode_gguf(word, scales, minima, weight, rows, at, end, FORM: tl.constexpr,
                 COLUMNS: tl.constexpr, EVEN: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """Dequantize the words of a GgufWeight: [R, W, 2, 2, 2]. minima: None for none."""
    high = word
    if FORM[HIGH] > 0:
        high = _plane(weight[7], weight[8], rows, at, end, FORM[HIGH], COLUMNS, EVEN)
    if FORM[STEPS]:
        scales = _times_base(scales, weight[9], weight[11], rows, at, end, COLUMNS, EVEN)
    s0, s1 = _spread(scales.to(tl.float32), 4, word.shape[1], COLUMNS)
    m0 = 0.0
    m1 = 0.0
    if minima is not None:
        if FORM[STEPS]:
            minima = _times_base(minima, weight[10], weight[11], rows, at, end, COLUMNS, EVEN)
        m0, m1 = _spread(minima.to(tl.float32), 4, word.shape[1], COLUMNS)
    if FORM[6] == BY_WORD:
        p0, p1, p2, p3 = gguf_pairs(
            word, high, s0, s1, m0, m1, FORM, minima is not None, DTYPE
        )  # fmt: skip
        return _pairs(p0, p1, p2, p3, DTYPE)
    else:
        return _join8(
            decode_gguf(word, high, 0, s0, m0, FORM, DTYPE),
            decode_gguf(word, high, 4, s0, m0, FORM, DTYPE),
            decode_gguf(word, high, 8, s1, m1, FORM, DTYPE),
            decode_gguf(word, high, 12, s1, m1, FORM, DTYPE),
            decode_gguf(word, high, 16, s0, m0, FORM, DTYPE),
            decode_gguf(word, high, 20, s0, m0, FORM, DTYPE),
            decode_gguf(word, high, 24, s1, m1, FORM, DTYPE),
            decode_gguf(word, high, 28, s1, m1, FORM, DTYPE),
        )


@triton.jit
def _decode_words(word, scales, zeros, weight, rows, FORM: tl.constexpr, COLUMNS: tl.constexpr,
                  DTYPE: tl.constexpr):  # fmt: skip
    """Dequantize words by the fastest way for the layout: [R, W, (2,) 2, 2]."""
    if FORM[6] == SAME or FORM[6] == SPLIT:
        return _fast_int4(word, scales, zeros, FORM, COLUMNS, DTYPE)
    elif FORM[0] == FP4:
        return _decode_fp4(word, scales, weight[3] + rows, FORM, COLUMNS, DTYPE)
    else:
        return _decode(word, scales, zeros, FORM, COLUMNS, DTYPE)


@triton.jit
def _unpacked(weight, rows, at, end, FORM: tl.constexpr, COLUMNS: tl.constexpr,
              EVEN: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """load_tile of a packed weight. A block has 4 lanes' words, BITS each."""
    BITS: tl.constexpr = FORM[1]
    SPANS: tl.constexpr = 4 if FORM[0] == GGUF else BITS
    if FORM[0] == GGUF:
        word = _plane(weight[0], weight[4], rows, at, end, BITS, COLUMNS, EVEN)
    else:
        word = _words(weight[0], weight[4], rows, at, end, BITS, COLUMNS * BITS // 32, EVEN)
    scales = _per_group(weight[1], weight, rows, at, end, FORM, COLUMNS, EVEN)
    zeros = None
    if weight[2] is not None:
        zeros = _per_group(weight[2], weight, rows, at, end, FORM, COLUMNS, EVEN)
    if FORM[0] == GGUF:
        values = _decode_gguf(
            word, scales, zeros, weight, rows, at, end, FORM, COLUMNS, EVEN, DTYPE
        )  # fmt: skip
    else:
        values = _decode_words(word, scales, zeros, weight, rows, FORM, COLUMNS, DTYPE)
    tile = _ordered(values, SPANS, COLUMNS)
    if FORM[7]:
        tile = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=False, pack=2
        )
    if not EVEN:
        inside = (at + tl.arange(0, COLUMNS) < end)[None, :]
        tile = tl.where(inside, tile, 0.0)
    return tile


@triton.jit
def load_tile(weight, rows, at, end, FORM: tl.constexpr, COLUMNS: tl.constexpr,
              EVEN: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """A weight's tile in the model's dtype: [R, COLUMNS].

    weight: an Operand; rows [R] int64: which outputs, all of them there. at: the first column, a
    multiple of BLOCK where packed; columns from `end` on are 0. EVEN: the tile ends before `end`.
    FORM: its Form; COLUMNS: of the tile, a multiple of BLOCK where packed, and one of FORM.group or
    a part of it.
    """
    if FORM[0] == PLAIN:
        columns = at + tl.arange(0, COLUMNS)[None, :]
        place = weight[0] + rows[:, None] * weight[4] + columns
        if EVEN:
            return tl.load(place)
        else:
            return tl.load(place, mask=columns < end, other=0.0)
    else:
        return _unpacked(weight, rows, at, end, FORM, COLUMNS, EVEN, DTYPE)


@triton.jit
def _link(
    total, weight, rows, x, live, at, end, FORM: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_K: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """`total` and the products of columns at .. at + BLOCK_K, those before `end`. See chain."""
    if EVEN:
        a = tl.load(x + at, mask=live, other=0.0)
    else:
        inside = (at + tl.arange(0, BLOCK_K) < end)[None, :]
        a = tl.load(x + at, mask=live & inside, other=0.0)
    w = load_tile(weight, rows, at, end, FORM, BLOCK_K, EVEN, DTYPE)
    return tl.dot(w, a.T, total, input_precision="ieee")


@triton.jit
def chain(
    weight, rows, x, live, begin, end, FORM: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr,
    APART: tl.constexpr = True,
):  # fmt: skip
    """Outputs `rows` of a weight times rows of x, one ascending chain over columns begin .. end:
    [BLOCK_N, BLOCK_M] fp32. The weight is the left operand.

    weight, rows, FORM, DTYPE: see load_tile. x [BLOCK_M, BLOCK_K]: pointers to the first columns of
    its rows; those that are not live [BLOCK_M, 1] count as zeros. EVEN: BLOCK_K divides the length.
    APART: where it does not, a packed weight's last columns stand behind the loop, so that no other
    value is masked: what is masked passes through shared memory, and not from register to register.
    """
    TAIL: tl.constexpr = APART and not EVEN and FORM[0] != PLAIN
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    whole = end
    if TAIL:
        whole = begin + (end - begin) // BLOCK_K * BLOCK_K
    for at in range(begin, whole, BLOCK_K):
        total = _link(total, weight, rows, x, live, at, end, FORM, EVEN or TAIL, BLOCK_K, DTYPE)
    if TAIL:
        total = _link(total, weight, rows, x, live, whole, end, FORM, False, BLOCK_K, DTYPE)
    return total
