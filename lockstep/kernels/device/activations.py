# mypy: ignore-errors
"""Sigmoid, SiLU, softplus and relu2 as Triton device functions of fp32 numbers, for every op.

The two divisions give different bits, so which of them a kernel uses is part of its op's numerics.
Gluon kernels cannot call these (their constants need a layout): attention/hopper.py has its own.
"""

import triton
import triton.language as tl

SOFTPLUS_LINEAR = tl.constexpr(20.0)
"""Above it softplus(x) is x, as in torch and lockstep.kernels.activations."""


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


@triton.jit
def softplus(x):
    """log(1 + exp(x)), and x itself where it is large.

    log1p(e) is log(1 + e) e / ((1 + e) - 1), which makes up for what 1 + e rounds off (Kahan).
    """
    e = tl.exp(tl.minimum(x, SOFTPLUS_LINEAR))
    kept = tl.where(1.0 + e == 1.0, 1.0, (1.0 + e) - 1.0)
    small = tl.where(1.0 + e == 1.0, e, tl.log(1.0 + e) * (e / kept))
    return tl.where(x > SOFTPLUS_LINEAR, x, small)


@triton.jit
def silu_product(gate, up, DTYPE: tl.constexpr):
    """[silu(gate)] * up of numbers of DTYPE, rounded twice: see lockstep.kernels.activations."""
    factor = silu(gate.to(tl.float32)).to(DTYPE)
    return (factor.to(tl.float32) * up.to(tl.float32)).to(DTYPE)


@triton.jit
def relu2(x):
    """max(x, 0)^2, NaN where x is."""
    positive = tl.where(x > 0, x, tl.where(x == x, 0.0, x))
    return positive * positive
