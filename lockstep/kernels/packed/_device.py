# mypy: ignore-errors
"""How kernels read a weight's tile, packed or not: one device function for all layouts.

A tile is unpacked in registers, in the order of lockstep.kernels.packed._order: joins of what comes
out of a word, then a reshape. Triton 3.6 carries the layout of a wgmma's left operand back through
all of it, to the loads of words and scales, so nothing passes through shared memory a second time.
It does so where the leaves are loads and constants: an index made by `tl.arange` among the values
would end it. For mma.sync a join would widen kWidth to 4, and so change which columns share a
group of 16; `OPAQUE` ends that search (tests/kernels/compile_packed.py looks at both).

The arithmetic of each layout is its definition, in one rounding, by fewer instructions:

- 4-bit integers with scales of the model's dtype: code - zero is exact in it, and a product of two
  numbers of bf16 or fp16, rounded once, is what fp32 rounds to. Two at a time.
- with fp16 scales in bf16: a scale is hi + lo, both bf16; (code - zero) * lo has at most 6 bits, so
  it is exact, and fma((code - zero), hi, that) rounds once.
- all else: 2^23 + code is a number of fp32, made by `or`; one subtraction gives code - zero.
- e4m3: its bits are those of an fp32 2^120 times smaller; subnormal ones too.
- e2m1: those of one 2^126 times smaller. The scale is taken 2^118 times larger, the factor 2^8
  times; all three are exact. By assembly in fp16: 2^14 times smaller, the scale 2^7 times larger,
  so that their product, whose last bit is 2^-17 or more, is exact in fp16; the factor 2^7 times.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

PLAIN = tl.constexpr(0)
INT = tl.constexpr(1)
FP8 = tl.constexpr(2)
FP4 = tl.constexpr(3)
SAME = tl.constexpr(1)
SPLIT = tl.constexpr(2)
E4M3 = tl.constexpr(3)
E2M1 = tl.constexpr(4)
BLOCK = tl.constexpr(128)
"""Columns that _order orders among themselves."""
MINUS_136 = tl.constexpr(0xC308C308 - (1 << 32))
"""Two of -(128 + 8) in bf16."""
MINUS_1032 = tl.constexpr(0xE408E408 - (1 << 32))
"""Two of -(1024 + 8) in fp16."""


class Operand(NamedTuple):
    """What a kernel is given of a weight; a plain one is `words` alone. strides: of rows.

    scales and zeros are words of two where Form.paired. factors: Fp4Weight's. first: Fp8Weight's.
    """

    words: Any
    scales: Any = None
    zeros: Any = None
    factors: Any = None
    stride: Any = 0
    scale_stride: Any = 0
    first: Any = 0


class Form(NamedTuple):
    """A layout, as constants of a kernel.

    group: columns per scale, 0: all. rows: of outputs per scale, 0: all. paired: scales of 16 bits
    are read two at a time, since copies that run ahead take 4 bytes or more. scale: tl dtype of the
    scales. fast: SAME, SPLIT, E4M3 or E2M1 by inline assembly, else 0. opaque: for a target whose
    left operands are mma.sync's.
    """

    kind: int = 0
    bits: int = 16
    group: int = 0
    rows: int = 1
    paired: bool = False
    scale: Any = None
    fast: int = 0
    opaque: bool = False


SAME_BF16 = tl.constexpr("""
{
    .reg .b32 t<4>, one, none;
    mov.b32 one, 0x3f803f80;
    mov.b32 none, 0x80008000;
    shr.u32 t1, $4, 4;
    shr.u32 t2, $4, 8;
    shr.u32 t3, $4, 12;
    lop3.b32 t0, $4, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 t1, t1, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 t2, t2, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 t3, t3, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 t0, t0, one, $7;
    fma.rn.bf16x2 t1, t1, one, $7;
    fma.rn.bf16x2 t2, t2, one, $8;
    fma.rn.bf16x2 t3, t3, one, $8;
    fma.rn.bf16x2 $0, t0, $5, none;
    fma.rn.bf16x2 $1, t1, $5, none;
    fma.rn.bf16x2 $2, t2, $6, none;
    fma.rn.bf16x2 $3, t3, $6, none;
}
""")
"""A word, scales and -(128 + zero) of its halves, each twice in a word -> its four pairs."""
SAME_FP16 = tl.constexpr("""
{
    .reg .b32 t<4>;
    shr.u32 t1, $4, 4;
    shr.u32 t2, $4, 8;
    shr.u32 t3, $4, 12;
    lop3.b32 t0, $4, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 t1, t1, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 t2, t2, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 t3, t3, 0x000f000f, 0x64006400, 0xea;
    add.rn.f16x2 t0, t0, $7;
    add.rn.f16x2 t1, t1, $7;
    add.rn.f16x2 t2, t2, $8;
    add.rn.f16x2 t3, t3, $8;
    mul.rn.f16x2 $0, t0, $5;
    mul.rn.f16x2 $1, t1, $5;
    mul.rn.f16x2 $2, t2, $6;
    mul.rn.f16x2 $3, t3, $6;
}
""")
"""The same in fp16, with -(1024 + zero)."""
SPLIT_BF16 = tl.constexpr("""
{
    .reg .b32 t<4>, l<4>, one, none;
    mov.b32 one, 0x3f803f80;
    mov.b32 none, 0x80008000;
    shr.u32 t1, $4, 4;
    shr.u32 t2, $4, 8;
    shr.u32 t3, $4, 12;
    lop3.b32 t0, $4, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 t1, t1, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 t2, t2, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 t3, t3, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 t0, t0, one, $9;
    fma.rn.bf16x2 t1, t1, one, $9;
    fma.rn.bf16x2 t2, t2, one, $10;
    fma.rn.bf16x2 t3, t3, one, $10;
    fma.rn.bf16x2 l0, t0, $7, none;
    fma.rn.bf16x2 l1, t1, $7, none;
    fma.rn.bf16x2 l2, t2, $8, none;
    fma.rn.bf16x2 l3, t3, $8, none;
    fma.rn.bf16x2 $0, t0, $5, l0;
    fma.rn.bf16x2 $1, t1, $5, l1;
    fma.rn.bf16x2 $2, t2, $6, l2;
    fma.rn.bf16x2 $3, t3, $6, l3;
}
""")
"""As SAME_BF16, a scale being hi ($5, $6) + lo ($7, $8)."""
E2M1_BF16 = tl.constexpr("""
{
    .reg .b16 a, b;
    .reg .b32 s, m, p;
    .reg .f32 l, h;
    shl.b32 s, $4, 12;
    shl.b32 m, $4, 9;
    and.b32 m, m, 0x0e000e00;
    lop3.b32 p, s, 0x80008000, m, 0xea;
    mul.rn.f16x2 p, p, $5;
    mov.b32 {a, b}, p;
    cvt.f32.f16 l, a;
    cvt.f32.f16 h, b;
    mul.rn.f32 l, l, $7;
    mul.rn.f32 h, h, $7;
    cvt.rn.bf16x2.f32 $0, h, l;
    shl.b32 s, $4, 8;
    shl.b32 m, $4, 5;
    and.b32 m, m, 0x0e000e00;
    lop3.b32 p, s, 0x80008000, m, 0xea;
    mul.rn.f16x2 p, p, $5;
    mov.b32 {a, b}, p;
    cvt.f32.f16 l, a;
    cvt.f32.f16 h, b;
    mul.rn.f32 l, l, $7;
    mul.rn.f32 h, h, $7;
    cvt.rn.bf16x2.f32 $1, h, l;
    shl.b32 s, $4, 4;
    shl.b32 m, $4, 1;
    and.b32 m, m, 0x0e000e00;
    lop3.b32 p, s, 0x80008000, m, 0xea;
    mul.rn.f16x2 p, p, $6;
    mov.b32 {a, b}, p;
    cvt.f32.f16 l, a;
    cvt.f32.f16 h, b;
    mul.rn.f32 l, l, $7;
    mul.rn.f32 h, h, $7;
    cvt.rn.bf16x2.f32 $2, h, l;
    shr.u32 m, $4, 3;
    and.b32 m, m, 0x0e000e00;
    lop3.b32 p, $4, 0x80008000, m, 0xea;
    mul.rn.f16x2 p, p, $6;
    mov.b32 {a, b}, p;
    cvt.f32.f16 l, a;
    cvt.f32.f16 h, b;
    mul.rn.f32 l, l, $7;
    mul.rn.f32 h, h, $7;
    cvt.rn.bf16x2.f32 $3, h, l;
}
""")
"""A word, scales of its halves as in SAME_BF16 but in fp16, the factor -> its four pairs."""
E2M1_FP16 = tl.constexpr("""
{
    .reg .b16 a, b;
    .reg .b32 s, m, p;
    .reg .f32 l, h;
    shl.b32 s, $4, 12;
    shl.b32 m, $4, 9;
    and.b32 m, m, 0x0e000e00;
    lop3.b32 p, s, 0x80008000, m, 0xea;
    mul.rn.f16x2 p, p, $5;
    mov.b32 {a, b}, p;
    cvt.f32.f16 l, a;
    cvt.f32.f16 h, b;
    mul.rn.f32 l, l, $7;
    mul.rn.f32 h, h, $7;
    cvt.rn.f16x2.f32 $0, h, l;
    shl.b32 s, $4, 8;
    shl.b32 m, $4, 5;
    and.b32 m, m, 0x0e000e00;
    lop3.b32 p, s, 0x80008000, m, 0xea;
    mul.rn.f16x2 p, p, $5;
    mov.b32 {a, b}, p;
    cvt.f32.f16 l, a;
    cvt.f32.f16 h, b;
    mul.rn.f32 l, l, $7;
    mul.rn.f32 h, h, $7;
    cvt.rn.f16x2.f32 $1, h, l;
    shl.b32 s, $4, 4;
    shl.b32 m, $4, 1;
    and.b32 m, m, 0x0e000e00;
    lop3.b32 p, s, 0x80008000, m, 0xea;
    mul.rn.f16x2 p, p, $6;
    mov.b32 {a, b}, p;
    cvt.f32.f16 l, a;
    cvt.f32.f16 h, b;
    mul.rn.f32 l, l, $7;
    mul.rn.f32 h, h, $7;
    cvt.rn.f16x2.f32 $2, h, l;
    shr.u32 m, $4, 3;
    and.b32 m, m, 0x0e000e00;
    lop3.b32 p, $4, 0x80008000, m, 0xea;
    mul.rn.f16x2 p, p, $6;
    mov.b32 {a, b}, p;
    cvt.f32.f16 l, a;
    cvt.f32.f16 h, b;
    mul.rn.f32 l, l, $7;
    mul.rn.f32 h, h, $7;
    cvt.rn.f16x2.f32 $3, h, l;
}
""")
"""The same in fp16."""
E4M3_PAIRS = tl.constexpr("""
{
    .reg .b16 l, h;
    .reg .b32 s, t, big;
    mov.b32 big, 0x58005800;
    mov.b32 {l, h}, $4;
    cvt.rn.f16x2.e4m3x2 s, l;
    cvt.rn.f16x2.e4m3x2 t, h;
    mul.rn.f16x2 s, s, big;
    mul.rn.f16x2 t, t, big;
    prmt.b32 $0, s, s, 0x1010;
    prmt.b32 $1, s, s, 0x3232;
    prmt.b32 $2, t, t, 0x1010;
    prmt.b32 $3, t, t, 0x3232;
}
""")
"""Four codes of e4m3 in a word -> 2^7 times their values in fp16, each twice in a word."""
E4M3_WORD = tl.constexpr("""
{
    .reg .b16 l, h, a, b, c, d;
    .reg .b32 s, t;
    mov.b32 {l, h}, $4;
    cvt.rn.f16x2.e4m3x2 s, l;
    cvt.rn.f16x2.e4m3x2 t, h;
    mov.b32 {a, b}, s;
    mov.b32 {c, d}, t;
    cvt.f32.f16 $0, a;
    cvt.f32.f16 $1, b;
    cvt.f32.f16 $2, c;
    cvt.f32.f16 $3, d;
}
""")
"""A word -> its four codes' values in fp32, by the instruction of sm_89 and later."""


