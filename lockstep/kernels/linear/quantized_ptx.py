# mypy: disable-error-code="no-untyped-def,no-untyped-call,annotation-unchecked"
"""Inline PTX that dequantizes two words of a row at a time, for quantized_pipeline.py.

A result register has two neighbouring columns in the model's dtype. Scales, zero points and
factors come as the kernel has prepared them; an operand is shared by both words.
"""

import torch
from triton.experimental.gluon import language as gl


def _with_constraints(
    outputs: int, inputs: str, lines: list[str]
) -> tuple[gl.constexpr, gl.constexpr]:
    """Return (PTX, constraints) of `outputs` result registers and of operands of these kinds."""
    kinds = ["=&r"] * outputs + list(inputs)
    return gl.constexpr("\n".join(["{", *lines, "}"])), gl.constexpr(",".join(kinds))


def _int4_ptx(kind: str) -> tuple[gl.constexpr, gl.constexpr]:
    """Return the PTX of 4-bit integers with scales of the model's dtype: eight pairs.

    Operands: two words, the scale, -(2^m + zero). OR-ing a code into the lowest bits of 2^m (128 in
    bf16, 1024 in fp16) makes 2^m + code.
    """
    wide = kind == "bf16"
    magic = "0x43004300" if wide else "0x64006400"
    lines = [".reg .b32 t, w, d, one, none;"]
    lines.append("mov.b32 one, 0x3f803f80;")
    lines.append("mov.b32 none, 0x80008000;")
    for word in range(2):
        for pair in range(4):
            out = f"${4 * word + pair}"
            lines.append(f"shr.u32 w, ${8 + word}, {4 * pair};")
            lines.append(f"lop3.b32 t, w, 0x000f000f, {magic}, 0xea;")
            if wide:
                lines.append("fma.rn.bf16x2 d, t, one, $12;")
                lines.append(f"fma.rn.bf16x2 {out}, d, $10, none;")
            else:
                lines.append("add.rn.f16x2 d, t, $12;")
                lines.append(f"mul.rn.f16x2 {out}, d, $10;")
    return _with_constraints(8, "r" * 6, lines)


def _fma_int4_ptx() -> tuple[gl.constexpr, gl.constexpr]:
    """Return the PTX of symmetric 4-bit integers with bf16 scales: eight pairs, one fma each.

    Operands: two words, -8 * scale, 2^129 * scale. A code that begins at bit 4 of a bf16 word is
    code / 2^129 (see _split_scale_int4_ptx). The fma adds code * scale, which is exact in it, to
    -8 * scale, and rounds once. So the result is (code - 8) * scale, rounded once: the definition.

    Every zero that it returns is positive. In the definition the sign of a zero is that of code - 8
    times that of the scale. A sum of products has the same bits: it begins at +0, and neither a
    product of +0 nor one of -0 changes it.
    """
    lines = [".reg .b32 t;"]
    for word in range(2):
        source = f"${8 + word}"
        for pair in range(4):
            if pair == 0:
                lines.append(f"shl.b32 t, {source}, 4;")
            elif pair > 1:
                lines.append(f"shr.u32 t, {source}, {4 * pair - 4};")
            lines.append(f"and.b32 t, {source if pair == 1 else 't'}, 0x00f000f0;")
            lines.append(f"fma.rn.bf16x2 ${4 * word + pair}, t, $12, $10;")
    return _with_constraints(8, "r" * 6, lines)


def _split_scale_int4_ptx() -> tuple[gl.constexpr, gl.constexpr]:
    """Return the PTX of 4-bit integers with fp16 scales in a bf16 model: eight pairs.

    Operands: two words, 2^6 * hi of the scale, -zero / 2^6, 2^6 * lo of the scale. A code in the
    lowest bits of a bf16 subnormal is code / 2^133. One that begins at bit 4 is code / 2^129: the
    exponent begins at bit 7, and the smallest normal numbers are equally spaced. So two of four
    pairs need no shift; factors 2^127 and 2^123 make both code / 2^6.
    """
    lines = [
        ".reg .b32 w, t, d, l, low, high, none;",
        "mov.b32 low, 0x7f007f00;",
        "mov.b32 high, 0x7d007d00;",
        "mov.b32 none, 0x80008000;",
    ]
    for word in range(2):
        source = f"${8 + word}"
        for pair in range(4):
            if pair == 2:
                lines.append(f"shr.u32 w, {source}, 8;")
                source = "w"
            mask = "0x00f000f0" if pair % 2 else "0x000f000f"
            factor = "high" if pair % 2 else "low"
            lines.append(f"and.b32 t, {source}, {mask};")
            lines.append(f"fma.rn.bf16x2 d, t, {factor}, $12;")
            lines.append("fma.rn.bf16x2 l, d, $14, none;")
            lines.append(f"fma.rn.bf16x2 ${4 * word + pair}, d, $10, l;")
    return _with_constraints(8, "r" * 8, lines)


