# mypy: ignore-errors
"""fp8.py in Triton, by integer operations: any architecture, and the same bits on each.

Where there is no scale, or a power of two, codes are unpacked to bf16 by assembly, four at a time.
"""

import triton
import triton.language as tl

from lockstep.kernels.device.dequantize import e4m3_to_fp32, split_16bit
from lockstep.kernels.formats.kv import KVDevice
from lockstep.kernels.formats.kv.bytes_triton import fetch_scaled, fetch_words, in_order
from lockstep.kernels.formats.kv.fp8 import LARGE as LARGE_SIZE
from lockstep.kernels.formats.kv.fp8 import LEAST as LEAST_EXPONENT
from lockstep.kernels.formats.kv.fp8 import WHOLE as TO_WHOLE

INFINITE = tl.constexpr(0x7F800000)
"""The bits of +inf in fp32: those of a NaN are larger, of every other size smaller."""
SIGN = tl.constexpr(0x80)
NAN = tl.constexpr(0x7F)
LARGE = tl.constexpr(LARGE_SIZE)
LEAST = tl.constexpr(LEAST_EXPONENT)
WHOLE = tl.constexpr(TO_WHOLE)
BITWISE = """
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
"""Opens a block: four codes of e4m3 -> their two pairs in bf16. A code's bits are those of a bf16
that is 2^120 times smaller, subnormal ones too; -0 is added, or NaN where the code is one."""
FOUR_E4M3 = tl.constexpr(BITWISE + "}")

TO_FP32 = """
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
"""Opens a block: four codes of e4m3 -> fp32 in e, f, g, i, by conversions of sm_89 and later."""
NATIVE = (
    TO_FP32 % "$2"
    + """
    cvt.rn.bf16x2.f32 $0, f, e;
    cvt.rn.bf16x2.f32 $1, i, g;"""
)
"""Opens a block: four codes of e4m3 -> their two pairs in bf16, exact on the way."""
NATIVE_E4M3 = tl.constexpr(NATIVE + "}")
SCALED = """
    .reg .b32 zero;
    mov.b32 zero, 0x80008000;
    fma.rn.bf16x2 $0, $0, $3, zero;
    fma.rn.bf16x2 $1, $1, $3, zero;
}
"""
"""Ends such a block: both pairs times a number that stands twice in a word; -0 is added."""
SCALED_E4M3 = tl.constexpr(BITWISE + SCALED)
SCALED_NATIVE_E4M3 = tl.constexpr(NATIVE + SCALED)
WIDE_E4M3 = tl.constexpr(
    TO_FP32 % "$4"
    + """
    mov.f32 $0, e;
    mov.f32 $1, f;
    mov.f32 $2, g;
    mov.f32 $3, i;
}
"""
)
"""Four codes of e4m3 -> four numbers in fp32."""


