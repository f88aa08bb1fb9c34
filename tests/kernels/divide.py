# mypy: ignore-errors
"""A kernel that divides by the function of quantize_rows."""

import triton
import triton.language as tl

from lockstep.kernels.fp8_linear.kernels import divide


@triton.jit
def divide_kernel(x_ptr, scale_ptr, out_ptr, SIZE: tl.constexpr):
    """Store x / scale, SIZE numbers each."""
    index = tl.arange(0, SIZE)
    tl.store(out_ptr + index, divide(tl.load(x_ptr + index), tl.load(scale_ptr + index)))