@triton.jit
def twice(x):
    """x of 16 bits -> words that hold it in both halves."""
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) * 0x10001).to(tl.int32, bitcast=True)


@triton.jit
def halves(pair, DTYPE: tl.constexpr):
    """Words of two numbers of 16 bits -> the lower ones, the upper ones."""
    low = pair.to(tl.int16).to(DTYPE, bitcast=True)
    return low, (pair >> 16).to(tl.int16).to(DTYPE, bitcast=True)


@triton.jit
def decode_e4m3(code):
    """code, 0 .. 255 in int32 -> its value in fp32, NaN where it is one."""
    size = code & 0x7F
    bits = ((code & 0x80) << 24) | (size << 20)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where(size == 0x7F, float("nan"), value)


@triton.jit
def decode(word, BIT: tl.constexpr, scale, zero, factor, FORM: tl.constexpr, DTYPE: tl.constexpr):
    """The weight whose code begins at bit BIT of a word: as its layout defines it."""
    KIND: tl.constexpr = FORM[0]
    if KIND == INT:
        code = (word >> BIT) & ((1 << FORM[1]) - 1)
        number = (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + zero)
        return (number * scale).to(DTYPE)
    elif KIND == FP8:
        return (decode_e4m3((word >> BIT) & 0xFF) * scale).to(DTYPE)
    else:
        bits = ((word << (28 - BIT)) & (-(1 << 31))) | (((word >> BIT) & 7) << 22)
        small = bits.to(tl.float32, bitcast=True)
        return (small * scale * factor).to(DTYPE)


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
def _words(weight, rows, at, end, BITS: tl.constexpr, WORDS: tl.constexpr, EVEN: tl.constexpr):
    """The words of a tile: [R, WORDS]."""
    first = at // (32 // BITS) + tl.arange(0, WORDS)[None, :]
    place = weight[0] + rows[:, None] * weight[4] + first
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
def _unpacked(weight, rows, at, end, FORM: tl.constexpr, COLUMNS: tl.constexpr,
              EVEN: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """load_tile of a packed weight. A block has 4 lanes' words, BITS each."""
    BITS: tl.constexpr = FORM[1]
    word = _words(weight, rows, at, end, BITS, COLUMNS * BITS // 32, EVEN)
    scales = _per_group(weight[1], weight, rows, at, end, FORM, COLUMNS, EVEN)
    zeros = None
    if weight[2] is not None:
        zeros = _per_group(weight[2], weight, rows, at, end, FORM, COLUMNS, EVEN)
    if FORM[6] == SAME or FORM[6] == SPLIT:
        values = _fast_int4(word, scales, zeros, FORM, COLUMNS, DTYPE)
    elif FORM[0] == FP4:
        values = _decode_fp4(word, scales, weight[3] + rows, FORM, COLUMNS, DTYPE)
    else:
        values = _decode(word, scales, zeros, FORM, COLUMNS, DTYPE)
    tile = _ordered(values, BITS, COLUMNS)
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
def chain(
    weight, rows, x, live, begin, end, FORM: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Outputs `rows` of a weight times rows of x, one ascending chain over columns begin .. end:
    [BLOCK_N, BLOCK_M] fp32. The weight is the left operand.

    weight, rows, FORM, DTYPE: see load_tile. x [BLOCK_M, BLOCK_K]: pointers to the first columns of
    its rows; those that are not live [BLOCK_M, 1] count as zeros. EVEN: BLOCK_K divides the length.
    """
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for at in range(begin, end, BLOCK_K):
        if EVEN:
            a = tl.load(x + at, mask=live, other=0.0)
        else:
            inside = (at + tl.arange(0, BLOCK_K) < end)[None, :]
            a = tl.load(x + at, mask=live & inside, other=0.0)
        w = load_tile(weight, rows, at, end, FORM, BLOCK_K, EVEN, DTYPE)
        total = tl.dot(w, a.T, total, input_precision="ieee")
    return total
