# mypy: ignore-errors
"""Rounding to fp8 by integer operations, which give the same bits on every architecture."""

import triton
import triton.language as tl

INF_BITS = tl.constexpr(0x7F800000)
"""Bits of +inf in fp32. Those of a NaN are larger, those of any other magnitude smaller."""
SIGN_BIT = tl.constexpr(0x80)
NAN_BITS = tl.constexpr(0x7F)
MAX_E4M3_BITS = tl.constexpr(0x43E00000)
"""Bits of 448 in fp32: the largest number of e4m3fn."""
MAX_E5M2_BITS = tl.constexpr(0x47600000)
"""Bits of 57,344 in fp32: the largest finite number of e5m2."""


@triton.jit
def round_to_fp8(x, scaled_x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX_BITS: tl.constexpr):
    """Round scaled_x = x / scale, fp32, to fp8 -> int32.

    Normal numbers are rounded by adding just under half of the last kept bit, and one more where
    that bit is odd. Subnormal numbers are rounded by adding an fp32 number whose last bit is
    theirs.

    MANTISSA: mantissa bits of the type. BIAS: its exponent bias. MAX_BITS: bits of its largest
    number in fp32.
    """
    # Mantissa bits that are dropped.
    SHIFT: tl.constexpr = 23 - MANTISSA
    # fp32 number whose unit in the last place is the subnormal step of the type.
    MAGIC: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    MIN_NORMAL: tl.constexpr = (128 - BIAS) << 23
    REBIAS: tl.constexpr = (127 - BIAS) << 23
    HALF: tl.constexpr = (1 << (SHIFT - 1)) - 1
    not_finite = (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= INF_BITS
    bits = scaled_x.to(tl.int32, bitcast=True)
    # Saturates instead of overflowing to inf.
    magnitude = tl.minimum(bits & 0x7FFFFFFF, MAX_BITS)
    magic = tl.full(scaled_x.shape, MAGIC, tl.int32)
    small = magnitude.to(tl.float32, bitcast=True) + magic.to(tl.float32, bitcast=True)
    small = small.to(tl.int32, bitcast=True) - MAGIC
    large = (magnitude - REBIAS + HALF + ((magnitude >> SHIFT) & 1)) >> SHIFT
    # The sign of fp32 moves to bit 7.
    value = tl.where(magnitude < MIN_NORMAL, small, large) | ((bits >> 24) & SIGN_BIT)
    return tl.where(not_finite, NAN_BITS, value)
