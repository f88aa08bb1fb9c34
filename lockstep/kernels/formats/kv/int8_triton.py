# mypy: ignore-errors
"""int8.py in Triton. A maximum is exact in every order, so no layout enters."""

import triton
import triton.language as tl

from lockstep.kernels.formats.kv import KVDevice
from lockstep.kernels.formats.kv.bytes_triton import fetch_scaled, in_order

INFINITE = tl.constexpr(0x7F800000)
"""The bits of +inf in fp32: those of a NaN are larger, of every other size smaller."""
WHOLE = tl.constexpr(12582912.0)
"""1.5 x 2^23: what is added to it is rounded to a whole number, ties to even."""


@triton.jit
def store_int8(values, codes, numbers, constant, live, lanes, D: tl.constexpr):
    """See KVDevice."""
    own = live & (lanes < D)
    size = tl.where(own, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    most = tl.max(size, 1)[:, None]
    finite = most < INFINITE
    largest = most.to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32))
    divisor = tl.where((scale > 0) & finite, scale, 1.0)
    code = tl.div_rn(tl.where(finite, values, 0.0), tl.zeros_like(values) + divisor)
    code = tl.minimum(tl.maximum((code + WHOLE) - WHOLE, -127.0), 127.0)
    tl.store(codes + lanes, code.to(tl.int32).to(tl.int8), mask=own)
    tl.store(numbers, tl.where(finite, scale, float("nan")), mask=live)


@triton.jit
def unpack(found, columns, constant, D: tl.constexpr):
    """See KVDevice."""
    word = found[0]
    number = found[1]
    return in_order(
        (word << 24 >> 24).to(tl.float32) * number, (word << 16 >> 24).to(tl.float32) * number,
        (word << 8 >> 24).to(tl.float32) * number, (word >> 24).to(tl.float32) * number,
    )  # fmt: skip


DEVICE = KVDevice(store_int8, 4, fetch_scaled, unpack)
