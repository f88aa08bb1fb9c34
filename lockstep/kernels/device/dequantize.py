# mypy: disable-error-code="no-untyped-def,no-untyped-call,annotation-unchecked"
"""Dequantization of single codes and of whole 32-bit words, in Triton and in inline PTX.

Every code path below computes exactly round(fp32 definition of the format). The faster ones use
fewer instructions for the same bits:

- 4-bit integers whose scales have the model's dtype: code - zero is exact in that dtype, and a
  product of two bf16 (fp16) numbers rounded once equals the fp32 product rounded once. Two codes
  per instruction.
- 4-bit integers without zero points whose bf16 scales are below a bound: one fma of the code as a
  subnormal number, the scale 2^133 (or 2^129) times larger, and -8 * scale. The fma rounds once.
  Two codes per instruction.
- 4-bit integers with fp16 scales in a bf16 model: the scale is split into hi + lo, both bf16.
  (code - zero) * lo has at most 6 bits, so it is exact; fma(code - zero, hi, that) rounds once.
- Generic integers: 2^23 + code is an fp32 number, made by OR-ing the code into its mantissa; one
  subtraction gives code - zero.
- GGUF types: code - zero in the same way (entries of a lookup table are bytes); times the scale,
  minus the minimum. With minima only the difference rounds (formats/weights/gguf.py).
- e4m3: its bits are those of an fp32 number 2^120 times smaller, subnormals included.
- e2m1: its bits are those of an fp32 number 2^126 times smaller. The scale is taken 2^118 times
  larger, the factor 2^8 times; all three are exact. In PTX e2m1 goes through fp16: 2^14 times
  smaller, the scale 2^7 times larger. Their product ends at 2^-17 or above, so it is exact in fp16;
  the factor is taken 2^7 times larger.
"""

import triton
import triton.language as tl


