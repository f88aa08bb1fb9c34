# mypy: ignore-errors
"""Elementwise functions of vectors, from IEEE operations alone: equal bits on every CPU."""

import math

import numpy as np

from lockstep.kernels.simd.compiler import inline
from lockstep.kernels.simd.vectors import F32, fma, power_of_two, splat, vmax, vmin

_ROUNDER = F32(1.5 * 2.0**23)
"""Adding it rounds a small number to an integer, which is then in the low bits of the sum."""
_LOG2_E = F32(np.log2(np.e))
_LN2_HIGH = F32(0.693359375)
_LN2_LOW = F32(-2.12194440e-4)
_MAX_INPUT = F32(90.0)
_MIN_INPUT = F32(-110.0)
_HALF = F32(0.5)
_ONE = F32(1.0)


@inline
def exp(x):
    """Compute e^x within 1 ulp, with subnormal results; inf above 88.7 and NaN of NaN.

    x = n ln 2 + r with |r| <= ln 2 / 2; e^r is a polynomial of degree 7 (Cephes, expf).
    """
    # vmin and vmax keep their first argument's NaN.
    x = vmin(vmax(x, splat(_MIN_INPUT)), splat(_MAX_INPUT))
    n = fma(x, splat(_LOG2_E), splat(_ROUNDER)) - splat(_ROUNDER)
    r = fma(n, splat(-_LN2_HIGH), x)
    r = fma(n, splat(-_LN2_LOW), r)
    p = fma(splat(F32(1.9875691500e-4)), r, splat(F32(1.3981999507e-3)))
    p = fma(p, r, splat(F32(8.3334519073e-3)))
    p = fma(p, r, splat(F32(4.1665795894e-2)))
    p = fma(p, r, splat(F32(1.6666665459e-1)))
    p = fma(p, r, splat(F32(5.0000001201e-1)))
    p = fma(p, r * r, r) + splat(_ONE)
    # 2^n itself may be out of range where the product is not: it is applied in two halves.
    half = fma(n, splat(_HALF), splat(_ROUNDER))
    rest = (n - (half - splat(_ROUNDER))) + splat(_ROUNDER)
    return p * power_of_two(half) * power_of_two(rest)


@inline
def sigmoid(x):
    """Compute 1 / (1 + e^-x)."""
    one = splat(_ONE)
    return one / (one + exp(splat(F32(0.0)) - x))


@inline
def silu(x):
    """Compute x / (1 + e^-x)."""
    return x / (splat(_ONE) + exp(splat(F32(0.0)) - x))


@inline
def log1p_of_fraction(y):
    """Compute log(1 + y) of y in 0 .. 1 within 2 ulp: 2 atanh(s) of s = y / (2 + y) <= 1 / 3."""
    s = y / (y + splat(F32(2.0)))
    square = s * s
    p = fma(square, splat(F32(1 / 15)), splat(F32(1 / 13)))
    p = fma(p, square, splat(F32(1 / 11)))
    p = fma(p, square, splat(F32(1 / 9)))
    p = fma(p, square, splat(F32(1 / 7)))
    p = fma(p, square, splat(F32(1 / 5)))
    p = fma(p, square, splat(F32(1 / 3)))
    double = s + s
    return fma(double * square, p, double)


@inline
def softplus(x):
    """Compute log(1 + e^x) as max(x, 0) + log(1 + e^-|x|)."""
    zero = splat(F32(0.0))
    positive = vmax(x, zero)
    # -|x| of a NaN is NaN, since vmin keeps its first argument's.
    return positive + log1p_of_fraction(exp(vmin(x, zero - x)))


@inline
def inverse_sqrt(x):
    """Compute 1 / sqrt(x) of a number, with two roundings."""
    return _ONE / F32(math.sqrt(x))
