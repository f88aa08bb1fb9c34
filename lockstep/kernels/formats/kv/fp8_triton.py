# mypy: ignore-errors
"""Device functions of the fp8 formats, in Triton.

Stores use integer operations, which give the same bits on every architecture. Where there is no
scale, or a power of two, inline assembly dequantizes four values at a time to bf16.
"""

import triton
import triton.language as tl

from lockstep.kernels.device.dequantize import e4m3_to_fp32, split_16bit
from lockstep.kernels.device.fp8 import MAX_E4M3_BITS, MAX_E5M2_BITS, round_to_fp8
from lockstep.kernels.formats.kv import KVDeviceFunctions, fp8
from lockstep.kernels.formats.kv.bytes_triton import interleave, load_words, load_words_and_scales

OVERFLOW_BITS = tl.constexpr(fp8.OVERFLOW_BITS)
MIN_EXPONENT = tl.constexpr(fp8.MIN_EXPONENT)
ROUND_UP_BITS = tl.constexpr(fp8.ROUND_UP_BITS)
E4M3_TO_BF16 = """
{
    .reg .b32 m, n, a, b, none, large;
    mov.b32 large, 0x7b807b80;
    mov.b32 none, 0x80008000;
    and.b32 m, $2, 0x7f7f7f7f;
    add.u32 n, m, 0x01010101;
    prmt.b32 a, m, 0, 0x4140;
    shl.b32 a, a, 4;
    prmt.b32 b, $2, 0, 0x1404;
    lop3.b32 a, b, none, a, 0xea;
    prmt.b32 b, n, 0, 0x9988;
    or.b32 b, b, none;
    fma.rn.bf16x2 $0, a, large, b;
    prmt.b32 a, m, 0, 0x4342;
    shl.b32 a, a, 4;
    prmt.b32 b, $2, 0, 0x3424;
    lop3.b32 a, b, none, a, 0xea;
    prmt.b32 b, n, 0, 0xbbaa;
    or.b32 b, b, none;
    fma.rn.bf16x2 $1, a, large, b;"""
"""Opening of a PTX block: four e4m3 values -> two pairs of bf16, in $0 and $1. Shifted by 4, the
bits of e4m3 are those of a bf16 that is 2^120 times smaller, subnormal numbers included; an fma
restores the factor. Its addend is -0, or NaN where the value is one."""
E4M3_TO_BF16_PTX = tl.constexpr(E4M3_TO_BF16 + "}")

E4M3_TO_FP32 = """
{
    .reg .b16 l, h, a, b, c, d;
    .reg .b32 s, t;
    .reg .f32 e, f, g, i;
    mov.b32 {l, h}, %s;
    cvt.rn.f16x2.e4m3x2 s, l;
    cvt.rn.f16x2.e4m3x2 t, h;
    mov.b32 {a, b}, s;
    mov.b32 {c, d}, t;
    cvt.f32.f16 e, a;
    cvt.f32.f16 f, b;
    cvt.f32.f16 g, c;
    cvt.f32.f16 i, d;"""
"""Opening of a PTX block: four e4m3 values -> fp32 in e, f, g, i, by the conversions of sm_89 and
later."""
E4M3_TO_BF16_NATIVE = (
    E4M3_TO_FP32 % "$2"
    + """
    cvt.rn.bf16x2.f32 $0, f, e;
    cvt.rn.bf16x2.f32 $1, i, g;"""
)
"""Opening of a PTX block: four e4m3 values -> two pairs of bf16, exact at each step."""
E4M3_TO_BF16_NATIVE_PTX = tl.constexpr(E4M3_TO_BF16_NATIVE + "}")
MULTIPLY_SCALE = """
    .reg .b32 zero;
    mov.b32 zero, 0x80008000;
    fma.rn.bf16x2 $0, $0, $3, zero;
    fma.rn.bf16x2 $1, $1, $3, zero;
}
"""
"""End of such a block: multiply both pairs by $3, a scale that a word contains twice. The addend -0
keeps the sign of zeros."""
SCALED_E4M3_PTX = tl.constexpr(E4M3_TO_BF16 + MULTIPLY_SCALE)
SCALED_E4M3_NATIVE_PTX = tl.constexpr(E4M3_TO_BF16_NATIVE + MULTIPLY_SCALE)
E4M3_TO_FP32_PTX = tl.constexpr(
    E4M3_TO_FP32 % "$4"
    + """
    mov.f32 $0, e;
    mov.f32 $1, f;
    mov.f32 $2, g;
    mov.f32 $3, i;
}
"""
)
"""PTX block: four e4m3 values -> four fp32 values."""


