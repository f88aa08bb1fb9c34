# mypy: ignore-errors
"""Assembly that dequantizes two words of a row at a time, for quantized_pipeline.py.

A result is two columns side by side of the model's dtype, in one register. Numbers of a group, or
of an output, come as the kernel has prepared them, each once for both words.
"""

import torch
from triton.experimental.gluon import language as gl


def _text(outputs: int, inputs: str, lines: list[str]) -> tuple[gl.constexpr, gl.constexpr]:
    """Assembly and its constraints: `outputs` words from operands of these kinds."""
    kinds = ["=&r"] * outputs + list(inputs)
    return gl.constexpr("\n".join(["{", *lines, "}"])), gl.constexpr(",".join(kinds))


def _int4(kind: str) -> tuple[gl.constexpr, gl.constexpr]:
    """Two words, scales and -(2^m + zero) -> eight pairs of this kind.

    A code in the lowest bits of 2^m, 128 in bf16 and 1024 in fp16, is 2^m + code.
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
    return _text(8, "r" * 6, lines)


def _split() -> tuple[gl.constexpr, gl.constexpr]:
    """Two words, 2^6 times the scales, -zero / 2^6, and 2^6 times what scales lack in bf16 -> eight
    pairs of bf16.

    A code in the lowest bits of a subnormal number of bf16 is code / 2^133. One that begins at bit
    4, where the exponent does at bit 7, is code / 2^129: the first numbers that are not subnormal
    are as far apart. So two pairs need no shift; 2^127 and 2^123 make both code / 2^6.
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
            up = "high" if pair % 2 else "low"
            lines.append(f"and.b32 t, {source}, {mask};")
            lines.append(f"fma.rn.bf16x2 d, t, {up}, $12;")
            lines.append("fma.rn.bf16x2 l, d, $14, none;")
            lines.append(f"fma.rn.bf16x2 ${4 * word + pair}, d, $10, l;")
    return _text(8, "r" * 8, lines)


def _scaled(kind: str, low: str, high: str, scale: str, out: int) -> list[str]:
    """Two numbers of fp32, times a scale -> pair $out of this kind."""
    return [
        f"mul.rn.f32 {low}, {low}, {scale};",
        f"mul.rn.f32 {high}, {high}, {scale};",
        f"cvt.rn.{kind}x2.f32 ${out}, {high}, {low};",
    ]


def _wide_int4(kind: str) -> tuple[gl.constexpr, gl.constexpr]:
    """Two words, their scale and 2^23 + zero in fp32 -> eight pairs of this kind."""
    lines = [".reg .b32 w;", ".reg .f32 l, h;"]
    for word in range(2):
        for pair in range(4):
            for number, bit in (("l", 4 * pair), ("h", 4 * pair + 16)):
                lines.append(f"shr.u32 w, ${8 + word}, {bit};")
                lines.append("lop3.b32 w, w, 0xf, 0x4b000000, 0xea;")
                lines.append(f"mov.b32 {number}, w;")
                lines.append(f"sub.rn.f32 {number}, {number}, $12;")
            lines += _scaled(kind, "l", "h", "$10", 4 * word + pair)
    return _text(8, "rrffff", lines)


def _fp8(kind: str) -> tuple[gl.constexpr, gl.constexpr]:
    """Two words of e4m3 and their scale in fp32 -> four pairs of this kind."""
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
        lines += _scaled(kind, "e", "g", "$6", 2 * word)
        lines += _scaled(kind, "f", "i", "$6", 2 * word + 1)
    return _text(4, "rrff", lines)


def _int8(kind: str) -> tuple[gl.constexpr, gl.constexpr]:
    """Two words, their scale and 2^23 + zero in fp32 -> four pairs of this kind."""
    lines = [".reg .b32 t;", ".reg .f32 e, f, g, i;"]
    for word in range(2):
        for byte, name in enumerate("efgi"):
            lines.append(f"prmt.b32 t, ${4 + word}, 0x4b000000, 0x744{byte};")
            lines.append(f"mov.b32 {name}, t;")
            lines.append(f"sub.rn.f32 {name}, {name}, $8;")
        lines += _scaled(kind, "e", "g", "$6", 2 * word)
        lines += _scaled(kind, "f", "i", "$6", 2 * word + 1)
    return _text(4, "rrffff", lines)


