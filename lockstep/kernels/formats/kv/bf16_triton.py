# mypy: ignore-errors
"""Device functions of the bfloat16 format, in Triton.

Rounding uses integer operations: Triton's interpreter truncates where it casts to bf16.
"""

import triton
import triton.language as tl

from lockstep.kernels.formats.kv import KVDeviceFunctions
from lockstep.kernels.formats.kv.unquantized_triton import dequantize, load

INF_BITS = tl.constexpr(0x7F800000)
"""Bits of +inf in fp32. Those of a NaN are larger, those of any other magnitude smaller."""
NAN_BITS = tl.constexpr(0x7FC0)


@triton.jit
def store_bf16(x, qdata, scales, layer_constant, live, columns, D: tl.constexpr):
    """Round heads to bf16, to the nearest, ties to even, and store them. See KVDeviceFunctions."""
    bits = x.to(tl.int32, bitcast=True)
    # Adding half of the last kept bit, less one, and that bit rounds ties to even.
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    # The carry could turn a NaN into -0 or inf.
    rounded = tl.where((bits & 0x7FFFFFFF) > INF_BITS, NAN_BITS, rounded)
    tl.store(
        qdata + columns,
        rounded.to(tl.int16).to(tl.bfloat16, bitcast=True),
        mask=live & (columns < D),
    )


DEVICE = KVDeviceFunctions(store_bf16, 1, load, dequantize)