@triton.jit
def _encode(x, y, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MOST: tl.constexpr):
    """y = x / scale, fp32 -> codes in int32. MANTISSA, BIAS: of the type; MOST: the bits of its
    largest number in fp32.

    Normal numbers are rounded by adding just under half of the last bit that stays, and one more
    where that is odd; subnormal ones by adding a number of fp32 whose last bit is theirs.
    """
    SHIFT: tl.constexpr = 23 - MANTISSA
    MAGIC: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    LEAST: tl.constexpr = (128 - BIAS) << 23
    REBIAS: tl.constexpr = (127 - BIAS) << 23
    HALF: tl.constexpr = (1 << (SHIFT - 1)) - 1
    infinite = (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= INFINITE
    bits = y.to(tl.int32, bitcast=True)
    size = tl.minimum(bits & 0x7FFFFFFF, MOST)
    magic = tl.full(y.shape, MAGIC, tl.int32)
    small = size.to(tl.float32, bitcast=True) + magic.to(tl.float32, bitcast=True)
    small = small.to(tl.int32, bitcast=True) - MAGIC
    large = (size - REBIAS + HALF + ((size >> SHIFT) & 1)) >> SHIFT
    code = tl.where(size < LEAST, small, large) | ((bits >> 24) & SIGN)
    return tl.where(infinite, NAN, code)


@triton.jit
def _scaled(values, constant):
    """values / constant, correctly rounded; values where there is no constant."""
    if constant is None:
        return values
    else:
        return tl.div_rn(values, tl.zeros_like(values) + constant)


@triton.jit
def store_e4m3(values, codes, numbers, constant, live, lanes, D: tl.constexpr):
    """See KVDevice."""
    code = _encode(values, _scaled(values, constant), 3, 7, 0x43E00000)
    tl.store(codes + lanes, code.to(tl.uint8), mask=live & (lanes < D))


@triton.jit
def store_e5m2(values, codes, numbers, constant, live, lanes, D: tl.constexpr):
    """See KVDevice."""
    code = _encode(values, _scaled(values, constant), 2, 15, 0x47600000)
    tl.store(codes + lanes, code.to(tl.uint8), mask=live & (lanes < D))


@triton.jit
def store_token_e4m3(values, codes, numbers, constant, live, lanes, D: tl.constexpr):
    """See KVDevice."""
    own = live & (lanes < D)
    most = tl.max(tl.where(own, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0), 1)[:, None]
    lost = most >= LARGE
    exponent = tl.where(lost, 127, tl.maximum(((most + WHOLE) >> 23) - 8, LEAST))
    scaled = tl.where(lost, 0.0, values * ((254 - exponent) << 23).to(tl.float32, bitcast=True))
    code = _encode(scaled, scaled, 3, 7, 0x43E00000)
    tl.store(codes + lanes, code.to(tl.uint8), mask=own)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    tl.store(numbers, tl.where(lost, float("nan"), scale), mask=live)


@triton.jit
def _four(word, DECODE: tl.constexpr):
    """Words of four codes -> [T, 4 W] fp32."""
    return in_order(
        DECODE(word & 0xFF), DECODE((word >> 8) & 0xFF), DECODE((word >> 16) & 0xFF),
        DECODE((word >> 24) & 0xFF),
    )  # fmt: skip


@triton.jit
def _unpack(word, constant, DECODE: tl.constexpr):
    """Words of four codes -> [T, 4 W] fp32, times the layer's scale where it has one."""
    value = _four(word, DECODE)
    return value if constant is None else value * constant


@triton.jit
def _pairs(p0, p1):
    """Both pairs of each word -> [T, 4 W] in bf16."""
    l0, h0 = split_16bit(p0, tl.bfloat16)
    l1, h1 = split_16bit(p1, tl.bfloat16)
    return in_order(l0, h0, l1, h1)


@triton.jit
def _unpack_pairs(word, TEXT: tl.constexpr):
    """Words of four codes -> [T, 4 W] in bf16, by assembly that gives two pairs."""
    p0, p1 = tl.inline_asm_elementwise(
        TEXT, "=&r,=&r,r", [word], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
    )
    return _pairs(p0, p1)


@triton.jit
def unpack_e4m3(found, columns, constant, D: tl.constexpr):
    """See KVDevice."""
    return _unpack(found[0], constant, e4m3_to_fp32)


@triton.jit
def unpack_e4m3_bf16(found, columns, constant, D: tl.constexpr):
    """See KVDevice."""
    if constant is None:
        return _unpack_pairs(found[0], FOUR_E4M3)
    else:
        return unpack_e4m3(found, columns, constant, D).to(tl.bfloat16)


@triton.jit
def unpack_e4m3_native(found, columns, constant, D: tl.constexpr):
    """See KVDevice."""
    if constant is None:
        return _unpack_pairs(found[0], NATIVE_E4M3)
    else:
        v0, v1, v2, v3 = tl.inline_asm_elementwise(
            WIDE_E4M3, "=&f,=&f,=&f,=&f,r", [found[0]],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
        return (in_order(v0, v1, v2, v3) * constant).to(tl.bfloat16)


@triton.jit
def unpack_token(found, columns, constant, D: tl.constexpr):
    """See KVDevice."""
    return _four(found[0], e4m3_to_fp32) * found[1]


@triton.jit
def _unpack_scaled(found, TEXT: tl.constexpr):
    """What fetch_scaled gave -> [T, 4 W] in bf16, by assembly that takes the scale, too. A power of
    two, or NaN, is its upper half in bf16."""
    bits = found[1].to(tl.int32, bitcast=True)
    number = ((bits >> 16) & 0xFFFF) | (bits & -65536)
    p0, p1 = tl.inline_asm_elementwise(
        TEXT, "=&r,=&r,r,r", [found[0], number], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
    )
    return _pairs(p0, p1)


@triton.jit
def unpack_token_bf16(found, columns, constant, D: tl.constexpr):
    """See KVDevice."""
    return _unpack_scaled(found, SCALED_E4M3)


@triton.jit
def unpack_token_native(found, columns, constant, D: tl.constexpr):
    """See KVDevice."""
    return _unpack_scaled(found, SCALED_NATIVE_E4M3)


@triton.jit
def _decode_e5m2(code):
    """An e5m2 is the upper byte of an fp16: int32 -> fp32."""
    return (code << 8).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def unpack_e5m2(found, columns, constant, D: tl.constexpr):
    """See KVDevice."""
    return _unpack(found[0], constant, _decode_e5m2)


E4M3 = KVDevice(store_e4m3, 4, fetch_words, unpack_e4m3, unpack_e4m3_bf16, unpack_e4m3_native)
E5M2 = KVDevice(store_e5m2, 4, fetch_words, unpack_e5m2)
TOKEN_E4M3 = KVDevice(
    store_token_e4m3, 4, fetch_scaled, unpack_token, unpack_token_bf16, unpack_token_native
)
