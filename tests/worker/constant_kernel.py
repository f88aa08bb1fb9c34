"""A kernel that is compiled anew for every constant."""

import triton
import triton.language as tl


@triton.jit
def fill(x, value: tl.constexpr):
    tl.store(x, value)
