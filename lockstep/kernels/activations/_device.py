# mypy: ignore-errors
"""Sigmoid and SiLU as Triton device functions, of fp32 numbers, for the kernels of every op.

The two divisions give different bits, so which of them a kernel uses is part of its op's numerics.
Gluon kernels cannot call these (their constants need a layout): attention/hopper.py has its own.
"""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), divided as IEEE does: of attention's output gates."""
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    """x / (1 + exp(-x)), divided as IEEE does: of the gated MLP."""
    return tl.div_rn(x, 1.0 + tl.exp(-x))


@triton.jit
def sigmoid_approx(x):
    """sigmoid by div.full.f32, up to 2 ulp off (PTX ISA) and faster: of the delta rule's beta."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu_approx(x):
    """silu by div.full.f32: of convolutions and gated norms."""
    return x / (1.0 + tl.exp(-x))