def _e2m1_ptx(dtype: str) -> str:
    """Return the PTX that turns the eight e2m1 codes of a word into four pairs of dtype."""
    lines = []
    for pair in range(4):
        # Sign bits go to bits 15 and 31, magnitudes to the mantissa top of an fp16 pair.
        shifts = (f"shl.b32 s, $4, {12 - 4 * pair};", f"shl.b32 m, $4, {9 - 4 * pair};")
        last_shift = ("shr.u32 m, $4, 3;",)
        lines += [
            *(last_shift if pair == 3 else shifts),
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


# WeightFormat.kind: the storage type of a weight.
DENSE = tl.constexpr(0)
INT = tl.constexpr(1)
FP8 = tl.constexpr(2)
FP4 = tl.constexpr(3)
GGUF = tl.constexpr(4)

# WeightFormat.decoder: which inline PTX dequantizes; GENERIC uses Triton operations alone.
GENERIC = tl.constexpr(0)
PAIRED_INT4 = tl.constexpr(1)
SPLIT_SCALE_INT4 = tl.constexpr(2)
CVT_E4M3 = tl.constexpr(3)
FP16_E2M1 = tl.constexpr(4)
SPLIT_FACTOR_FP4 = tl.constexpr(5)
WORD_GGUF = tl.constexpr(6)
FMA_INT4 = tl.constexpr(7)

MINUS_136 = tl.constexpr(0xC308C308 - (1 << 32))
"""Two bf16 numbers -(128 + 8): the offset of symmetric codes in the paired decoder."""
MINUS_1032 = tl.constexpr(0xE408E408 - (1 << 32))
"""Two fp16 numbers -(1024 + 8): the same offset in fp16."""
INT4_TO_BF16 = tl.constexpr("""
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
"""Four bf16 pairs of a word. Inputs: the word; the scales of its two halves, then the offsets
-(128 + zero) of both, each number twice in a register. fma(t, 1, offset) is code - zero: 0x4300 is
128 in bf16, whose last mantissa bit is 1."""
INT4_TO_FP16 = tl.constexpr("""
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
"""Four fp16 pairs of a word; inputs as of INT4_TO_BF16 with offsets -(1024 + zero)."""
INT4_SPLIT_TO_BF16 = tl.constexpr("""
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
"""INT4_TO_BF16 for scales that are split into hi ($5, $6) + lo ($7, $8)."""
E2M1_TO_BF16 = tl.constexpr(_e2m1_ptx("bf16"))
"""Four bf16 pairs of a word of e2m1. Inputs: the word; the fp16 scales of its halves, each twice in
a register; the fp32 factor."""
E2M1_TO_FP16 = tl.constexpr(_e2m1_ptx("f16"))
"""Four fp16 pairs of a word of e2m1; inputs as of E2M1_TO_BF16."""
E4M3_TO_FP16_TWICE = tl.constexpr("""
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
"""Four e4m3 codes of a word times 2^7 in fp16, each number twice in a register."""
E4M3_TO_FP32 = tl.constexpr("""
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
"""Four e4m3 codes of a word in fp32, by the cvt instruction of sm_89 and later."""


@triton.jit
def duplicate_16bit(x):
    """Return words that hold each 16-bit number of x in both halves."""
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) * 0x10001).to(tl.int32, bitcast=True)


@triton.jit
def split_16bit(words, DTYPE: tl.constexpr):
    """Split words into their (lower, upper) 16-bit numbers of DTYPE."""
    low = words.to(tl.int16).to(DTYPE, bitcast=True)
    return low, (words >> 16).to(tl.int16).to(DTYPE, bitcast=True)


@triton.jit
def e4m3_to_fp32(code):
    """Convert e4m3fn codes (0 .. 255, int32) to fp32, NaN included."""
    magnitude = code & 0x7F
    bits = ((code & 0x80) << 24) | (magnitude << 20)
    # The exponent biases differ by 120: 2^120 makes up for it, exactly.
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where(magnitude == 0x7F, float("nan"), value)


@triton.jit
def dequantize_code(word, BIT: tl.constexpr, scale, zero, factor, FORMAT: tl.constexpr,
                    DTYPE: tl.constexpr):  # fmt: skip
    """Dequantize the code that begins at bit BIT of each word, as its format defines it."""
    KIND: tl.constexpr = FORMAT.kind
    if KIND == INT:
        code = (word >> BIT) & ((1 << FORMAT.bits) - 1)
        # 0x4B000000 is 2^23 in fp32, whose last mantissa bit is 1.
        number = (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + zero)
        return (number * scale).to(DTYPE)
    elif KIND == FP8:
        return (e4m3_to_fp32((word >> BIT) & 0xFF) * scale).to(DTYPE)
    else:
        bits = ((word << (28 - BIT)) & (-(1 << 31))) | (((word >> BIT) & 7) << 22)
        tiny = bits.to(tl.float32, bitcast=True)
        return (tiny * scale * factor).to(DTYPE)


@triton.jit
def dequantize_gguf_code(word, high, BIT: tl.constexpr, scale, minimum, FORMAT: tl.constexpr,
                         DTYPE: tl.constexpr):  # fmt: skip
    """Dequantize one of the eight GGUF codes of a word.

    BIT names the code by the bit at which it would begin if codes had four bits. word and high are
    the codes of the first and the second bit plane, shifted so that they begin at bit 0.
    """
    BITS: tl.constexpr = FORMAT.bits
    HALF: tl.constexpr = BIT // 16 * 16
    PAIR: tl.constexpr = BIT % 16 // 4
    code = (word >> (HALF + PAIR * BITS)) & ((1 << BITS) - 1)
    if FORMAT.high_bits > 0:
        upper = (high >> (HALF + PAIR * FORMAT.high_bits)) & ((1 << FORMAT.high_bits) - 1)
        code = code | (upper << BITS)
    if FORMAT.table_low != 0:
        # Each half of the table is eight bytes in an int64: a shift is a lookup in registers.
        entries = tl.where(code < 8, FORMAT.table_low, FORMAT.table_high)
        code = ((entries >> ((code & 7) * 8)) & 255).to(tl.int32)
    value = (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + FORMAT.zero_point)
    return (value * scale - minimum).to(DTYPE)
