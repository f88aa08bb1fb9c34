# mypy: ignore-errors
"""Assembly that dequantizes a word of a GgufWeight: eight columns of a row.

The arithmetic is decode_gguf's: a code becomes 2^23 + code by its bits, one subtraction makes it a
number, and the product with the scale is exact wherever a minimum follows (fma rounds once).
"""

import triton


@triton.constexpr_function
def _both(mask):
    """Return a mask of both halves of a word."""
    return f"{mask * 0x10001:#010x}"


@triton.constexpr_function
def _number(register, source, byte, zero):
    """Return lines that make an fp32 of a byte of a register, less `zero`."""
    # 0x4b000000 is 2^23, whose last bit is 1.
    return [
        f"prmt.b32 t, {source}, 0x4b000000, 0x744{byte};",
        f"mov.b32 {register}, t;",
        f"sub.rn.f32 {register}, {register}, 0f{0x4B000000 + zero:08X};",
    ]


@triton.constexpr_function
def _looked_up(table_low, table_high):
    """Return lines that replace codes of four bits by bytes of a table: the word's lower four in
    `p`, its upper four in `u`. prmt reads eight entries; a second one chooses by each code's last
    bit."""
    parts = [table >> shift & 0xFFFFFFFF for table in (table_low, table_high) for shift in (0, 32)]
    lines = [".reg .b32 a, b, s, m, p, u, k<4>;"]
    lines += [f"mov.b32 k{i}, {part:#010x};" for i, part in enumerate(parts)]
    lines.append("and.b32 s, $4, 0x77777777;")
    lines.append("shr.u32 m, $4, 1;")
    lines.append("lop3.b32 m, m, 0x44444444, 0x32103210, 0xea;")
    for register in "pu":
        lines.append("prmt.b32 a, k0, k1, s;")
        lines.append("prmt.b32 b, k2, k3, s;")
        lines.append(f"prmt.b32 {register}, a, b, m;")
        if register == "p":
            lines += ["shr.u32 s, s, 16;", "shr.u32 m, m, 16;"]
    return lines


@triton.constexpr_function
def _shifted(register, source, by):
    """Return the line that shifts left, or right where `by` is below 0."""
    if by > 0:
        return f"shl.b32 {register}, {source}, {by};"
    return f"shr.u32 {register}, {source}, {-by};"


@triton.constexpr_function
def _codes(pair, low_bits, high_bits):
    """Return lines that leave the two codes of a pair in the halves of `c`."""
    lines = [
        _shifted("c", "$4", -low_bits * pair),
        f"and.b32 c, c, {_both(2**low_bits - 1)};",
    ]
    if high_bits:
        mask = _both((2**high_bits - 1) << low_bits)
        lines.append(_shifted("h", "$5", low_bits - high_bits * pair))
        lines.append(f"lop3.b32 c, h, {mask}, c, 0xea;")
    return lines


@triton.constexpr_function
def word_text(low_bits, high_bits, zero, table_low, table_high, minima, bf16):
    """Return the assembly of one word -> four pairs of neighbouring columns.

    Operands: the word of the first plane, that of the second one if there is one, both with their
    codes from bit 0 on; the scales of the first and the last 16 columns; their minima if there are
    any.
    """
    table = table_low != 0
    scales = 6 if high_bits else 5
    lines = [".reg .b32 t, c, h;", ".reg .f32 f, g;"]
    lines += _looked_up(table_low, table_high) if table else []
    for pair in range(4):
        scale = f"${scales + pair // 2}"
        lines += [] if table else _codes(pair, low_bits, high_bits)
        lines += _number("f", "p", pair, zero) if table else _number("f", "c", 0, zero)
        lines += _number("g", "u", pair, zero) if table else _number("g", "c", 2, zero)
        for register in "fg":
            if minima:
                minimum = f"${scales + 2 + pair // 2}"
                lines.append(f"fma.rn.f32 {register}, {register}, {scale}, {minimum};")
            else:
                lines.append(f"mul.rn.f32 {register}, {register}, {scale};")
        lines.append(f"cvt.rn.{'bf16x2' if bf16 else 'f16x2'}.f32 ${pair}, g, f;")
    return "\n".join(["{", *lines, "}"])


@triton.constexpr_function
def word_operands(high_bits, minima):
    """Return the constraints of word_text."""
    words = ",r" * (2 if high_bits else 1)
    return "=&r,=&r,=&r,=&r" + words + ",f" * (4 if minima else 2)


@triton.constexpr_function
def steps_text():
    """Return the assembly of a word of four int8 and a base -> four products in fp32."""
    lines = [".reg .b32 t, x;", ".reg .f32 f;", "lop3.b32 x, $4, 0x80808080, 0, 0x3c;"]
    for byte in range(4):
        lines += _number("f", "x", byte, 128)
        lines.append(f"mul.rn.f32 ${byte}, f, $5;")
    return "\n".join(["{", *lines, "}"])


@triton.constexpr_function
def halves_text(bf16):
    """Return the assembly of a word of two numbers of 16 bits -> both in fp32."""
    if bf16:
        lines = [".reg .b32 t;", "shl.b32 t, $2, 16;", "mov.b32 $0, t;"]
        lines += ["and.b32 t, $2, 0xffff0000;", "mov.b32 $1, t;"]
    else:
        lines = [".reg .b16 l, h;", "mov.b32 {l, h}, $2;"]
        lines += ["cvt.f32.f16 $0, l;", "cvt.f32.f16 $1, h;"]
    return "\n".join(["{", *lines, "}"])
