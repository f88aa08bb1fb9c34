# mypy: ignore-errors
"""silu_mul and relu2 in Triton: a CTA per row and BLOCK of columns. Both are elementwise."""

import triton
import triton.language as tl

from lockstep.kernels.device.activations import relu2 as relu2_of
from lockstep.kernels.device.activations import silu_product
from lockstep.kernels.device.dependent_launch import pdl_start


@triton.jit
def silu_mul_kernel(gate_up, out, stride, N: tl.constexpr, BLOCK: tl.constexpr):
    """Compute BLOCK of the N outputs of one row of silu_mul. stride: between rows."""
    pdl_start()
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate_up += row * stride + offs
    # gate and up are halves of one row: both loads are coalesced, of 16 bytes per thread.
    gate = tl.load(gate_up, mask=offs < N, other=0.0)
    up = tl.load(gate_up + N, mask=offs < N, other=0.0)
    product = silu_product(gate, up, out.dtype.element_ty)
    tl.store(out + row * N + offs, product, mask=offs < N)


@triton.jit
def relu2_kernel(x, out, stride, N: tl.constexpr, BLOCK: tl.constexpr):
    """Compute BLOCK of the N outputs of one row of relu2. stride: between rows."""
    pdl_start()
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + row * stride + offs, mask=offs < N, other=0.0).to(tl.float32)
    tl.store(out + row * N + offs, relu2_of(values).to(out.dtype.element_ty), mask=offs < N)
