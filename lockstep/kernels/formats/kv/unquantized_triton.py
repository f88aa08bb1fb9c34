# mypy: ignore-errors
"""plain.py in Triton."""

import triton
import triton.language as tl

from lockstep.kernels.device.hadamard import turned
from lockstep.kernels.formats.kv import KVDevice


@triton.jit
def store_keys(values, codes, numbers, constant, live, lanes, D: tl.constexpr):
    """See KVDevice."""
    x = turned(values, constant, D)
    tl.store(codes + lanes, x.to(codes.dtype.element_ty), mask=live & (lanes < D))


@triton.jit
def store_values(values, codes, numbers, constant, live, lanes, D: tl.constexpr):
    """See KVDevice."""
    x = turned(values, constant, min(D, 64))
    tl.store(codes + lanes, x.to(codes.dtype.element_ty), mask=live & (lanes < D))


@triton.jit
def fetch(codes, numbers, columns, live, D: tl.constexpr):
    """See KVDevice."""
    return (tl.load(codes + columns, mask=live & (columns < D), other=0.0),)


@triton.jit
def unpack(found, columns, constant, D: tl.constexpr):
    """See KVDevice."""
    return found[0].to(tl.float32)


KEYS = KVDevice(store_keys, 1, fetch, unpack)
VALUES = KVDevice(store_values, 1, fetch, unpack)
