# mypy: ignore-errors
"""Sigmoid, SiLU, softplus and relu2 of fp32 tiles in Triton.

Each of sigmoid and silu has a version with IEEE division and one with the approximate division of
the hardware. Their bits differ, so a kernel's choice between them is part of its op's numerics.
Gluon kernels cannot call these functions, since constants in Gluon need a layout.
"""

import triton
import triton.language as tl

SOFTPLUS_LINEAR = tl.constexpr(20.0)
"""Threshold above which softplus(x) is x, as in torch and lockstep.kernels.activations."""


@triton.jit
def sigmoid(x):
    """Compute 1 / (1 + exp(-x)) with IEEE division, for attention's output gates."""
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    """Compute x / (1 + exp(-x)) with IEEE division, for gated MLPs."""
    return tl.div_rn(x, 1.0 + tl.exp(-x))


@triton.jit
def sigmoid_approx(x):
    """Compute sigmoid with approximate division, for the beta of Gated DeltaNet."""
    # Triton compiles / to div.full.f32: faster, with an error of up to 2 ulp (PTX ISA).
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu_approx(x):
    """Compute silu with approximate division (div.full.f32), for convolutions and gated norms."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """Compute log(1 + exp(x)), and x itself above SOFTPLUS_LINEAR."""
    # Triton has no log1p. log1p(e) = log(1 + e) * e / ((1 + e) - 1) compensates the rounding of
    # 1 + e (Kahan); where 1 + e rounds to 1, log1p(e) is e.
    e = tl.exp(tl.minimum(x, SOFTPLUS_LINEAR))
    rounded = tl.where(1.0 + e == 1.0, 1.0, (1.0 + e) - 1.0)
    small = tl.where(1.0 + e == 1.0, e, tl.log(1.0 + e) * (e / rounded))
    return tl.where(x > SOFTPLUS_LINEAR, x, small)


@triton.jit
def silu_product(gate, up, DTYPE: tl.constexpr):
    """Compute silu(gate) * up of tiles of DTYPE, with silu rounded to DTYPE first.

    Two roundings, as in the contract silu_mul of lockstep.kernels.activations.
    """
    factor = silu(gate.to(tl.float32)).to(DTYPE)
    return (factor.to(tl.float32) * up.to(tl.float32)).to(DTYPE)


@triton.jit
def relu2(x):
    """Compute max(x, 0)^2, with NaN for NaN."""
    # tl.maximum would return the number instead of NaN.
    positive = tl.where(x > 0, x, tl.where(x == x, 0.0, x))
    return positive * positive