def _scale_pair(kind: str, low: str, high: str, scale: str, out: int) -> list[str]:
    """Return the PTX lines that scale two fp32 numbers and round them to the pair $out."""
    return [
        f"mul.rn.f32 {low}, {low}, {scale};",
        f"mul.rn.f32 {high}, {high}, {scale};",
        f"cvt.rn.{kind}x2.f32 ${out}, {high}, {low};",
    ]


def _generic_int4_ptx(kind: str) -> tuple[gl.constexpr, gl.constexpr]:
    """Return the PTX of 4-bit integers: two words, fp32 scale, 2^23 + zero -> eight pairs."""
    lines = [".reg .b32 w;", ".reg .f32 l, h;"]
    for word in range(2):
        for pair in range(4):
            for number, bit in (("l", 4 * pair), ("h", 4 * pair + 16)):
                lines.append(f"shr.u32 w, ${8 + word}, {bit};")
                lines.append("lop3.b32 w, w, 0xf, 0x4b000000, 0xea;")
                lines.append(f"mov.b32 {number}, w;")
                lines.append(f"sub.rn.f32 {number}, {number}, $12;")
            lines += _scale_pair(kind, "l", "h", "$10", 4 * word + pair)
    return _with_constraints(8, "rrffff", lines)


def _fp8_ptx(kind: str) -> tuple[gl.constexpr, gl.constexpr]:
    """Return the PTX of e4m3: two words and their fp32 scale -> four pairs."""
    lines = [
        ".reg .b16 l, h, a, b, c, d;",
        ".reg .b32 s, t;",
        ".reg .f32 e, f, g, i;",
    ]
    for word in range(2):
        lines.append(f"mov.b32 {{l, h}}, ${4 + word};")
        lines.append("cvt.rn.f16x2.e4m3x2 s, l;")
        lines.append("cvt.rn.f16x2.e4m3x2 t, h;")
        lines.append("mov.b32 {a, b}, s;")
        lines.append("mov.b32 {c, d}, t;")
        lines += [f"cvt.f32.f16 {to}, {of};" for to, of in zip("efgi", "abcd", strict=True)]
        lines += _scale_pair(kind, "e", "g", "$6", 2 * word)
        lines += _scale_pair(kind, "f", "i", "$6", 2 * word + 1)
    return _with_constraints(4, "rrff", lines)


def _int8_ptx(kind: str) -> tuple[gl.constexpr, gl.constexpr]:
    """Return the PTX of 8-bit integers: two words, fp32 scale, 2^23 + zero -> four pairs."""
    lines = [".reg .b32 t;", ".reg .f32 e, f, g, i;"]
    for word in range(2):
        for byte, name in enumerate("efgi"):
            lines.append(f"prmt.b32 t, ${4 + word}, 0x4b000000, 0x744{byte};")
            lines.append(f"mov.b32 {name}, t;")
            lines.append(f"sub.rn.f32 {name}, {name}, $8;")
        lines += _scale_pair(kind, "e", "g", "$6", 2 * word)
        lines += _scale_pair(kind, "f", "i", "$6", 2 * word + 1)
    return _with_constraints(4, "rrffff", lines)