def _fp4(kind: str) -> tuple[gl.constexpr, gl.constexpr]:
    """Two words, the scales in fp16 of the two groups of columns of each, and 2^6 times the factor
    -> eight pairs of this kind.

    A code of e2m1 whose sign is at bit 7 of a byte and whose size begins at bit 2 is one of e4m3,
    2^6 times smaller. With a scale the product, whose last bit is 2^-16 or more, is exact in fp16.
    """
    lines = [".reg .b16 l, h, a, b;", ".reg .b32 s, m, c, t, u;", ".reg .f32 e, f;"]
    for word in range(2):
        source = f"${8 + word}"
        scales = f"${10 + 2 * word}"
        for place in range(2):
            signs = source if place else "s"
            lines.append(f"shr.u32 m, {source}, 2;" if place else f"shl.b32 m, {source}, 2;")
            if not place:
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
                lines += _scaled(kind, "e", "f", "$14", 4 * word + 2 * group + place)
    return _text(8, "rrrrrrff", lines)


def _fp4_in_parts() -> tuple[gl.constexpr, gl.constexpr]:
    """Two words, 2^7 times the scales in bf16 of the first groups of columns of both, and of the
    second ones, and the two parts of 2^119 times the factor (see WRONG) -> eight pairs of bf16.

    A code of e2m1 whose sign is at bit 15 and whose size begins at bit 6 is one of bf16, 2^126
    times smaller. Times a scale it is a multiple of 2^-129, of at most 6 bits, so it is exact.
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
    return _text(8, "r" * 10, lines)


MANTISSAS = sorted({a * b for a in (1.0, 1.5) for b in (1 + i / 8 for i in range(8))})
"""Of a product of a code of e2m1 and one of e4m3: 14."""


def _wrong() -> gl.constexpr:
    """A factor, and hi and lo in bf16, each twice -> 0 if fma(p, hi, p * lo), each rounded, is p
    times the factor, rounded to fp32 and then to bf16, for all p of MANTISSAS, else another number.
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


WIDE_BF16, TAKES_WIDE = _wide_int4("bf16")
WIDE_FP16, _ = _wide_int4("f16")
INT4_BF16, TAKES_INT4 = _int4("bf16")
INT4_FP16, _ = _int4("f16")
SPLIT_BF16, TAKES_SPLIT = _split()
FP8_BF16, TAKES_FP8 = _fp8("bf16")
FP8_FP16, _ = _fp8("f16")
INT8_BF16, TAKES_INT8 = _int8("bf16")
INT8_FP16, _ = _int8("f16")
FP4_BF16, TAKES_FP4 = _fp4("bf16")
FP4_IN_PARTS, TAKES_FP4_IN_PARTS = _fp4_in_parts()
WRONG = _wrong()
FP4_FP16, _ = _fp4("f16")
TWICE_BF16 = gl.constexpr("cvt.rn.bf16x2.f32 $0, $1, $1;")
TWICE_FP16 = gl.constexpr("cvt.rn.f16x2.f32 $0, $1, $1;")
PAIRS_OF_FP8 = gl.constexpr("""
{
    .reg .b16 l, h;
    mov.b32 {l, h}, $2;
    cvt.rn.f16x2.e4m3x2 $0, l;
    cvt.rn.f16x2.e4m3x2 $1, h;
}
""")
"""Four codes of e4m3 in a word -> their values in fp16, two in a word."""
EVEN_AND_ODD_FP8 = gl.constexpr("""
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
"""Four codes of e4m3 in a word, of no sign and not NaN -> 2^7 times their values in bf16: the first
and the third, the second and the fourth. Their bits are those of numbers 2^120 times smaller."""
PARTS = gl.constexpr("""
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
"""2^6 times a number of fp16: its nearest in bf16 and what that lacks, no NaN where it is infinite,
both twice."""