@triton.jit
def _divide_by_scale(x, layer_constant):
    """Return x / layer_constant, correctly rounded; x where there is no constant."""
    if layer_constant is None:
        return x
    else:
        return tl.div_rn(x, tl.zeros_like(x) + layer_constant)


@triton.jit
def store_e4m3(x, qdata, scales, layer_constant, live, columns, D: tl.constexpr):
    """Quantize heads to e4m3 with the static scale and store them. See KVDeviceFunctions."""
    value = round_to_fp8(x, _divide_by_scale(x, layer_constant), 3, 7, MAX_E4M3_BITS)
    tl.store(qdata + columns, value.to(tl.uint8), mask=live & (columns < D))


@triton.jit
def store_e5m2(x, qdata, scales, layer_constant, live, columns, D: tl.constexpr):
    """Quantize heads to e5m2 with the static scale and store them. See KVDeviceFunctions."""
    value = round_to_fp8(x, _divide_by_scale(x, layer_constant), 2, 15, MAX_E5M2_BITS)
    tl.store(qdata + columns, value.to(tl.uint8), mask=live & (columns < D))


@triton.jit
def store_token_e4m3(x, qdata, scales, layer_constant, live, columns, D: tl.constexpr):
    """Quantize latents to e4m3 with a power-of-two scale per token. See KVDeviceFunctions."""
    in_head = live & (columns < D)
    max_magnitude = tl.max(tl.where(in_head, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0), 1)[
        :, None
    ]
    overflow = max_magnitude >= OVERFLOW_BITS
    exponent = tl.where(
        overflow, 127, tl.maximum(((max_magnitude + ROUND_UP_BITS) >> 23) - 8, MIN_EXPONENT)
    )
    # 254 - e is the biased exponent of 2^-e: the division is an exact product.
    scaled = tl.where(overflow, 0.0, x * ((254 - exponent) << 23).to(tl.float32, bitcast=True))
    value = round_to_fp8(scaled, scaled, 3, 7, MAX_E4M3_BITS)
    tl.store(qdata + columns, value.to(tl.uint8), mask=in_head)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    tl.store(scales, tl.where(overflow, float("nan"), scale), mask=live)


@triton.jit
def _dequantize_words(word, DECODE: tl.constexpr):
    """Decode words of four values to [T, 4 W] fp32."""
    return interleave(
        DECODE(word & 0xFF), DECODE((word >> 8) & 0xFF), DECODE((word >> 16) & 0xFF),
        DECODE((word >> 24) & 0xFF),
    )  # fmt: skip


@triton.jit
def _dequantize(word, layer_constant, DECODE: tl.constexpr):
    """Decode words of four values to [T, 4 W] fp32, times the layer's scale if it has one."""
    value = _dequantize_words(word, DECODE)
    return value if layer_constant is None else value * layer_constant


@triton.jit
def _interleave_pairs(p0, p1):
    """Interleave the two bf16 pairs of each word [T, W] into [T, 4 W]."""
    l0, h0 = split_16bit(p0, tl.bfloat16)
    l1, h1 = split_16bit(p1, tl.bfloat16)
    return interleave(l0, h0, l1, h1)


@triton.jit
def _words_to_bf16(word, PTX: tl.constexpr):
    """Convert words of four values to [T, 4 W] bf16, by assembly that returns two pairs."""
    # outputs are early-clobber (&): written before inputs are read
    p0, p1 = tl.inline_asm_elementwise(
        PTX, "=&r,=&r,r", [word], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
    )
    return _interleave_pairs(p0, p1)