def _fp4_ptx(kind: str) -> tuple[gl.constexpr, gl.constexpr]:
    """Return the PTX of NVFP4: eight pairs.

    Operands: two words, for each the fp16 scales of its two groups of 16 columns, 2^6 * factor. An
    e2m1 code with its sign at bit 7 of a byte and its magnitude from bit 2 on is an e4m3 code 2^6
    times smaller. Its product with a scale ends at 2^-16 or above, so it is exact in fp16.
    """
    lines = [".reg .b16 l, h, a, b;", ".reg .b32 s, m, c, t, u;", ".reg .f32 e, f;"]
    for word in range(2):
        source = f"${8 + word}"
        scales = f"${10 + 2 * word}"
        for parity in range(2):
            signs = source if parity else "s"
            lines.append(f"shr.u32 m, {source}, 2;" if parity else f"shl.b32 m, {source}, 2;")
            if not parity:
                lines.append(f"shl.b32 s, {source}, 4;")
            lines.append("and.b32 m, m, 0x1c1c1c1c;")
            lines.append(f"lop3.b32 c, {signs}, 0x80808080, m, 0xea;")
            lines.append("mov.b32 {l, h}, c;")
            lines.append("cvt.rn.f16x2.e4m3x2 t, l;")
            lines.append("cvt.rn.f16x2.e4m3x2 u, h;")
            lines.append(f"mul.rn.f16x2 t, t, {scales};")
            lines.append(f"mul.rn.f16x2 u, u, {scales};")
            for group in range(2):
                lines.append("mov.b32 {l, h}, t;")
                lines.append("mov.b32 {a, b}, u;")
                lines.append(f"cvt.f32.f16 e, {'lh'[group]};")
                lines.append(f"cvt.f32.f16 f, {'ab'[group]};")
                lines += _scale_pair(kind, "e", "f", "$14", 4 * word + 2 * group + parity)
    return _with_constraints(8, "rrrrrrff", lines)


def _split_factor_fp4_ptx() -> tuple[gl.constexpr, gl.constexpr]:
    """Return the PTX of NVFP4 with a factor that splits into bf16 hi + lo: eight pairs of bf16.

    Operands: two words; 2^7 * the bf16 scales of the first groups of both words, then of their
    second groups; hi and lo of 2^119 * factor (FACTOR_MISMATCH says which lo serves). An e2m1 code
    with its sign at bit 15 and its magnitude from bit 6 on is a bf16 number 2^126 times smaller.
    Times a scale it is a multiple of 2^-129 with at most 6 bits, so it is exact.
    """
    lines = [".reg .b32 g, s, m, v, l;", ".reg .b16 x, y;"]
    for word in range(2):
        source = f"${8 + word}"
        for pair in range(4):
            if pair % 2 == 0:
                lines.append(f"mov.b32 {{x, y}}, ${10 + pair};")
                lines.append("mov.b32 g, {y, y};" if word else "mov.b32 g, {x, x};")
            if pair < 3:
                lines.append(f"shl.b32 s, {source}, {12 - 4 * pair};")
            if pair < 2:
                lines.append(f"shl.b32 m, {source}, {6 - 4 * pair};")
            else:
                lines.append(f"shr.u32 m, {source}, {4 * pair - 6};")
            lines.append("and.b32 m, m, 0x01c001c0;")
            lines.append(f"lop3.b32 v, {'s' if pair < 3 else source}, 0x80008000, m, 0xea;")
            lines.append("mul.rn.bf16x2 v, v, g;")
            lines.append("mul.rn.bf16x2 l, v, $16;")
            lines.append(f"fma.rn.bf16x2 ${4 * word + pair}, v, $14, l;")
    return _with_constraints(8, "r" * 10, lines)


MANTISSAS = sorted({a * b for a in (1.0, 1.5) for b in (1 + i / 8 for i in range(8))})
"""The 14 mantissas that a product of an e2m1 and an e4m3 code can have."""


def _factor_mismatch_ptx() -> gl.constexpr:
    """Return the PTX that tests a split of a factor: 0 if it serves, else another number.

    Operands: the fp32 factor; hi and lo in bf16, each twice in a register. The split serves if, for
    all p of MANTISSAS, fma(p, hi, p * lo), both rounded to bf16, equals p * factor rounded to fp32
    and then to bf16.
    """
    lines = [".reg .b32 w, l, p;", ".reg .f32 f, g;", "mov.b32 $0, 0;"]
    for low, high in zip(MANTISSAS[::2], MANTISSAS[1::2], strict=True):
        (first, second) = (int(torch.tensor(x).view(torch.int32)) for x in (low, high))
        lines.append(f"mov.b32 p, {first >> 16 | second:#010x};")
        lines.append(f"mul.rn.f32 f, $1, 0f{first:08x};")
        lines.append(f"mul.rn.f32 g, $1, 0f{second:08x};")
        lines.append("cvt.rn.bf16x2.f32 w, g, f;")
        lines.append("mul.rn.bf16x2 l, p, $3;")
        lines.append("fma.rn.bf16x2 l, p, $2, l;")
        lines.append("lop3.b32 $0, l, w, $0, 0xbe;")
    return gl.constexpr("\n".join(["{", *lines, "}"]))


