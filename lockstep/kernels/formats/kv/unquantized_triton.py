# mypy: ignore-errors
"""Device functions of the Unquantized quantizer, in Triton."""

import triton
import triton.language as tl

from lockstep.kernels.device.hadamard import rotate
from lockstep.kernels.formats.kv import KVDeviceFunctions


@triton.jit
def store_keys(x, qdata, scales, layer_constant, live, columns, D: tl.constexpr):
    """Rotate whole heads and store them in the model's dtype. See KVDeviceFunctions."""
    x = rotate(x, layer_constant, D)
    tl.store(qdata + columns, x.to(qdata.dtype.element_ty), mask=live & (columns < D))


@triton.jit
def store_values(x, qdata, scales, layer_constant, live, columns, D: tl.constexpr):
    """Rotate blocks of V_BLOCK elements and store them in their dtype. See KVDeviceFunctions."""
    x = rotate(x, layer_constant, min(D, 64))
    tl.store(qdata + columns, x.to(qdata.dtype.element_ty), mask=live & (columns < D))


@triton.jit
def load(qdata, scales, columns, live, D: tl.constexpr):
    """Load a tile of values. See KVDeviceFunctions."""
    return (tl.load(qdata + columns, mask=live & (columns < D), other=0.0),)


@triton.jit
def dequantize(loaded, columns, layer_constant, D: tl.constexpr):
    """Widen a tile of values to fp32. See KVDeviceFunctions."""
    return loaded[0].to(tl.float32)


KEYS = KVDeviceFunctions(store_keys, 1, load, dequantize)
VALUES = KVDeviceFunctions(store_values, 1, load, dequantize)