@triton.jit
def dequantize_e4m3(loaded, columns, layer_constant, D: tl.constexpr):
    """Dequantize e4m3 to fp32. See KVDeviceFunctions."""
    return _dequantize(loaded[0], layer_constant, e4m3_to_fp32)


@triton.jit
def dequantize_e4m3_bf16(loaded, columns, layer_constant, D: tl.constexpr):
    """Dequantize e4m3 to bf16 by integer assembly, for any architecture. See KVDeviceFunctions."""
    if layer_constant is None:
        return _words_to_bf16(loaded[0], E4M3_TO_BF16_PTX)
    else:
        return dequantize_e4m3(loaded, columns, layer_constant, D).to(tl.bfloat16)


@triton.jit
def dequantize_e4m3_native(loaded, columns, layer_constant, D: tl.constexpr):
    """Dequantize e4m3 to bf16 by the conversions of sm_89 and later. See KVDeviceFunctions."""
    if layer_constant is None:
        return _words_to_bf16(loaded[0], E4M3_TO_BF16_NATIVE_PTX)
    else:
        # A scale that is no power of two must multiply in fp32: one rounding, as in the reference.
        v0, v1, v2, v3 = tl.inline_asm_elementwise(
            E4M3_TO_FP32_PTX, "=&f,=&f,=&f,=&f,r", [loaded[0]],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
        return (interleave(v0, v1, v2, v3) * layer_constant).to(tl.bfloat16)


@triton.jit
def dequantize_token(loaded, columns, layer_constant, D: tl.constexpr):
    """Dequantize e4m3 with per-token scales to fp32. See KVDeviceFunctions."""
    return _dequantize_words(loaded[0], e4m3_to_fp32) * loaded[1]


@triton.jit
def _scaled_words_to_bf16(loaded, PTX: tl.constexpr):
    """Convert words and their token's scale to [T, 4 W] bf16, by assembly with a product.

    loaded: of load_words_and_scales.
    """
    bits = loaded[1].to(tl.int32, bitcast=True)
    # A power of two, or NaN, is exact in its upper half: that half, twice in a word, is a bf16
    # pair.
    scale_pair = ((bits >> 16) & 0xFFFF) | (bits & -65536)
    p0, p1 = tl.inline_asm_elementwise(
        PTX, "=&r,=&r,r,r", [loaded[0], scale_pair], dtype=(tl.int32, tl.int32), is_pure=True,
        pack=1,
    )  # fmt: skip
    return _interleave_pairs(p0, p1)


@triton.jit
def dequantize_token_bf16(loaded, columns, layer_constant, D: tl.constexpr):
    """Dequantize e4m3 with per-token scales by integer assembly. See KVDeviceFunctions."""
    return _scaled_words_to_bf16(loaded, SCALED_E4M3_PTX)


@triton.jit
def dequantize_token_native(loaded, columns, layer_constant, D: tl.constexpr):
    """Dequantize e4m3 with per-token scales by native conversions. See KVDeviceFunctions."""
    return _scaled_words_to_bf16(loaded, SCALED_E4M3_NATIVE_PTX)


@triton.jit
def _decode_e5m2(value):
    """Decode e5m2, the upper byte of an fp16: int32 -> fp32."""
    return (value << 8).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def dequantize_e5m2(loaded, columns, layer_constant, D: tl.constexpr):
    """Dequantize e5m2 to fp32. See KVDeviceFunctions."""
    return _dequantize(loaded[0], layer_constant, _decode_e5m2)


E4M3 = KVDeviceFunctions(
    store_e4m3, 4, load_words, dequantize_e4m3, dequantize_e4m3_bf16, dequantize_e4m3_native
)
E5M2 = KVDeviceFunctions(store_e5m2, 4, load_words, dequantize_e5m2)
TOKEN_E4M3 = KVDeviceFunctions(
    store_token_e4m3, 4, load_words_and_scales, dequantize_token, dequantize_token_bf16,
    dequantize_token_native,
)  # fmt: skip
