# mypy: ignore-errors
"""Device functions of the int8_per_token_head format, in Triton.

A maximum is exact in every order, so no layout enters the bits.
"""

import triton
import triton.language as tl

from lockstep.kernels.formats.kv import KVDeviceFunctions
from lockstep.kernels.formats.kv.bytes_triton import interleave, load_words_and_scales

INF_BITS = tl.constexpr(0x7F800000)
"""Bits of +inf in fp32. Those of a NaN are larger, those of any other magnitude smaller."""
ROUND_MAGIC = tl.constexpr(12582912.0)
"""1.5 * 2^23. Adding it rounds a number to an integer, ties to even."""


@triton.jit
def store_int8(x, qdata, scales, layer_constant, live, columns, D: tl.constexpr):
    """Quantize heads to int8 and store them with their scales. See KVDeviceFunctions."""
    in_head = live & (columns < D)
    # Integer comparison orders magnitudes, with inf and NaN above all numbers.
    magnitude = tl.where(in_head, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    max_magnitude = tl.max(magnitude, 1)[:, None]
    finite = max_magnitude < INF_BITS
    max_value = max_magnitude.to(tl.float32, bitcast=True)
    # Correctly rounded divisions: the reference's bits on every architecture.
    scale = tl.div_rn(max_value, tl.full(max_value.shape, 127.0, tl.float32))
    # A head of zeros is divided by 1, one with inf or NaN stores zeros and a NaN scale.
    divisor = tl.where((scale > 0) & finite, scale, 1.0)
    value = tl.div_rn(tl.where(finite, x, 0.0), tl.zeros_like(x) + divisor)
    value = tl.minimum(tl.maximum((value + ROUND_MAGIC) - ROUND_MAGIC, -127.0), 127.0)
    tl.store(qdata + columns, value.to(tl.int32).to(tl.int8), mask=in_head)
    tl.store(scales, tl.where(finite, scale, float("nan")), mask=live)


@triton.jit
def dequantize(loaded, columns, layer_constant, D: tl.constexpr):
    """Dequantize words of four bytes [T, W] to [T, 4 W]. See KVDeviceFunctions."""
    word = loaded[0]
    scale = loaded[1]
    return interleave(
        # Arithmetic shifts sign-extend each byte.
        (word << 24 >> 24).to(tl.float32) * scale, (word << 16 >> 24).to(tl.float32) * scale,
        (word << 8 >> 24).to(tl.float32) * scale, (word >> 24).to(tl.float32) * scale,
    )  # fmt: skip


DEVICE = KVDeviceFunctions(store_int8, 4, load_words_and_scales, dequantize)
