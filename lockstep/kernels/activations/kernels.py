# mypy: ignore-errors
"""silu_mul and relu2 in Triton: one program per row and BLOCK of its columns. Nothing is summed."""

import triton
import triton.language as tl

from lockstep.kernels.device.activations import relu2 as relu2_of
from lockstep.kernels.device.activations import silu_product


@triton.jit
def silu_mul_kernel(gate_up, out, stride, N: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK of one row's N products."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate_up += row * stride + lanes
    gate = tl.load(gate_up, mask=lanes < N, other=0.0)
    up = tl.load(gate_up + N, mask=lanes < N, other=0.0)
    product = silu_product(gate, up, out.dtype.element_ty)
    tl.store(out + row * N + lanes, product, mask=lanes < N)


@triton.jit
def relu2_kernel(x, out, stride, N: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK of one row's N squares."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + row * stride + lanes, mask=lanes < N, other=0.0).to(tl.float32)
    tl.store(out + row * N + lanes, relu2_of(values).to(out.dtype.element_ty), mask=lanes < N)