GENERIC_INT4_BF16, GENERIC_INT4_CONSTRAINTS = _generic_int4_ptx("bf16")
GENERIC_INT4_FP16, _ = _generic_int4_ptx("f16")
INT4_BF16, INT4_CONSTRAINTS = _int4_ptx("bf16")
INT4_FP16, _ = _int4_ptx("f16")
FMA_INT4_BF16, FMA_INT4_CONSTRAINTS = _fma_int4_ptx()
SPLIT_SCALE_BF16, SPLIT_SCALE_CONSTRAINTS = _split_scale_int4_ptx()
FP8_BF16, FP8_CONSTRAINTS = _fp8_ptx("bf16")
FP8_FP16, _ = _fp8_ptx("f16")
INT8_BF16, INT8_CONSTRAINTS = _int8_ptx("bf16")
INT8_FP16, _ = _int8_ptx("f16")
FP4_BF16, FP4_CONSTRAINTS = _fp4_ptx("bf16")
SPLIT_FACTOR_FP4_BF16, SPLIT_FACTOR_CONSTRAINTS = _split_factor_fp4_ptx()
FACTOR_MISMATCH = _factor_mismatch_ptx()
FP4_FP16, _ = _fp4_ptx("f16")
DUPLICATE_BF16 = gl.constexpr("cvt.rn.bf16x2.f32 $0, $1, $1;")
DUPLICATE_FP16 = gl.constexpr("cvt.rn.f16x2.f32 $0, $1, $1;")
E4M3_TO_FP16 = gl.constexpr("""
{
    .reg .b16 l, h;
    mov.b32 {l, h}, $2;
    cvt.rn.f16x2.e4m3x2 $0, l;
    cvt.rn.f16x2.e4m3x2 $1, h;
}
""")
"""Four e4m3 codes of a word in fp16, two in a register."""
E4M3_TO_BF16_BY_PARITY = gl.constexpr("""
{
    .reg .b32 t, big;
    mov.b32 big, 0x7f007f00;
    shl.b32 t, $2, 4;
    and.b32 t, t, 0x07f007f0;
    mul.rn.bf16x2 $0, t, big;
    shr.u32 t, $2, 4;
    and.b32 t, t, 0x07f007f0;
    mul.rn.bf16x2 $1, t, big;
}
""")
"""Four unsigned e4m3 codes of a word, none NaN, times 2^7 in bf16: the first and the third, then
the second and the fourth. Their bits are those of bf16 numbers 2^120 times smaller."""
FMA_SCALES = gl.constexpr("""
{
    .reg .b32 s, minus_8, minus_2_126;
    mov.b32 minus_8, 0xc100c100;
    mov.b32 minus_2_126, 0xfe80fe80;
    mov.b32 s, {$2, $2};
    mul.rn.bf16x2 $0, s, minus_8;
    mul.rn.bf16x2 $1, $0, minus_2_126;
}
""")
"""A bf16 scale times -8 and 2^129, each twice in a register. 2^129 is no bf16 number, so the second
product is the first one times -2^126. Both are exact, also for subnormal scales."""
SPLIT_SCALE = gl.constexpr("""
{
    .reg .b32 h;
    .reg .f32 f, g;
    cvt.f32.f16 f, $2;
    mul.rn.f32 f, f, 0f42800000;
    cvt.rn.bf16x2.f32 h, f, f;
    mov.b32 $0, h;
    and.b32 h, h, 0xffff0000;
    mov.b32 g, h;
    sub.rn.f32 g, f, g;
    min.f32 g, g, 0f4e800000;
    cvt.rn.bf16x2.f32 $1, g, g;
}
""")
"""2^6 times an fp16 scale as hi + lo in bf16, each twice in a register. lo is clamped, so that it
is not NaN where the scale is infinite."""
