# mypy: ignore-errors
"""Inline PTX that dequantizes a word of a GgufWeight: eight columns of a row.

The arithmetic is that of dequantize_gguf_code: OR-ing a code into the bits of 2^23 makes 2^23 +
code, one subtraction makes the number, and the product with the scale is exact wherever a minimum
follows, so that an fma rounds once.
"""

import triton


@triton.constexpr_function
def _half_masks(mask):
    """Return a 16-bit mask repeated in both halves of a word, as a PTX literal."""
    return f"{mask * 0x10001:#010x}"


@triton.constexpr_function
def _byte_to_fp32(register, source, byte, zero):
    """Return PTX lines that convert a byte of a register to fp32 and subtract `zero`."""
    # 0x4b000000 is 2^23 in fp32, whose last mantissa bit is 1; prmt inserts the byte there.
    return [
        f"prmt.b32 t, {source}, 0x4b000000, 0x744{byte};",
        f"mov.b32 {register}, t;",
        f"sub.rn.f32 {register}, {register}, 0f{0x4B000000 + zero:08X};",
    ]


@triton.constexpr_function
def _table_lookup(table_low, table_high):
    """Return PTX lines that replace 4-bit codes by bytes of a 16-entry table.

    The lower four codes of the word end in `p`, the upper four in `u`. A prmt looks up eight
    entries by the low three bits of four codes, for each half of the table; a third prmt selects
    between the two results by each code's highest bit.
    """
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
def _shift(register, source, by):
    """Return the PTX line that shifts left by `by` bits, or right where `by` is negative."""
    if by > 0:
        return f"shl.b32 {register}, {source}, {by};"
    return f"shr.u32 {register}, {source}, {-by};"


@triton.constexpr_function
def _extract_pair(pair, low_bits, high_bits):
    """Return PTX lines that put the two codes of a pair into the halves of `c`."""
    lines = [
        _shift("c", "$4", -low_bits * pair),
        f"and.b32 c, c, {_half_masks(2**low_bits - 1)};",
    ]
    if high_bits:
        mask = _half_masks((2**high_bits - 1) << low_bits)
        lines.append(_shift("h", "$5", low_bits - high_bits * pair))
        lines.append(f"lop3.b32 c, h, {mask}, c, 0xea;")
    return lines


@triton.constexpr_function
def word_ptx(low_bits, high_bits, zero, table_low, table_high, minima, bf16):
    """Return the PTX that dequantizes one word to four pairs of neighbouring columns.

    Operands: the word of the first bit plane and that of the second (where high_bits), both with
    their codes from bit 0 on; the scales of the first and the last 16 columns; the negated minima
    of both (where minima).
    """
    table = table_low != 0
    scales = 6 if high_bits else 5
    lines = [".reg .b32 t, c, h;", ".reg .f32 f, g;"]
    lines += _table_lookup(table_low, table_high) if table else []
    for pair in range(4):
        scale = f"${scales + pair // 2}"
        lines += [] if table else _extract_pair(pair, low_bits, high_bits)
        lines += _byte_to_fp32("f", "p", pair, zero) if table else _byte_to_fp32("f", "c", 0, zero)
        lines += _byte_to_fp32("g", "u", pair, zero) if table else _byte_to_fp32("g", "c", 2, zero)
        for register in "fg":
            if minima:
                minimum = f"${scales + 2 + pair // 2}"
                lines.append(f"fma.rn.f32 {register}, {register}, {scale}, {minimum};")
            else:
                lines.append(f"mul.rn.f32 {register}, {register}, {scale};")
        lines.append(f"cvt.rn.{'bf16x2' if bf16 else 'f16x2'}.f32 ${pair}, g, f;")
    return "\n".join(["{", *lines, "}"])


@triton.constexpr_function
def word_constraints(high_bits, minima):
    """Return the operand constraints of word_ptx."""
    words = ",r" * (2 if high_bits else 1)
    return "=&r,=&r,=&r,=&r" + words + ",f" * (4 if minima else 2)


@triton.constexpr_function
def steps_ptx():
    """Return the PTX that multiplies the four int8 of a word by a base: four fp32 values."""
    lines = [".reg .b32 t, x;", ".reg .f32 f;", "lop3.b32 x, $4, 0x80808080, 0, 0x3c;"]
    for byte in range(4):
        lines += _byte_to_fp32("f", "x", byte, 128)
        lines.append(f"mul.rn.f32 ${byte}, f, $5;")
    return "\n".join(["{", *lines, "}"])


@triton.constexpr_function
def widen_ptx(bf16):
    """Return the PTX that widens the two 16-bit numbers of a word to fp32."""
    if bf16:
        lines = [".reg .b32 t;", "shl.b32 t, $2, 16;", "mov.b32 $0, t;"]
        lines += ["and.b32 t, $2, 0xffff0000;", "mov.b32 $1, t;"]
    else:
        lines = [".reg .b16 l, h;", "mov.b32 {l, h}, $2;"]
        lines += ["cvt.f32.f16 $0, l;", "cvt.f32.f16 $1, h;"]
    return "\n".join(["{", *lines, "}"])
