# mypy: ignore-errors
"""What a weight's codes mean: the numbers of a word of them, one by one or all by inline assembly.

The arithmetic of each layout is its definition, in one rounding, by fewer instructions:

- 4-bit integers with scales of the model's dtype: code - zero is exact in it, and a product of two
  numbers of bf16 or fp16, rounded once, is what fp32 rounds to. Two at a time.
- with fp16 scales in bf16: a scale is hi + lo, both bf16; (code - zero) * lo has at most 6 bits, so
  it is exact, and fma((code - zero), hi, that) rounds once.
- all else: 2^23 + code is a number of fp32, made by `or`; one subtraction gives code - zero.
- types of GGUF: code - zero in the same way, a table's entries being bytes; times the scale, less
  the minimum. Only the difference rounds where there are minima (_gguf.py).
- e4m3: its bits are those of an fp32 2^120 times smaller; subnormal ones too.
- e2m1: those of one 2^126 times smaller. The scale is taken 2^118 times larger, the factor 2^8
  times; all three are exact. By assembly in fp16: 2^14 times smaller, the scale 2^7 times larger,
  so that their product, whose last bit is 2^-17 or more, is exact in fp16; the factor 2^7 times.
"""

import triton
import triton.language as tl


def _e2m1(dtype: str) -> str:
    """Assembly: the eight codes of a word as pairs of numbers of a dtype, by PTX's name of it."""
    lines = []
    for pair in range(4):
        places = (f"shl.b32 s, $4, {12 - 4 * pair};", f"shl.b32 m, $4, {9 - 4 * pair};")
        last = ("shr.u32 m, $4, 3;",)
        lines += [
            *(last if pair == 3 else places),
            "and.b32 m, m, 0x0e000e00;",
            f"lop3.b32 p, {'$4' if pair == 3 else 's'}, 0x80008000, m, 0xea;",
            f"mul.rn.f16x2 p, p, ${5 + pair // 2};",
            "mov.b32 {a, b}, p;",
            "cvt.f32.f16 l, a;",
            "cvt.f32.f16 h, b;",
            "mul.rn.f32 l, l, $7;",
            "mul.rn.f32 h, h, $7;",
            f"cvt.rn.{dtype}x2.f32 ${pair}, h, l;",
        ]
    body = "".join(f"    {line}\n" for line in lines)
    return f"\n{{\n    .reg .b16 a, b;\n    .reg .b32 s, m, p;\n    .reg .f32 l, h;\n{body}}}\n"


PLAIN = tl.constexpr(0)
INT = tl.constexpr(1)
FP8 = tl.constexpr(2)
FP4 = tl.constexpr(3)
GGUF = tl.constexpr(4)
SAME = tl.constexpr(1)
SPLIT = tl.constexpr(2)
E4M3 = tl.constexpr(3)
E2M1 = tl.constexpr(4)
IN_PARTS = tl.constexpr(5)
BY_WORD = tl.constexpr(6)
HIGH = tl.constexpr(8)
"""Positions of the fields of Form that only types of GGUF have."""
ZERO = tl.constexpr(9)
TABLE_LOW = tl.constexpr(10)
TABLE_HIGH = tl.constexpr(11)
STEPS = tl.constexpr(12)
MINUS_136 = tl.constexpr(0xC308C308 - (1 << 32))
"""Two of -(128 + 8) in bf16."""
MINUS_1032 = tl.constexpr(0xE408E408 - (1 << 32))
"""Two of -(1024 + 8) in fp16."""
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
E2M1_BF16 = tl.constexpr(_e2m1("bf16"))
"""A word, scales of its halves as in SAME_BF16 but in fp16, the factor -> its four pairs."""
E2M1_FP16 = tl.constexpr(_e2m1("f16"))
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
def decode_gguf(word, high, BIT: tl.constexpr, scale, minimum, FORM: tl.constexpr,
                DTYPE: tl.constexpr):  # fmt: skip
    """Dequantize one of the eight codes of a word, that at bit BIT if a code has four bits.

    word, high: codes in the first and in the second plane, from bit 0 on."""
    BITS: tl.constexpr = FORM[1]
    HALF: tl.constexpr = BIT // 16 * 16
    PAIR: tl.constexpr = BIT % 16 // 4
    code = (word >> (HALF + PAIR * BITS)) & ((1 << BITS) - 1)
    if FORM[HIGH] > 0:
        upper = (high >> (HALF + PAIR * FORM[HIGH])) & ((1 << FORM[HIGH]) - 1)
        code = code | (upper << BITS)
    if FORM[TABLE_LOW] != 0:
        # Eight bytes in each half of the table: a shift is a lookup in registers.
        entries = tl.where(code < 8, FORM[TABLE_LOW], FORM[TABLE_HIGH])
        code = ((entries >> ((code & 7) * 8)) & 255).to(tl.int32)
    value = (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + FORM[ZERO])
    return (value * scale - minimum).to(DTYPE)
