# mypy: ignore-errors
"""bf16.py in Triton, by integer operations: its interpreter cuts numbers off where it casts."""

import triton
import triton.language as tl

from lockstep.kernels.formats.kv import KVDevice
from lockstep.kernels.formats.kv.unquantized_triton import fetch, unpack

INFINITE = tl.constexpr(0x7F800000)
"""The bits of +inf in fp32: those of a NaN are larger, of every other size smaller."""
NAN = tl.constexpr(0x7FC0)


@triton.jit
def store_bf16(values, codes, numbers, constant, live, lanes, D: tl.constexpr):
    """See KVDevice."""
    bits = values.to(tl.int32, bitcast=True)
    code = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    code = tl.where((bits & 0x7FFFFFFF) > INFINITE, NAN, code)
    tl.store(
        codes + lanes, code.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=live & (lanes < D)
    )


DEVICE = KVDevice(store_bf16, 1, fetch, unpack)
